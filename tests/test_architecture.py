"""The way of the data goes in one direction: who may import whom, and what an import may cost."""

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_spec = importlib.util.find_spec("remat_magic")
assert _spec is not None
assert _spec.origin is not None
PACKAGE = Path(_spec.origin).parent

# A layer is a top-level module or subpackage. What it may import of ours, and which third-party packages.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "model": (set(), set()),
    "units": (set(), set()),
    "parsing": (set(), set()),
    "wording": (set(), set()),
    "_compat": ({"model"}, {"jax", "jaxlib", "numpy"}),
    "policies": ({"model", "parsing", "_compat"}, {"jax"}),
    "devices": ({"model"}, {"jax"}),  # jax to measure the machine itself, when it is asked for
    "analysis": ({"model", "wording", "units", "_compat", "policies"}, {"jax", "numpy"}),
    "tuning": (
        {"model", "parsing", "wording", "units", "_compat", "policies", "analysis", "devices"},
        {"jax", "numpy", "scipy"},
    ),
    "views": ({"model", "wording", "units"}, {"rich", "pygments", "IPython"}),
    "widget": ({"model", "wording", "views", "devices"}, {"anywidget", "ipywidgets", "traitlets", "IPython", "rich"}),
}

# Conveniences that point against the direction: imported in the function that is called, never with the module.
DEFERRED: dict[str, set[str]] = {
    "analysis/shortcuts.py": {"tuning"},  # trace.compare() and trace.measure(), which is where users look for them
    "model/plan.py": {"analysis"},  # plan.apply(), so that a training script needs nothing else
    "model/report.py": {"views"},  # report.save_html()
    "model/displayed.py": {"views"},  # records show themselves, as DataFrames do
    "tuning/compare.py": {"views"},  # and so do comparisons
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(module: Path) -> str:
    return module.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(module: Path, inside_functions: bool | None = None) -> Iterator[tuple[str, int]]:
    """Every imported dotted name with its line, the relative ones made absolute; all, or those (not) in functions."""
    package = ["remat_magic", *module.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(module.read_text(encoding="utf-8"))
    # What only a type checker imports is not imported with the module either.
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    deferred = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if inside_functions is not None and (id(node) in deferred) is not inside_functions:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield ".".join([*base, *filter(None, [node.module]), alias.name]), node.lineno


def violations(module: Path) -> list[str]:
    layer = layer_of(module)
    if layer not in LAYERS:  # the top: __init__ and the magic may import everything
        return []
    ours, third_party = LAYERS[layer]
    deferred = DEFERRED.get(module.relative_to(PACKAGE).as_posix(), set())
    found = list[str]()
    for inside in (False, True):
        for name, line in imports(module, inside_functions=inside):
            top, _, rest = name.partition(".")
            if top == "remat_magic":
                layer_named = rest.split(".")[0]
                allowed = layer_named in ours | {layer} or (inside and layer_named in deferred)
            else:
                allowed = top in sys.stdlib_module_names or top in third_party
            if not allowed:
                found.append(f"{module.relative_to(PACKAGE)}:{line} imports {name}")
    return found


def names_private_jax(module: Path) -> list[str]:
    found = [line for name, line in imports(module) if name.startswith(("jax._src", "jaxlib"))]
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jax._src"):
            found.append(node.lineno)
    return [f"{module.relative_to(PACKAGE)}:{line}" for line in found]


@pytest.mark.parametrize("module", modules(), ids=lambda module: str(module.relative_to(PACKAGE)))
def test_imports_go_one_way(module):
    assert violations(module) == []


@pytest.mark.parametrize("module", ["analysis.trace", "devices", "tuning.compare"])
def test_conveniences_are_imported_late(module):
    held = imported_by(f"import remat_magic.{module}")
    late = {"remat_magic.views", *(set() if module.startswith("tuning") else {"remat_magic.tuning"})}
    assert held.isdisjoint(late)
    assert "jax" not in held or module != "devices"


@pytest.mark.parametrize("module", modules(), ids=lambda module: str(module.relative_to(PACKAGE)))
def test_private_jax_stays_in_its_seam(module):
    if layer_of(module) != "_compat":
        assert names_private_jax(module) == []


def test_the_checks_see_a_violation(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "views").mkdir()
    bad = tmp_path / "views" / "html.py"
    bad.write_text(
        "import jax.numpy\nfrom ..analysis import trace\nfrom remat_magic import widget\nfrom .. import model\n"
        "from jax._src import core\n"
    )
    assert [violation.split(" imports ")[1] for violation in violations(bad)] == [
        "jax.numpy",
        "remat_magic.analysis.trace",
        "remat_magic.widget",
        "jax._src.core",
    ]
    assert names_private_jax(bad) == ["views/html.py:5"]


def test_only_calls_may_go_against_the_direction(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "analysis").mkdir()
    trace = tmp_path / "analysis" / "shortcuts.py"
    trace.write_text("def f():\n    from remat_magic.tuning import measure\n    from remat_magic.views import text\n")
    assert violations(trace) == ["analysis/shortcuts.py:3 imports remat_magic.views.text"]
    trace.write_text("from remat_magic.tuning import measure\n")
    assert violations(trace) == ["analysis/shortcuts.py:1 imports remat_magic.tuning.measure"]


def imported_by(code: str) -> set[str]:
    """The modules that a fresh interpreter holds after running ``code``."""
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent, timeout=120
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))


def test_the_model_needs_no_jax():
    held = imported_by("import remat_magic.model")
    assert {name for name in held if name.split(".")[0] in {"jax", "jaxlib", "numpy", "IPython", "rich"}} == set()


def test_views_need_no_jax():
    held = imported_by("import remat_magic.views.html, remat_magic.views.text")
    assert held.isdisjoint({"jax", "jaxlib", "ipywidgets", "anywidget"})


def test_loading_the_extension_imports_only_what_every_cell_needs():
    before = imported_by("import jax, IPython; from IPython.testing.globalipapp import start_ipython; start_ipython()")
    after = imported_by(
        "import jax, IPython; from IPython.testing.globalipapp import start_ipython; ip = start_ipython()\n"
        "ip.run_line_magic('load_ext', 'remat_magic')"
    )
    assert "remat_magic" in after
    heavy = {"anywidget", "ipywidgets", "rich", "scipy", "matplotlib", "remat_magic.views", "remat_magic.widget"}
    assert (after - before) & heavy == set()


def test_typed_and_complete():
    assert (PACKAGE / "py.typed").is_file()
    assert list((PACKAGE / "views" / "static").glob("*.css"))
    assert list((PACKAGE / "views" / "static").glob("*.*js"))
