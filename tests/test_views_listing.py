"""The user's own source with what each line saves and has recomputed: records made by hand, then real traces."""

import html
import re
from dataclasses import replace

import pytest

import remat_magic as rm
from remat_magic.records import Equation, Residual, SourceSpan, SourceText
from remat_magic.views.format import expression_key, line_key
from remat_magic.views.source import listing_html, split_lines, words
from remat_magic.views.tables import KEYS
from tests.programs import f32
from tests.views_records import SIN, span
from tests.views_records import small as records

FILE = "/home/user/model.py"
DOT = replace(SIN, column=SIN.column + 8, end_column=SIN.end_column - 1)  # the records' own is of another text


def at(line, column, end_line, end_column, text="", *, file=FILE, cell=None):
    return SourceSpan(file, "f", line, column, end_line, end_column, cell, text)


def kept(source, nbytes=8, primitive="sin"):
    return Residual("f32", (nbytes // 4,), nbytes, "intermediate", primitive, source=source)


def small(**changes):
    """The report of the records, whose matmul stands within the sin."""

    def moved(item):
        inside = getattr(item, "primitive", "") == "dot_general"
        return replace(item, source=DOT) if inside else item

    report = records()
    fields = {"residuals": report.residuals, "recomputed": report.recomputed, **changes}
    return records(**{**fields, **{key: tuple(map(moved, fields[key])) for key in ("residuals", "recomputed")}})


def shown(text, saved=(), again=(), **changes):
    """The view of one function of a file, which starts at line 1."""
    fields = {"function": "f", "file": FILE, "cell": None, "line": 1, **changes}
    sources = (SourceText(text=text, **fields),)
    residuals = tuple(kept(source) for source in saved)
    equations = tuple(Equation("cos", flops=3, source=source) for source in again)
    return listing_html(small(sources=sources, residuals=residuals, recomputed=equations), live=True)


def lines(page):
    """The code of each line, its colours taken out and its marks as [S ...], [A ...] and [SA ...]."""
    texts = []
    for code in re.findall(r'<td class="remat-ln"[^>]*><code[^>]*>(.*?)</code></td>', page, re.DOTALL):
        code = re.sub(r'<u class="([a-z -]*)"[^>]*>', lambda tag: f"[{letters(tag[1])} ", code)
        texts.append(html.unescape(re.sub(r"<[^>]*>", "", code.replace("</u>", "]"))))
    return texts


def letters(kinds):
    return "".join({"remat-saved": "S", "remat-again": "A"}[kind] for kind in kinds.split())


def numbers(page):
    """For each row what stands in its columns of numbers."""
    cells = re.findall(r'<td class="remat-cost"[^>]*>(.*?)</td><td class="remat-cost"[^>]*>(.*?)</td>', page)
    return [tuple(re.sub(r"<[^>]*>", "", cell).strip() for cell in row) for row in cells]


def test_each_line_has_what_it_saves_and_recomputes():
    cell = SourceText(SIN.file, 3, "", 3, f"def layer(W, x):\n{SIN.text}\n    return h.sum()\n# done")
    nowhere = Residual("f32", (3,), 12, "intermediate", "mul")
    report = small(sources=(cell,), residuals=(*small().residuals, nowhere))
    page = listing_html(report, live=True)
    assert lines(page) == ["def layer(W, x):", "    h = [SA jnp.sin([SA W @ x])]", "    return h.sum()", "# done"]
    assert numbers(page) == [("", ""), ("24.0 kB", "80 FLOPs"), ("", ""), ("", ""), ("12 B", "")]
    assert page.index("<i>no line of yours</i>") > page.index("# done")
    assert "In[3]</span> <small>lines 3 to 6, saved 24.0 kB, recomputed 80 FLOPs</small>" in page


def test_hovers_have_exact_numbers():
    page = listing_html(small(sources=(SourceText(SIN.file, 3, "", 4, SIN.text),)))
    assert (
        'title="24,028 bytes: f32[5] cos, f32[6,1000] sin &quot;a&quot;, f32[2] dot_general &quot;b&quot; offloaded"'
        in page
    )
    assert 'title="80 FLOPs: dot_general repeated x2, cos deferred (cost unknown)"' in page
    live = listing_html(small(sources=(SourceText(SIN.file, 3, "", 4, SIN.text),)), live=True)
    both = 'title="saved 8 bytes: f32[2] dot_general &quot;b&quot; offloaded\nrecomputed 80 FLOPs: '
    assert both in live
    assert both not in page  # a kept page has the figures once, on the line


@pytest.mark.parametrize(
    ("text", "saved", "again", "wanted"),
    [
        ("f(g(x) + y)", [at(1, 0, 1, 11)], [at(1, 2, 1, 6)], ["[S f([A g(x)] + y)]"]),
        # Equal starts, and equal ends.
        ("a + b + c", [at(1, 0, 1, 9), at(1, 0, 1, 5)], [at(1, 8, 1, 9)], ["[S [S a + b] + [A c]]"]),
        ("a; b", [at(1, 0, 1, 1)], [at(1, 3, 1, 4)], ["[S a]; [A b]"]),
        # Not a tree: what starts later is left out.
        ("abcdef", [at(1, 0, 1, 4)], [at(1, 2, 1, 6)], ["[S abcd]ef"]),
        # One of several lines, without the indentation, its comment and an empty line.
        ("h = f(\n    g(x),  # why\n\n    'a',\n) + 1", [at(1, 4, 5, 1)], [at(2, 4, 2, 8)],
         ["h = [S f(]", "    [S [A g(x)],]  # why", "", "    [S 'a',]", "[S )] + 1"]),
        # Columns count characters, not bytes; tabs are one.
        ("\tθ = sin(β)", [at(1, 5, 1, 11)], [], ["\tθ = [S sin(β)]"]),
        ("s = '😀' + f(x)", [at(1, 10, 1, 14)], [], ["s = '😀' + [S f(x)]"]),
        # Beyond the text, and where no columns are known: the line.
        ("  f(x)", [at(1, 2, 1, 99)], [], ["  [S f(x)]"]),
        ("  f(x)  ", [at(1, 0, 1, 0)], [], ["  [S f(x)]"]),
        # The text is another than the one that the columns are of.
        ("  f(x)", [at(1, 3, 1, 4, "%magic")], [], ["  [S f(x)]"]),
        ("if x:\r\n  f(x)\r\n", [at(2, 2, 2, 6, "  f(x)")], [], ["if x:", "  [S f(x)]", ""]),
        # Words are coloured within and across marks.
        ("x if not y else 'a b'", [at(1, 3, 1, 18)], [], ["x i[S f not y else 'a] b'"]),
        ("not <b>python", [at(1, 4, 1, 7)], [], ["not [S <b>]python"]),
    ],
)  # fmt: skip
def test_expressions_are_marked_where_they_begin_and_end(text, saved, again, wanted):
    assert lines(shown(text, saved, again)) == wanted


def test_everything_can_be_linked():
    page = listing_html(small(sources=(SourceText(SIN.file, 3, "", 3, f"def f(x):\n{SIN.text}"),)), live=True)
    above, line = (line_key(span(number, "x")) for number in (3, 4))
    assert f'<tr data-line="{above}"><td class="remat-no">3</td>' in page
    pick = f'data-pick="{line}" aria-pressed="false" data-place="In[3]:4" aria-label="line 4"'
    hover = 'title="Show only this line in tables and jaxprs; click again to show all"'
    button = f'<button type="button" class="remat-link" {pick} {hover} {KEYS}>4</button>'
    assert f'<tr data-line="{line}"><td class="remat-no">{button}</td>' in page
    assert re.findall(r'data-e="([^"]*)"', page) == [expression_key(SIN), expression_key(DOT)]
    assert page.count("<button") == 1  # what costs nothing has nothing to be picked
    assert "<button" not in listing_html(small(sources=(SourceText(SIN.file, 3, "", 3, SIN.text),)))


def test_without_any_text_the_spans_tell():
    """A report from elsewhere, or of what was typed into a terminal: the lines that cost something are shown."""
    page = listing_html(small())
    assert lines(page) == ["    h = [SA jnp.sin([SA W @ x])]"]
    bare = listing_html(small(residuals=(kept(at(7, 4, 7, 9, file="<stdin>")),), recomputed=()))
    assert "line 7, saved 8 B" in bare
    assert lines(bare) == [""]


def test_nothing_to_show():
    nothing = small(residuals=(), recomputed=())
    assert "No line saves or recomputes anything." in listing_html(nothing)
    free = replace(nothing, sources=(SourceText(FILE, 1, "", 1, "a"),))
    assert "nothing saved" in listing_html(free)
    # Of the forward half alone nobody knows yet what is recomputed.
    assert "nothing saved" not in listing_html(replace(free, complete=False))


def test_words_have_their_kinds():
    text = "@jit\ndef f(x):  # why\n    %time x = 1\n    return not f'{x}' + 1.5, len(x), None, self"
    kinds = [[(line[start:end], kind) for start, end, kind in row]
             for line, row in zip(text.split("\n"), words(text), strict=True)]  # fmt: skip
    assert kinds == [
        [("@jit", "m")],
        [("def", "k"), ("f", "d"), ("# why", "c")],
        [],  # a magic is none of Python's
        [("return", "k"), ("not", "k"), ("f'{", "s"), ("}'", "s"), ("1.5", "n"), ("len", "b"), ("None", "k")],
    ]


@pytest.mark.parametrize(
    "text", ["", "\n", "'''never\nclosed", "\x00\ud800 \x0c = (", "a\r\nb\rc\nd", "!ls\n%%bash\nif [", "\u2028x = 1"]
)
def test_any_text_is_lexed(text):
    rows = words(text)
    assert len(rows) == len(split_lines(text))
    for line, row in zip(split_lines(text), rows, strict=True):
        edges = [edge for start, end, _ in row for edge in (start, end)]
        assert edges == sorted(edges)
        assert all(0 <= edge <= len(line) for edge in edges)


# ---------------------------------------------------------------------------------------------------------- of programs

MODULE = '''"""A model."""
import functools

import jax
import jax.numpy as jnp


scale = lambda x: x * jnp.sin(x)


def decorated(fun):
    """In here stands no operation."""
    return fun


@decorated
@functools.partial(
    jax.checkpoint,
)
def block(w, x):
    def inner(x):
        return jnp.tanh(
            x @ w
        )

    return scale(inner(x)) * 2.0


class Model:
    unused = 1

    class Head:
        def __call__(self, x):
            return jnp.exp(x)

    def __call__(self, w, x):
        for _ in range(3):
            x = block(w, x)
        return jnp.sum(self.Head()(x) ** 2)


if True:
    with jax.named_scope("model"):
        loss = Model()
'''


def sums(page):
    """The exact bytes and FLOPs over all rows, read off the hovers."""
    saved = re.findall(r'<td class="remat-cost" title="([\d,]+) bytes', page)
    again = re.findall(r'<td class="remat-cost" title="([\d,]+) FLOPs', page)
    return tuple(sum(int(number.replace(",", "")) for number in numbers) for numbers in (saved, again))


def holds(report):
    """Every value and operation is on one line, and on no other."""
    assert sums(listing_html(report)) == (report.saved_bytes + report.offloaded_bytes, report.recomputed_flops)


def test_the_functions_that_ran_are_listed_with_their_text(module, remat3):
    trace = rm.trace(module(MODULE, "a_model_of_the_users").loss, f32(4, 4), f32(4))
    assert [(text.function, text.line, text.text.split("\n")[0]) for text in trace.sources] == [
        ("scale", 8, "scale = lambda x: x * jnp.sin(x)"),
        ("block", 16, "@decorated"),
        ("Model.Head.__call__", 33, "        def __call__(self, x):"),
        ("Model.__call__", 36, "    def __call__(self, w, x):"),
    ]
    assert trace.sources[1].text.split("\n")[-1] == "    return scale(inner(x)) * 2.0"
    assert {text.place for text in trace.sources} == {"a_model_of_the_users.py"}
    for policy in ("as_written", "none", "everything_saveable", "dots_saveable"):
        report = trace.report(policy)
        assert report.sources is trace.sources
        assert trace.preview(policy).sources is trace.sources
        assert report.saved_bytes or report.recomputed_flops
        holds(report)
        assert "no line of yours" not in listing_html(report)


@pytest.mark.parametrize(
    "text",
    ["loss = lambda x: jnp.sum(jnp.sin(x))", "def loss(x):\n\tθ = jnp.sin(x)\n\treturn jnp.sum(θ * θ)\n\n\n"],
)
def test_text_that_is_traced_as_it_stands(module, text):
    text = f"import jax.numpy as jnp\n{text}"
    trace = rm.trace(module(text).loss, f32(3))
    (source,) = trace.sources
    assert source.function == "loss"
    assert source.text == "\n".join(text.rstrip().split("\n")[1:])
    holds(trace.report())


def test_a_cell_is_shown_as_it_was_typed(cells):
    cells.ok("import jax, jax.numpy as jnp", "def helper(x):", "    return jnp.sin(x)", "", "")
    typed = (
        "", "%%remat -o kept", "here = %pwd", "def loss(w, x):", "    h = helper(", "        w @ x", "    )",
        "    return jnp.sum(h * h)", "", "loss(jnp.ones((2, 2)), jnp.ones(2))", "",
    )  # fmt: skip
    cells.ok(*typed)
    report = cells.ns["kept"].report
    mine, other = report.sources
    assert (mine.place, mine.function, mine.line) == ("In[2]", "", 1)
    assert mine.text == "\n".join(typed[1:-1])
    assert (other.place, other.text) == ("In[1]", "import jax, jax.numpy as jnp\ndef helper(x):\n    return jnp.sin(x)")
    page = listing_html(report)
    assert sums(page) == (report.saved_bytes, report.recomputed_flops)
    assert report.saved_bytes
    assert "    return [S jnp.sin(x)]" in lines(page)
    assert lines(page)[:2] == ["%%remat -o kept", "here = %pwd"]
