"""Strings from anywhere are shown as text and are nothing else; no code but the user's own runs, and nothing goes out.

Names, source lines, exceptions and types come from libraries, files and other people's notebooks. Each attack string
goes wherever a record, or a real function, can hold one; what comes out is parsed, and whatever element or attribute
is not on the list below is a failure.
"""

from __future__ import annotations

import ast
import dataclasses
import html.parser
import io
import json
import linecache
import re
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from rich.console import Console

import remat_magic as rm
from remat_magic import devices
from remat_magic.errors import one_line, printable
from remat_magic.records import (
    Advice,
    Choice,
    Fit,
    FitChoice,
    GradientCall,
    Measurement,
    Places,
    Plan,
    PlannedValue,
    RematError,
    Site,
)
from remat_magic.views import choices, display, headline, jaxpr_text, memory, plans
from remat_magic.views import html as html_views
from remat_magic.views import text as text_views
from remat_magic.widget import RematWidget
from remat_magic.widget.frame import widget_script
from remat_magic.widget.panels import PANELS
from tests.plot_records import Sheet, rows, timeline
from tests.programs import some_of
from tests.test_architecture import PACKAGE, modules
from tests.test_widget import browser, workers_of  # noqa: F401 - a fixture
from tests.views_records import fragments, infected, plain, small
from tests.widget_frame import frame_of

ATTACKS = {
    "image": "<img src=x onerror=alert(1)>",
    "script": "\"><script>alert(1)</script>",
    "single quote": "' onmouseover='alert(1)",
    "style": "</style><svg onload=alert(1)>",
    "end of code": "</code></pre></td></table><iframe src=//evil.example>",
    "address": "javascript:alert(1)",
    "entities": "&#x3c;b&#x3e; &lt;i&gt; &amp;amp;",
    "comment": "<!-- --><![CDATA[ ]]>",
    "template": "${alert(1)} {{7*7}} `alert(1)` __remat__",
    "null": "a\x00<b\x00>",
    "direction": "a\u202e\u2066 gnp.exe\u2069\u200b",
    "terminal": "\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b1m",
    "lines": "one\ntwo\r\nthree\u2028four",
    "markup of rich": "[red]x[/red] [link=https://evil.example]y[/link] :skull:",
    "format": "%s {0} {name!r} %n",
    "half of a pair": "\ud800x",
}  # fmt: skip
LONG = "<b>x</b>" * 10 + "x" * 100_000

# What the package itself writes. HTML, then SVG.
ELEMENTS = {
    "div", "span", "p", "b", "i", "u", "small", "code", "pre", "h4", "br", "ul", "ol", "li", "section", "table",
    "caption", "thead", "tbody", "tr", "th", "td", "details", "summary", "style", "script", "label", "select",
    "option", "optgroup", "button", "input", "progress", "em", "strong", "output", "ins", "del", "html", "head", "meta",
    "body", "main", "svg", "title", "desc", "g", "path", "rect", "circle", "line", "text", "tspan", "defs", "use",
    "pattern", "clippath",
}  # fmt: skip
VOID = frozenset(("br", "input", "meta"))
ATTRIBUTES = re.compile(
    r"class|id|style|title|for|name|type|value|max|min|step|role|scope|colspan|rowspan|tabindex|hidden|open|disabled|selected|checked"
    r"|data-[a-z-]+|aria-[a-z]+|xmlns|viewbox|width|height|x|y|x1|x2|y1|y2|cx|cy|r|d|href|text-anchor|fill|stroke|stroke-dasharray|clip-path"
    r"|preserveaspectratio|transform|points|charset|content|lang|placeholder|autocomplete|spellcheck"
)
STYLES = re.compile(
    r"((width|left|bottom|margin-left|--remat-at): ?[\d.]+%|background:#[0-9a-f]{6}"
    r"|--s:[\d.e-]+|text-align: ?left|font-family: var\(--jp-code-font-family, monospace\)"
    r"|white-space: ?pre|overflow: auto|(; ?))+"
)


class Page(html.parser.HTMLParser):
    """Parses strictly: known elements and attributes only, each closed in its turn, nothing left over."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.values: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        assert tag in ELEMENTS, tag
        for name, value in attrs:
            assert ATTRIBUTES.fullmatch(name), (tag, name)
            self.values.append(value or "")
            if name == "style":
                assert STYLES.fullmatch(value), value
            if name == "href":
                assert re.fullmatch(r"#remat-[0-9a-z-]+", value), value
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("style", "script"):
            self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data!r}")

    def handle_decl(self, decl):
        assert decl == "DOCTYPE html"

    handle_pi = unknown_decl = handle_comment

    def holds(self, attack: str) -> bool:
        """Whether a reader finds the string as it is, but for what cannot be seen."""
        return printable(attack) in self.text or any(printable(attack) in value for value in self.values)


def report_of(attack, **changes):
    report = infected(small(), attack)
    return dataclasses.replace(report, backward_error="", **changes)


def pages(attack: str):
    """Everything that is made of records, by name."""
    report = report_of(attack)
    failing = dataclasses.replace(report, backward_error=attack)
    some = tuple(infected(row, attack) for row in rows())
    measured = tuple(
        dataclasses.replace(row, measurement=Measurement(attack, attack, temp_bytes=1, flops=1, error=attack))
        for row in some
    )
    source = report.residuals[1].source
    yield "report", html_views.report_html(failing)
    for name, part in fragments(report).items():
        yield f"part {name}", part
    for name, part in fragments(failing).items():
        yield f"part {name} of a failure", part
    yield "jaxprs", jaxpr_text.jaxprs(report)
    for name, chunks in jaxpr_text.lazy_chunks(report).items():
        yield from ((f"chunk of {name}", chunk) for chunk in chunks)
    yield "comparison", choices.comparison_html(Places(attack, some, Sheet(attack, attack), not_tried=(attack,)))
    yield "measured", choices.comparison_html(Places(attack, measured, Sheet(attack, attack), not_tried=(attack,)))
    choice = FitChoice(attack, attack, attack, 9, 8, 10, None, extra_flops=0.1, donate=(attack,), unusable="")
    tried = tuple(dataclasses.replace(choice, **to) for to in ({}, {"needed_bytes": 19}, {"unusable": attack}))
    yield "choices", choices.tried_html(tried, Fit(attack, attack, 12, choice, tried, (attack,)))
    yield "policies", choices.tried_html(choices.of_rows(some))
    over_time = infected(timeline(), attack)
    yield "timeline", memory.timeline_html(over_time)
    yield "live timeline", memory.timeline_html(over_time, live=True)
    yield "advice", headline.advice_html((Advice("x", attack, attack, 1, "bytes", source),))
    value = PlannedValue(attack, 1, type=attack, primitive=attack, name=attack, source=source, path=(attack,))
    yield "plan", plans.plan_html(Plan(attack, attack, attack, 1, 1, 1, 1, (value,), status=attack, code=attack))
    yield "page", html_views.page_html(report, [report])
    own = {"title": attack, "remark": attack, "copy_id": attack}
    yield "kept", html_views.copy_html(report, [html_views.others_row(failing)], **own, most=10**7)
    yield "frame", frame_of(
        title=attack, signature=attack, wrt=(attack,), choices=(Choice(attack, attack, attack, attack),) * 2,
        sites=(Site(attack, attack, 2, attack, report.residuals[1].source),) * 2, names=(attack, attack),
        function_name=attack, can_apply=True,
        gradients=(GradientCall(attack, attack, report.residuals[1].source, (attack,), 2, (attack,)),),
    )  # fmt: skip


# Pages that hold no text of that kind when all their names are alike, or that show a part of it alone.
_WITHOUT = ("part totals", "chunk of", "part totals of a failure")


@pytest.mark.parametrize("name", ATTACKS)
def test_records_are_shown_as_text(name):
    attack = ATTACKS[name]
    for where, page in pages(attack):
        parsed = Page(page)
        assert parsed.holds(attack) or where.startswith(_WITHOUT), where
        if attack.startswith("<"):
            assert attack not in page, where


@pytest.mark.slow
def test_strings_of_100_kilobytes():
    """They are shown whole, or cut, in time that does not grow with their square."""
    parsed = [Page(page) for _, page in pages(LONG) if len(page) < 1_500_000]  # a report repeats them often
    assert sum(page.holds(LONG) for page in parsed) > 3
    trace = rm.trace(lambda x: checkpoint_name(jnp.sin(x), LONG).sum(), np.ones(3, np.float32))
    assert trace.names == (LONG,)
    with pytest.raises(RematError) as raised:
        trace.report(LONG)
    assert len(str(raised.value)) < 4 * len(LONG)
    with pytest.raises(RematError):
        trace.report("none", at=LONG)


@pytest.mark.parametrize("name", ATTACKS)
def test_terminals_get_no_escapes(name):
    attack = ATTACKS[name]
    report = report_of(attack)
    file = io.StringIO()
    console = Console(file=file, force_jupyter=False, force_terminal=True, color_system=None, width=200)
    console.print(text_views.render(report, title=attack))
    some = tuple(infected(row, attack) for row in rows())
    console.print(display.renderable(Places(attack, some, Sheet(attack, attack), not_tried=(attack,))))
    for shown in (file.getvalue(), plain(report, title=attack)):
        assert printable(shown) == shown
        assert "evil.example" not in shown or attack.count("evil.example")
        assert "\N{SKULL}" not in shown
    flat = "".join(plain(report, 5000).split())
    assert "".join(printable(attack).split()) in flat


def test_what_is_printable():
    text = "a\tb\nc é 漢 🙂 \N{ARABIC LETTER BEH}"  # of any language
    assert printable(text) == text
    assert printable("\x1b[0m\x00\u202e\ud800") == "\\x1b[0m\\x00\\u202e\\ud800"
    assert one_line("a\n  b\x1b" + "c" * 999, 10) == "a b\\x1bcc…"


# -------------------------------------------------------------------------------- through the engine itself


def hostile(attack):
    """A function whose every name, file and line is the string."""
    source = (
        "def loss(params, **others):\n    value = checkpoint_name(jnp.sin(params[KEY]), KEY); "
        + repr(attack)
        + (
            "\n    return (jax.checkpoint(inner)(value) + sum(o.sum() for o in others.values())).sum()\n"
            "def inner(x): return jnp.tanh(x * (x @ x))\n"
        )
    )
    namespace = {"jax": jax, "jnp": jnp, "checkpoint_name": checkpoint_name, "KEY": attack}
    file = attack.replace("\x00", "0").encode("utf-8", "replace").decode()  # Python itself takes no others
    exec(compile(source, file, "exec"), namespace)
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    for function in (namespace["loss"], namespace["inner"]):
        function.__name__ = function.__qualname__ = attack
    return namespace["loss"], ({attack: np.ones(3, np.float32)},), {attack: np.ones(2, np.float32)}


# The keys of a message whose values the script takes for HTML; it puts all others into `textContent` or `value`.
_HTML = ("_frame", "parts", "jaxprs", "bodies", "html", "frame")


def markup_of(message):
    if isinstance(message, dict):
        for key, value in message.items():
            if key in _HTML:
                yield from (leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, str))
            else:
                yield from markup_of(value)
    elif isinstance(message, (list, tuple)):
        for item in message:
            yield from markup_of(item)


REAL = ("image", "script", "terminal", "null", "direction", "markup of rich")


@pytest.mark.parametrize("name", REAL)
def test_a_hostile_function_in_a_widget(name, browser, monkeypatch):  # noqa: F811
    attack = ATTACKS[name]
    fun, args, kwargs = hostile(attack)
    trace = rm.trace(fun, *args, **kwargs)
    assert trace.names == (attack,)
    assert trace.engine.primal.table.sites

    def policy(prim, *_, **__):
        raise ValueError(attack)

    policy.__name__ = policy.__qualname__ = attack
    slow = devices.Device(attack, {"f32": 1e12}, 1e12, 1e12, None, None, attack)
    monkeypatch.setitem(devices._KNOWN, attack, slow)
    widget = RematWidget(trace, title=attack, apply=lambda _: attack, namespace={"mine": policy})
    channel = widget.comm

    def tell(**content):
        channel.callback({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
        for worker in workers_of(widget):
            worker.join(600)

    at = trace.default_at
    for policy_key in ("none", "dots_saveable", "mine"):
        tell(type="choose", policy=policy_key, at=at, serial=1)
    tell(type="names", names={attack: "save"}, at=at, serial=9)
    for kind in ("jaxprs", "memory", "advice", "tried", "edit"):
        tell(type=kind, policy="none", at=at, against="dots_saveable")
    tell(type="apply")
    sent = [*channel.sent, {"_frame": widget._frame, "_view": widget._view}]
    kept = widget._rendered.copy(trace.report("none", at))
    checked = 0
    for markup in (*markup_of(sent), kept["text/html"], trace.compare(device=slow)._repr_html_()):
        Page(markup)
        checked += 1
    assert checked > 20
    assert printable(kept["text/plain"]) == kept["text/plain"]
    json.dumps(sent, allow_nan=False)
    # What the reader chooses comes back as it was.
    assert widget.policy == f"save_only_these_names({attack!r})"
    with pytest.raises(RematError) as raised:
        trace.report(policy, "function")
    assert "\n" not in str(raised.value)
    for text in (repr(trace), repr(widget), repr(trace.compare(["none"]))):
        assert printable(text) == text
    widget.close()


@pytest.mark.parametrize("name", ["terminal", "direction", "null"])
def test_a_hostile_function_in_a_terminal(name, cells):
    attack = ATTACKS[name]
    fun, args, kwargs = hostile(attack)
    cells.ns.update(fun=fun, args=args, kwargs=kwargs)
    cells.ok("%remat --text fun(*args, **kwargs)")
    assert printable(cells.out) == cells.out

    def bad(prim, *_, **__):
        raise ValueError(attack)

    bad.__name__ = attack
    cells.ns["bad"] = bad
    cells.run("%remat --text -p bad fun(*args, **kwargs)")
    assert cells.err
    assert printable(cells.err) == cells.err


def test_a_measurement_of_a_hostile_function():
    fun, args, kwargs = hostile(ATTACKS["image"])
    measurement = rm.trace(fun, *args, **kwargs).measure("dots_saveable", inputs=(args, kwargs), runs=1)
    assert not measurement.error
    assert isinstance(measurement, Measurement)


# -------------------------------------------------------------------------------- what code runs, what goes out

# Who may make code of text, read objects of bytes, start programs, open connections or write files, and why.
ALLOWED = {
    ("notebook/magic.py", "eval"): "the call after %remat, and the statements of the user's own cell",
    ("notebook/magic.py", "compile"): "likewise",
    ("notebook/callee.py", "eval"): "the arguments that the user wrote in --args",
    ("notebook/callee.py", "compile"): "likewise",
    ("records/base.py", "open"): "the page that the user asks for",
    ("records/base.py", "unlink"): "what was written of it before the disk was full",
    ("editing/user_code.py", "compile"): "the user's own definitions, with the edit",
    ("editing/user_code.py", "exec"): "an import that the edit adds, in a copy of the user's namespace",
    ("editing/user_code.py", "eval"): "a checkpoint that the user or the edit wrote, likewise",
    ("measuring/elsewhere.py", "unlink"): "the oldest answers in a cache folder that is full",
    ("measuring/compiler_process.py", "shutil"): "its own temporary folder, when the process that asked has ended",
    ("_jax/private.py", "importlib"): "JAX's own modules, by names that stand in this package",
    (
        "_jax/settings.py",
        "importlib",
    ): "likewise, and whether there is a plugin for a device, which is not loaded",
    ("jaxprs/provenance.py", "compile"): "the text of a file, to see whether it is what runs; never run",
    ("libraries.py", "importlib"): "a module of flax's, where flax is there, by a name that stands in this package",
    ("__main__.py", "importlib"): "the versions of what is installed",
    ("devices/device.py", "importlib"): "whether a compiler is installed, without importing it",
    ("measuring/elsewhere.py", "importlib"): "the versions of what is installed",
    ("measuring/elsewhere.py", "subprocess"): "this Python, on a module of this package that compiles a program",
    ("measuring/elsewhere.py", "tempfile"): "the folder that this process shares with that one",
    ("measuring/elsewhere.py", "write_bytes"): "the program, in that folder",
    ("measuring/elsewhere.py", "write_text"): "what it is compiled for, in that folder",
    ("measuring/elsewhere.py", "mkdir"): "the folder of what was compiled, in the user's cache folder",
    ("measuring/compiler_process.py", "write_text"): "what the compiler said, in the shared folder",
    ("engine/namespaces.py", "compile"): "a stand-in of ours, with the user's own code or an edit's behind it",
    ("editing/editor.py", "compile"): "the user's own jit, with what it is to donate",
    ("editing/editor.py", "eval"): "likewise",
    ("_jax/watch.py", "importlib"): "modules of JAX's that are imported when they are first watched",
    ("__main__.py", "runpy"): "the script that the user named",
    ("__init__.py", "importlib"): "the package's own modules, by a table of names, when first asked for",
}
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "open", "input"}
METHODS = {"write_text", "write_bytes", "unlink", "rmdir", "mkdir", "rename", "system", "popen", "loads_pickle"}
MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "subprocess", "socket", "ssl", "http", "urllib",
    "requests", "ftplib", "smtplib", "webbrowser", "ctypes", "importlib", "runpy", "codeop", "tempfile", "shutil",
}  # fmt: skip


def risky(module):
    """What a module uses of the above."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                yield node.func.id
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield node.func.attr
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in MODULES:
            yield (node.module or "").split(".")[0]


def test_no_code_but_the_users_runs():
    uses = {(str(module.relative_to(PACKAGE)), used) for module in modules() for used in risky(module)}
    assert uses == ALLOWED.keys()  # and no permission that nobody needs


def test_the_check_sees_what_it_is_for(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle, os\nfrom urllib.request import urlopen\neval('1')\nopen('x')\nos.system('ls')\n")
    assert set(risky(bad)) == {"pickle", "urllib", "eval", "open", "system"}


def test_scripts_and_styles_ask_for_nothing():
    """The browser's part makes no code of text either, and loads nothing from anywhere."""
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".js", ".css")]
    assert len(files) >= 10
    used = (
        # Its own files are imported by name, and joined before they reach a browser.
        r"\beval\b|new Function|\bimport\b(?! .* from \"\.\.?/)|fetch\(|XMLHttpRequest|WebSocket|document\.write"
        r"|https?:|url\(|@import"
    )
    for path in files:
        text = re.sub(r"/\*[\s\S]*?\*/" if path.suffix == ".css" else r"/\*.*?\*/|//.*", "", path.read_text("utf-8"))
        assert re.findall(used, text) == []


def test_only_what_is_html_is_taken_for_html():
    """``innerHTML`` takes what Python has rendered; names and sentences go into ``textContent``."""
    script = widget_script(PANELS)
    taken = re.findall(r"innerHTML = ([^;]+);", script)
    allowed = (
        r"(model\.get\(\"_frame\"\).*|(side\.)?chunks(\[job\.next\]|\.join\(\"\"\))|view\.jaxprs|html"
        r"|view\.parts(\.\w+|\[\w+\])|(\(parts \?\? view\.parts\)|parts|a)\.\w+|\"\")"
    )
    assert [markup for markup in taken if not re.fullmatch(allowed, markup)] == []
    assert "insertAdjacentHTML" not in script
    assert "outerHTML" not in script


_BREAKS = ("} in (\n  b:f32[]. let", "'\n\"", "a\nb", "\n", "a\r\nb", "a\u2028b", "\x01", _HALF := "\ud800x")


@pytest.mark.parametrize("name", some_of(_BREAKS, *_BREAKS[:2], _HALF))
def test_a_checkpoint_name_that_breaks_lines_breaks_nothing(name, remat3, tmp_path):
    """In a layer, a checkpoint, a scan and a jitted function: texts are JAX's own; keys, plans and edits name it."""

    def layer(w, x):
        return checkpoint_name(jnp.tanh(x @ w), name)

    def loss(w, x):
        x = jax.jit(layer)(w, jax.checkpoint(layer)(w, layer(w, x)))
        return jnp.sum(jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=3)[0])

    shapes = [jax.ShapeDtypeStruct((4, 4), "float32")] * 2
    trace = rm.trace(loss, *shapes)
    assert trace.names == (name,)
    only = f"save_only_these_names({name!r})"
    for key in ("as_written", "nothing_saveable", only, f"names(offload=[{name!r}])"):
        report = trace.report(key, "function")
        if name == _HALF:  # of which JAX makes no text
            assert repr(name)[1:-1] in report.forward.text
        else:
            assert report.forward.text == str(trace.forward(key, "function"))
            assert report.backward.text == str(trace.backward(key, "function"))
        assert repr(name) in plain(report)
        assert name not in f"{report!r}{display.text(report)}".replace("\n", "")  # whose own lines may break
        assert report._repr_html_()
    plan = trace.plan("50%", "function")
    for record in (plan, trace.edit(plan), trace.compare(), trace.advice("nothing_saveable"), trace.timeline()):
        assert record._repr_html_()
        assert display.text(record)
    assert repr(name) in trace.edit(only, "function").diff()
    widget = RematWidget(trace)
    widget.policy = only
    assert widget._rendered.copy(widget.report)
    assert widget._view
    widget.close()


def test_nothing_goes_over_the_network(monkeypatch, browser):  # noqa: F811
    def refuse(*args, **kwargs):
        raise AssertionError("a connection is opened")

    for name in ("socket", "create_connection", "getaddrinfo", "create_server"):
        monkeypatch.setattr(socket, name, refuse)

    def loss(w, x):
        return jnp.sin(jax.checkpoint(lambda x: jnp.tanh(w @ x))(x)).sum()

    arrays = np.ones((3, 3), np.float32), np.ones(3, np.float32)
    trace = rm.trace(loss, *arrays)
    assert trace.compare(device=devices.names()[0]).rows
    assert trace.plan(0.5)
    assert trace.measure(inputs="random", runs=1).error == ""
    assert all(not difference.error for difference in trace.check_gradients(["dots_saveable"], inputs="random"))
    widget = RematWidget(trace)
    widget.policy = "dots_saveable"
    widget._worker.join()
    assert widget.report.policy == "dots_saveable"
    widget.close()
