"""Reports made by hand: what the views are tested on, without the engine."""

from remat_magic.records import Equation, Origin, Program, ProgramLine, Reader, Report, Residual, Site, SourceSpan
from remat_magic.views.headline import notes_html, totals_html
from remat_magic.views.listing import listing_html
from remat_magic.views.report_tables import recomputed_html, residuals_html

EVIL = "<img src=x onerror=alert(1)>"


def span(line, expression, *, cell=3, function="layer"):
    text = f"    h = {expression}"
    return SourceSpan("/tmp/ipykernel_7/1.py", function, line, 8, line, 8 + len(expression), cell, text)


SIN, DOT = span(4, "jnp.sin(W @ x)"), span(4, "W @ x")

READER = Reader("mul", "sin", SIN)
AGAIN = Reader("dot_general", "dot_general", DOT, recomputation=True)


def small(**changes):
    """A layer whose sin is kept, one named value of it, an argument, and three operations done again."""
    fields = {
        "policy": "dots_saveable",
        "at": "function",
        "residuals": (
            Residual("f32", (4,), 16, "argument", argument="x", needed_by=(AGAIN,)),
            Residual("f32", (5,), 20, "intermediate", "cos", source=SIN, needed_by=(READER,)),
            Residual("f32", (6, 1000), 24000, "intermediate", "sin", "a", source=SIN, path=("scan x12", "block"),
                     needed_by=(READER, AGAIN, Reader("neg")),
                     origins=(Origin("sin", SIN), Origin("tanh", span(9, "jnp.tanh(x)")))),
            Residual("f32", (2,), 8, "offloaded", "dot_general", "b", source=DOT, memory_space="pinned_host"),
        ),
        "recomputed": (
            Equation("dot_general", ("f32[5]",), 40, 60, 1, DOT, (), True),
            Equation("dot_general", ("f32[5]",), 40, 60, 1, DOT, (), True),
            Equation("cos", ("f32[5]",), None, None, None, SIN, ("while",), False, "c"),
        ),
        "forward": Program(
            (ProgramLine("{ lambda ; a:f32[4]. let"), ProgramLine("    b:f32[5] = sin a", SIN, "sin", (("b", 1),))), 1
        ),
        "backward": Program(
            (
                ProgramLine("{ lambda ; b:f32[5]. let", residuals=(("b", 1),)),
                ProgramLine("    c:f32[5] = dot_general[", DOT, "dot_general", (), "repeated", equation=0),
                ProgramLine("    d:f32[5] = cos b", SIN, "cos", (("b", 1),), "deferred", equation=1),
            ),
            2,
        ),
        "sites": (Site("layer:4", "layer", 12, "nothing_saveable", DOT),),
        "names": ("a", "b", "c"),
        "code": "f = jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)",
        "function": "loss",
        "signature": "loss(x f32[4]) -> f32[]",
        "wrt": ("x",),
        "notes": ("'a' is saved, yet its matmul is repeated.",),
        "forward_flops": 1000,
        "peak_bytes": 412,
        "uncosted": ("cos",),
    }  # fmt: skip
    return Report(**{**fields, **changes})


def evil():
    """The same text, which would run a script, wherever a report holds text."""
    where = SourceSpan(EVIL, EVIL, 1, 0, 1, len(EVIL), None, EVIL)
    reader = Reader(EVIL, EVIL, where, (EVIL,))
    return Report(
        policy=EVIL,
        at=EVIL,
        residuals=(
            Residual(EVIL, (1,), 4, "intermediate", EVIL, EVIL, None, where, (EVIL,), None, (reader,) * 3,
                     (Origin(EVIL, where, (EVIL,), 1, EVIL, EVIL), Origin(EVIL, where, (EVIL,), 1, EVIL, EVIL)), EVIL),
            Residual("f32", (), 4, "argument", argument=EVIL, needed_by=(reader, Reader("x"), Reader("y"))),
        ),
        recomputed=(Equation(EVIL, (EVIL,), 1, 1, 1, where, (EVIL,), True, EVIL),),
        forward=Program((ProgramLine(f"{EVIL} = a", where, EVIL, (("a", 0),)), ProgramLine(EVIL)), 1),
        backward=Program((ProgramLine(EVIL, where, EVIL, ((EVIL, 0),), "repeated", (EVIL,), 0),), 1),
        sites=(Site(EVIL, EVIL, 2, EVIL, where),),
        names=(EVIL,),
        code=EVIL,
        function=EVIL,
        signature=EVIL,
        wrt=(EVIL,),
        notes=(EVIL,),
        uncosted=(EVIL,),
        backward_error=EVIL,
    )  # fmt: skip


def blocks(layers, *, names=True):
    """A report as of ``layers`` equal blocks, each of which saves six values and an argument."""
    residuals = []
    for layer in range(layers):
        residuals.append(Residual("f32", (8, 8), 256, "argument", argument=f"params[{layer}]['w']", needed_by=(AGAIN,)))
        residuals += [
            Residual("f32", (8,), 32, "intermediate", "sin", f"layer{layer}_{part}" if names else None, None, DOT)
            for part in "abcdef"
        ]
    return small(residuals=tuple(residuals))


def fragments(report):
    """What the widget shows of a report, part by part."""
    return {
        "totals": totals_html(report),
        "notes": notes_html(report),
        "residuals": residuals_html(report),
        "recomputed": recomputed_html(report),
        "listing": listing_html(report, live=True),
    }
