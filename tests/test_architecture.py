"""The way of the data goes in one direction: who may import whom, and what an import may cost."""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import package_folder

PACKAGE = package_folder()

# A layer is a top-level module or subpackage, named by where it stands in the way from the user's cell to the browser;
# it may import those that are listed for it, in functions and for type checkers too, and these third-party packages.
LEAVES = {"errors", "units", "parsing", "wording", "user_files"}
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "units": ({"errors"}, set()),
    "parsing": (set(), set()),
    "wording": (set(), set()),
    "user_files": (set(), {"jax"}),
    "records": (LEAVES, set()),
    "devices": ({"errors", "_jax"}, {"jax"}),  # jax to tell what is here, and how fast this machine is when asked
    "_jax": ({"errors"}, {"jax", "jaxlib", "numpy"}),
    "meshes": ({"errors", "_jax"}, {"jax"}),
    "libraries": ({"_jax"}, {"jax"}),
    "policies": ({"records", "_jax"}, {"jax"}),
    "jaxprs": ({"records", "_jax"}, {"jax", "numpy"}),
    "engine": ({"records", "_jax", "libraries", "policies", "jaxprs"}, {"jax", "numpy"}),
    "facts": ({"records", "_jax", "jaxprs", "engine", "devices"}, {"jax", "numpy"}),
    "planning": (
        {"records", "_jax", "policies", "jaxprs", "engine", "facts", "comparing", "devices"},
        {"jax", "numpy", "scipy"},
    ),
    "measuring": ({"records", "_jax", "jaxprs", "engine", "facts", "devices"}, {"jax", "numpy"}),
    "comparing": ({"records", "policies", "facts", "devices"}, set()),
    "advice": ({"records", "_jax", "policies", "jaxprs", "engine", "facts", "planning", "devices"}, set()),
    "editing": (
        {"records", "_jax", "libraries", "policies", "jaxprs", "engine", "facts", "planning", "devices"},
        {"jax"},
    ),
    "api": (
        {"records", "engine", "facts", "planning", "measuring", "comparing", "advice", "editing", "devices"},
        set(),
    ),
    "__main__": ({"_jax", "api", "devices"}, {"jax"}),
    "views": ({"records"}, {"rich", "pygments", "IPython"}),
    "widget": ({"records", "views", "devices", "api"}, {"anywidget", "ipywidgets", "traitlets", "IPython", "rich"}),
    "notebook": (
        {"records", "_jax", "libraries", "policies", "devices", "meshes", "views", "api", "widget"},
        {"IPython", "jax", "rich"},
    ),
    # What `import remat_magic` offers.
    "__init__": (
        {"records", "policies", "devices", "meshes", "measuring", "comparing", "api", "widget", "notebook"},
        {"IPython"},
    ),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(module: Path) -> str:
    return ".".join(("remat_magic", *module.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def layer_of(module: Path) -> str:
    return module.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(module: Path) -> Iterator[tuple[str, int]]:
    """Every imported dotted name with its line, wherever the import stands."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{'.' * node.level}{node.module or ''}.{alias.name}", node.lineno


def violations(module: Path) -> list[str]:
    layer = layer_of(module)
    ours, third_party = LAYERS[layer]
    if layer not in LEAVES:
        ours = ours | LEAVES
    found = list[str]()
    for name, line in imports(module):
        top, _, rest = name.partition(".")
        if top == "remat_magic":
            allowed = rest.split(".")[0] in ours | {layer}
        else:
            allowed = top in sys.stdlib_module_names or top in third_party
        if not allowed:
            found.append(f"{module.relative_to(PACKAGE)}:{line} imports {name}")
    return found


def circles() -> list[list[str]]:
    """The modules that import one another, directly or by others, wherever the imports stand."""
    files = {name_of(module): module for module in modules()}
    imported = dict[str, set[str]]()
    for name, module in files.items():
        targets = (target if target in files else target.rpartition(".")[0] for target, _ in imports(module))
        imported[name] = {target for target in targets if target in files and target != name}
    # What is left when every module that imports nothing of the rest has been taken out, again and again.
    while leaves := {name for name, targets in imported.items() if not targets}:
        imported = {name: targets - leaves for name, targets in imported.items() if name not in leaves}
    return sorted([name, *sorted(targets)] for name, targets in imported.items())


def names_private_jax(module: Path) -> list[str]:
    found = [line for name, line in imports(module) if name.startswith(("jax._src", "jaxlib"))]
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jax._src"):
            found.append(node.lineno)
    return [f"{module.relative_to(PACKAGE)}:{line}" for line in found]


def asks_for_primitives(module: Path) -> list[str]:
    """Where a module knows what a primitive or a parameter of one is called."""

    def is_name(node: ast.expr) -> bool:
        return ast.unparse(node).endswith(".primitive.name") or (
            isinstance(node, ast.Call) and ast.unparse(node.func).endswith("primitive_name")
        )

    found = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        compared = isinstance(node, ast.Compare) and any(map(is_name, (node.left, *node.comparators)))
        matched = isinstance(node, ast.Match) and is_name(node.subject)
        asked = isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith") and is_name(node.value)
        params = isinstance(node, ast.Attribute) and node.attr == "params"
        if compared or matched or asked or params:
            found.append(f"{module.relative_to(PACKAGE)}:{node.lineno}")
    return sorted(found)


def hides_what_it_takes(module: Path) -> list[str]:
    """Where a signature or a cast says less than is known: no editor, type checker or ``help`` can tell what is meant.

    ``**kwargs: Any`` is right only where a whole call is passed on, and then there is ``*args`` beside it.
    """
    places = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cast":
            hidden = bool(node.args) and ast.unparse(node.args[0]).strip("'") == "Any"
        elif isinstance(node, ast.arg):
            hidden = node.arg == "trace" and node.annotation is not None and ast.unparse(node.annotation) == "Any"
        elif isinstance(node, ast.arguments):
            options = node.kwarg is not None and node.vararg is None and node.kwarg.annotation
            hidden = bool(options) and ast.unparse(options) == "Any"
        elif isinstance(node, ast.AnnAssign):
            hidden = ast.unparse(node.target) == "trace" and ast.unparse(node.annotation) == "Any"
        else:
            continue
        if hidden:
            line = node.kwarg.lineno if isinstance(node, ast.arguments) else node.lineno
            places.append(f"{module.relative_to(PACKAGE)}:{line}")
    return sorted(places)


def test_signatures_say_what_they_take():
    assert [place for module in modules() for place in hides_what_it_takes(module)] == []


def test_the_checks_see_a_signature_that_hides_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    bad = tmp_path / "planning.py"
    bad.write_text(
        "def plan(budget, **options: Any): ...\ncast('Any', self).parser\ndef show(trace: Any): ...\ntrace: Any = x\n"
        "def applied(*args: Any, **kwargs: Any): ...\ndef size(**sizes: int): ...\ncast('ast.Module', tree)\n"
    )
    assert hides_what_it_takes(bad) == [f"planning.py:{line}" for line in range(1, 5)]


def test_imports_go_one_way():
    assert [line for module in modules() for line in violations(module)] == []


def test_no_modules_import_one_another():
    assert circles() == []


def test_every_import_is_written_in_full():
    assert [name for module in modules() for name, _ in imports(module) if name.startswith(".")] == []


def test_private_jax_stays_in_its_seam():
    others = [module for module in modules() if layer_of(module) != "_jax"]
    assert [place for module in others for place in names_private_jax(module)] == []


def test_names_of_primitives_and_parameters_stay_in_the_seam():
    others = [module for module in modules() if layer_of(module) != "_jax"]
    assert [place for module in others for place in asks_for_primitives(module)] == []


def test_the_checks_see_a_name_of_a_primitive(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    bad = tmp_path / "facts.py"
    bad.write_text(
        "eqn.primitive.name == 'scan'\n'while' != _jax.primitive_name(eqn)\neqn.primitive.name in ('jit', 'pjit')\n"
        "eqn.primitive.name.startswith('custom_')\neqn.params['length']\n"
        "match primitive_name(eqn):\n    case 'cond': ...\n"
        "name = _jax.primitive_name(eqn)\n"
    )
    assert asks_for_primitives(bad) == [f"facts.py:{line}" for line in range(1, 7)]


def test_the_checks_see_a_violation(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "views").mkdir()
    bad = tmp_path / "views" / "html.py"
    bad.write_text(
        "import jax.numpy\ndef f():\n    from remat_magic.engine import engine\nif TYPE_CHECKING:\n"
        "    from remat_magic import widget\nfrom ..facts import facts\nfrom jax._src import core\n"
    )
    assert sorted(violation.split(" imports ")[1] for violation in violations(bad)) == [
        "..facts.facts",
        "jax._src.core",
        "jax.numpy",
        "remat_magic.engine.engine",
        "remat_magic.widget",
    ]
    assert names_private_jax(bad) == ["views/html.py:7"]


def test_the_checks_see_a_circle(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("def f():\n    from remat_magic import b\n")
    (tmp_path / "b.py").write_text("if TYPE_CHECKING:\n    from remat_magic.a import f\n")
    (tmp_path / "c.py").write_text("from remat_magic import errors\n")
    assert circles() == [["remat_magic.a", "remat_magic.b"], ["remat_magic.b", "remat_magic.a"]]


@functools.cache
def imported_by(*codes: str) -> list[set[str]]:
    """The modules that a fresh interpreter holds after running each of ``codes``, one after another."""
    told = "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))\n"
    program = "".join(code + told for code in codes)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent, timeout=400
    )
    return [set(json.loads(line)) for line in ran.stdout.splitlines()[-len(codes) :]]


# Each imports more than the one before, and is to do without what it does without in an interpreter of its own.
WITHOUT_JAX = (
    "import remat_magic.records",
    "import remat_magic.devices",
    "import remat_magic.views.html, remat_magic.views.text",
)
WITH_JAX = "import remat_magic.api", "import remat_magic.comparing.compare"


@pytest.mark.parametrize(
    ("code", "never"),
    [
        # Records are pickled and shown where JAX is not installed.
        (WITHOUT_JAX[0], {"jax", "jaxlib", "numpy", "IPython", "rich"}),
        (WITHOUT_JAX[1], {"jax", "remat_magic.views", "remat_magic.planning"}),
        (WITHOUT_JAX[2], {"jax", "jaxlib", "ipywidgets", "anywidget"}),
        # A trace is made before anybody asks for a plan, and often nobody does.
        (WITH_JAX[0], {"scipy", "remat_magic.planning", "remat_magic.views", "remat_magic.editing"}),
        (WITH_JAX[1], {"remat_magic.views", "rich"}),
    ],
)
def test_an_import_costs_only_what_it_needs(code, never):
    codes = WITHOUT_JAX if code in WITHOUT_JAX else WITH_JAX
    assert imported_by(*codes)[codes.index(code)] & never == set()


def test_loading_the_extension_imports_only_what_every_cell_needs():
    before, after = imported_by(
        "import jax, IPython; from IPython.testing.globalipapp import start_ipython; ip = start_ipython()",
        "ip.run_line_magic('load_ext', 'remat_magic')",
    )
    assert "remat_magic" in after
    heavy = {"anywidget", "ipywidgets", "rich", "scipy", "matplotlib", "remat_magic.views", "remat_magic.widget"}
    assert (after - before) & heavy == set()


def test_each_module_of_the_tests_is_imported_once():
    """Else a fixture, a class or a cache of a helper module would be two."""
    folder = str(Path(__file__).parent)
    loaded = {name: str(getattr(module, "__file__", None)) for name, module in sys.modules.items()}
    test_files = [file for file in loaded.values() if file.startswith(folder)]
    assert sorted(test_files) == sorted(set(test_files))
    assert all(name.startswith("tests") for name, file in loaded.items() if file in test_files)


def test_typed_and_complete():
    assert (PACKAGE / "py.typed").is_file()
    assert list((PACKAGE / "views" / "static").glob("*.css"))
    assert list((PACKAGE / "widget" / "scripts").glob("*.js"))
