"""The widget's scripts become one module for the browser, and a new tab needs no more than its own files."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from remat_magic.widget import RematWidget, frame
from remat_magic.widget.panels import PANELS, SCRIPTS, Panel
from tests.conftest import package_folder
from tests.test_widget import FakeTrace, browser, messages, tell  # noqa: F401 - a fixture

FILES = sorted((package_folder() / "widget").rglob("*.js"))


@pytest.fixture
def scripts(tmp_path):
    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.js").write_text(text)
        return tmp_path / "main.js"

    return write


def run(script: str) -> object:
    """What a module's default export is, in Node; where there is none, the browser tests run the widget's."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js on this machine")
    program = f"{script.replace('export default', 'const result =')}\nconsole.log(JSON.stringify(result));"
    ran = subprocess.run([node, "--input-type=module", "-e", program], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_names_in_different_modules_do_not_meet(scripts):
    main = scripts(
        main='import { double } from "./one.js";\nimport { half } from "./two.js";\nconst factor = 5;\n'
        "export const result = [double(factor), half(factor)];\n",
        one="const factor = 2;\nexport function double(number) {\n  return number * factor;\n}\n",
        two='import { double } from "./one.js";\nconst factor = 4;\n'
        "export const half = (number) => double(number) / factor;\n",
    )
    script = frame.bundle({"entry": main}, "entry.result")
    assert script.count("// one.js") == 1  # though two modules import it
    assert run(script) == [10, 2.5]


def test_a_folder_may_have_a_hyphen_in_its_name(scripts, tmp_path: Path):
    """As site-packages has, where a package imports a module of this one."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "one-two.js").write_text("export const two = 2;\n")
    main = scripts(main='import { two } from "./site-packages/one-two.js";\nexport const result = two;\n')
    assert run(frame.bundle({"entry": main}, "entry.result")) == 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('import one from "./one.js";', "main.js: this form is not known to the bundle: import one"),
        ('import { a as b } from "./one.js";', "this form is not known to the bundle"),
        ('import { a } from "elsewhere";', "this form is not known to the bundle"),
        ('import {\n  a,\n} from "./one.js";', "this form is not known to the bundle"),
        ("export default 1;", "this form is not known to the bundle: export default 1;"),
        ("export let a = 1;", "this form is not known to the bundle"),
        ('export { a } from "./one.js";', "this form is not known to the bundle"),
    ],
)
def test_what_the_bundle_does_not_know_is_an_error(scripts, text, error):
    main = scripts(main=text, one="export const a = 1;\n")
    with pytest.raises(ValueError, match=error):
        frame.bundle({"entry": main}, "entry")


def test_the_widget_gets_one_module():
    script = frame.widget_script(PANELS)
    assert [line for line in script.splitlines() if line.startswith(("import", "export"))] == [
        line for line in script.splitlines() if line.startswith("export default { render")
    ]
    for path in FILES:
        assert script.count(f"// {path.name}\nconst ") == 1, path  # nothing lies there that nobody loads


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_script_is_long(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("// @ts-check\n")
    assert len(text.splitlines()) <= 400


# ------------------------------------------------------------------------------------------------------------ a new tab


class Toy(Panel):
    """What a new tab consists of in Python; its script would lie beside it."""

    key, title, parts = "toy", "Toy", ("toy-answer",)
    asks = (("toy",),)
    path: Path

    @classmethod
    def script(cls):
        return cls.path

    def tools(self):
        return '<button type="button" data-action="toy">Play</button>'

    def add(self, view, report):
        view["counts"]["toy"] = len(report.residuals)

    def answer(self, request):
        report = self._live.trace.report(*self._live.arguments(request.policy, request.at))
        return {"html": f"<b>{report.policy}</b>"}


def toy(path):
    """Such a tab with a script: a class of its own, since scripts are kept by class."""
    return type("Toy", (Toy,), {"path": path})


def test_a_tab_is_registered_once(browser, tmp_path):  # noqa: F811
    """In ``PANELS``: all that the frame, the script and the messages know of it follows."""
    path = tmp_path / "toy.js"
    path.write_text("export function panel(widget, key) {\n  return { actions: { toy: () => widget.send({}) } };\n}\n")
    widget = RematWidget(FakeTrace(), "none", panels=(*PANELS, toy(path)))
    for markup in ('role="tab" id="__remat__tab-toy"', 'data-panel="toy"', 'data-part="toy-answer"', ">Play</button>"):
        assert markup in widget._frame
    assert "toy: () => widget.send({})" in widget._esm
    assert '"toy": panel' in widget._esm
    assert widget._view["counts"]["toy"] == 4
    tell(widget, type="toy", policy="dots_saveable", at="function")
    (answer,) = messages(widget, "toy")
    assert answer == {"type": "toy", "policy": "dots_saveable", "at": "function", "html": "<b>dots_saveable</b>"}
    widget.close()


def test_a_panel_that_fails_says_so(browser):  # noqa: F811
    widget = RematWidget(FakeTrace(), "none", panels=(*PANELS, toy(SCRIPTS / "on_demand.js")))
    tell(widget, type="toy", policy="nonsense", at="function")
    assert messages(widget, "toy")[0]["error"] == "'nonsense' is not a policy: did you mean 'dots_saveable'?"
    widget.close()


def test_no_two_panels_share_a_name():
    """Of a tab, a part, a message or a script's control."""
    keys = [panel.key for panel in PANELS]
    parts = [part for panel in PANELS for part in panel.parts or (panel.key,)]
    asks = [kind for panel in PANELS for group in panel.asks for kind in group]
    for names in (keys, parts, asks):
        assert len(set(names)) == len(names)
    assert not {"hello", "lost", "choose", "names", "peek", "apply"} & set(asks)
