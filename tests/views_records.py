"""Reports made by hand: what the views are tested on, without the engine."""

import dataclasses

from remat_magic.records import Equation, Origin, Program, ProgramLine, Reader, Report, Residual, Site, SourceSpan
from remat_magic.views.headline import line_html, notes_html, notes_of
from remat_magic.views.source import listing_html
from remat_magic.views.tables import printed
from remat_magic.views.text import render
from remat_magic.views.values import recomputed_html, residuals_html


def plain(report, width=100, title=""):
    """The whole report as text without colours."""
    return printed(render(report, title), width)


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


def infected(record, attack=EVIL):
    """A record with the string wherever it holds any text; what is one of a few words stays."""
    if isinstance(record, tuple):
        return tuple(infected(item, attack) for item in record)
    if not dataclasses.is_dataclass(record):
        return record
    changes = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        kind = str(field.type)
        if isinstance(value, str) or (value is None and kind.startswith("str")):
            changes[field.name] = attack if kind.startswith("str") else value
        elif isinstance(value, tuple) and "tuple[str" in kind:
            changes[field.name] = tuple(
                tuple(attack if isinstance(part, str) else part for part in item) if isinstance(item, tuple) else attack
                for item in value or ((attack,) if kind == "tuple[str, ...]" else ())
            )
        else:
            changes[field.name] = infected(value, attack)
    hostile = dataclasses.replace(record, **changes)
    if {"column", "end_column"} <= changes.keys():  # a span covers its whole text
        hostile = dataclasses.replace(hostile, column=0, end_column=len(attack), line=1, end_line=1, cell=None)
    return hostile


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
        "totals": "; ".join(line_html(report)),
        "notes": notes_html(notes_of(report)),
        "residuals": residuals_html(report),
        "recomputed": recomputed_html(report),
        "listing": listing_html(report, live=True),
    }
