"""The way of the data goes in one direction: who may import whom, and what an import may cost."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import package_folder

PACKAGE = package_folder()

# A layer is a top-level module or subpackage, named by where it stands in the way from the user's cell to the browser;
# it may import those that are listed for it, in functions and for type checkers too, and these third-party packages.
LEAVES = {"errors", "units", "parsing", "user_files"}
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "units": ({"errors"}, set()),
    "parsing": (set(), set()),
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
        {"records", "_jax", "policies", "jaxprs", "engine", "facts", "compare", "devices"},
        {"jax", "numpy", "scipy"},
    ),
    "measuring": ({"records", "_jax", "jaxprs", "engine", "facts", "devices"}, {"jax", "numpy"}),
    "compare": ({"records", "policies", "facts", "devices"}, set()),
    "advice": ({"records", "_jax", "policies", "jaxprs", "engine", "facts", "planning", "devices"}, set()),
    "editing": (
        {"records", "_jax", "libraries", "policies", "jaxprs", "engine", "facts", "planning", "devices"},
        {"jax"},
    ),
    "api": (
        {"records", "engine", "facts", "planning", "measuring", "compare", "advice", "editing", "devices"},
        set(),
    ),
    "__main__": ({"_jax", "api", "devices", "measuring", "views", "widget"}, {"jax"}),
    "views": ({"records"}, {"rich", "pygments", "IPython"}),
    "widget": ({"records", "views", "devices", "api"}, {"anywidget", "ipywidgets", "traitlets", "IPython", "rich"}),
    "notebook": (
        {
            "records",
            "_jax",
            "libraries",
            "policies",
            "jaxprs",
            "devices",
            "measuring",
            "meshes",
            "views",
            "api",
            "widget",
        },
        {"IPython", "jax", "rich"},
    ),
    # What `import remat_magic` offers.
    "__init__": (
        {"records", "policies", "devices", "meshes", "measuring", "compare", "api", "widget", "notebook"},
        {"IPython"},
    ),
}


# A record that shows or applies itself asks what is above it: in these two lines, and no others.
UPWARD = {
    ("records/base.py", "remat_magic.views.display"),
    ("records/plan.py", "remat_magic.engine.engine.with_plan"),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(node: ast.AST) -> list[str]:
    """The dotted names that a statement imports, wherever it stands."""
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def imports_what_it_may_not(node: ast.AST, layer: str) -> bool:
    ours, others = LAYERS[layer]
    ours = ours | {layer} if layer in LEAVES else ours | {layer} | LEAVES
    for name in imported(node):
        top, _, rest = name.partition(".")
        if not (rest.split(".")[0] in ours if top == "remat_magic" else top in sys.stdlib_module_names | others):
            return True
    return False


def names_private_jax(node: ast.AST, layer: str) -> bool:
    private = any(name.startswith(("jax._src", "jaxlib")) for name in imported(node))
    private |= isinstance(node, ast.Attribute) and node.attr == "_src" and ast.unparse(node.value) == "jax"
    return private and layer != "_jax"


def knows_a_primitive(node: ast.AST, layer: str) -> bool:
    """Whether it knows what a primitive or a parameter of one is called."""

    def is_name(node: ast.expr) -> bool:
        text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
        return text.endswith("primitive_name" if isinstance(node, ast.Call) else ".primitive.name")

    compared = isinstance(node, ast.Compare) and any(map(is_name, (node.left, *node.comparators)))
    matched = isinstance(node, ast.Match) and is_name(node.subject)
    asked = isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith") and is_name(node.value)
    params = isinstance(node, ast.Attribute) and node.attr == "params"
    return (compared or matched or asked or params) and layer != "_jax"


def hides_what_it_takes(node: ast.AST, layer: str) -> bool:
    """Whether a signature or a cast says less than is known: no editor or type checker can tell what is meant.

    ``**kwargs: Any`` is right only where a whole call is passed on, and then there is ``*args`` beside it.
    """

    def is_any(node: ast.expr | None) -> bool:
        return node is not None and ast.unparse(node).strip("'") == "Any"

    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "cast" and is_any(node.args[0])
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        options = node.args.kwarg
        return options is not None and node.args.vararg is None and is_any(options.annotation)
    if isinstance(node, ast.arg):
        return node.arg == "trace" and is_any(node.annotation)
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "trace" and is_any(node.annotation)


RULES = (imports_what_it_may_not, names_private_jax, knows_a_primitive, hides_what_it_takes)


def violations(texts: dict[str, str]) -> list[str]:
    """What is against the rules in modules, by their paths in the package."""
    found, imports = list[str](), dict[str, set[str]]()
    for path, text in texts.items():
        layer = path.partition("/")[0].removesuffix(".py")
        nodes = [*ast.walk(ast.parse(text))]
        nodes = [node for node in nodes if UPWARD.isdisjoint((path, name) for name in imported(node))]
        for rule in RULES:
            found += sorted(f"{path}:{node.lineno} {rule.__name__}" for node in nodes if rule(node, layer))
        name = f"remat_magic/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        imports[name] = {target for node in nodes for target in imported(node)}
    for name, targets in imports.items():
        targets = {target if target in imports else target.rpartition(".")[0] for target in targets}
        imports[name] = targets & imports.keys() - {name}
    # What is left when every module that imports nothing of the rest has been taken out, again and again.
    while leaves := {name for name, targets in imports.items() if not targets}:
        imports = {name: targets - leaves for name, targets in imports.items() if name not in leaves}
    return found + [f"{name} imports {other}, which imports it" for name in imports for other in sorted(imports[name])]


def test_every_module_keeps_to_the_rules():
    texts = {module.relative_to(PACKAGE).as_posix(): module.read_text(encoding="utf-8") for module in modules()}
    assert violations(texts) == []


@pytest.mark.parametrize(
    ("rule", "path", "text", "lines"),
    [
        (
            imports_what_it_may_not,
            "views/html.py",
            "import jax.numpy\ndef f():\n    from remat_magic.engine import engine\nif TYPE_CHECKING:\n"
            "    from remat_magic import widget\nfrom ..facts import facts\nimport ast, rich.text\n",
            [1, 3, 5, 6],
        ),
        (
            names_private_jax,
            "facts.py",
            "from jax._src import core\nimport jaxlib\njax._src.core\nimport jax._src.ad_util\njax.core\n",
            [1, 2, 3, 4],
        ),
        (
            knows_a_primitive,
            "facts.py",
            "eqn.primitive.name == 'scan'\n'while' != _jax.primitive_name(eqn)\neqn.primitive.name in ('jit', 'pjit')\n"
            "eqn.primitive.name.startswith('custom_')\neqn.params['length']\n"
            "match primitive_name(eqn):\n    case 'cond': ...\n"
            "name = _jax.primitive_name(eqn)\n",
            [1, 2, 3, 4, 5, 6],
        ),
        (
            hides_what_it_takes,
            "planning.py",
            "def plan(budget, **options: Any): ...\ncast('Any', self).parser\ndef show(trace: Any): ...\n"
            "trace: Any = x\ndef applied(*args: Any, **kwargs: Any): ...\n"
            "def size(**sizes: int): ...\ncast('ast.Module', tree)\n",
            [1, 2, 3, 4],
        ),
    ],
)
def test_the_rules_see_a_violation(rule, path, text, lines):
    found = [violation for violation in violations({path: text}) if violation.endswith(rule.__name__)]
    assert found == [f"{path}:{line} {rule.__name__}" for line in lines]


def test_a_circle_is_seen():
    texts = {
        "facts/a.py": "def f():\n    from remat_magic.facts import b\n",
        "facts/b.py": "if TYPE_CHECKING:\n    from remat_magic.facts.a import f\n",
        "facts/c.py": "from remat_magic import errors\n",
    }
    names = "remat_magic.facts.a", "remat_magic.facts.b"
    assert violations(texts) == [f"{one} imports {two}, which imports it" for one, two in (names, names[::-1])]


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
WITH_JAX = "import remat_magic.api", "import remat_magic.compare"


@pytest.mark.parametrize(
    ("code", "never"),
    [
        # Records are pickled and shown where JAX is not installed.
        (WITHOUT_JAX[0], {"jax", "jaxlib", "numpy", "IPython", "rich"}),
        (WITHOUT_JAX[1], {"jax", "remat_magic.views", "remat_magic.planning"}),
        (WITHOUT_JAX[2], {"jax", "jaxlib", "ipywidgets", "anywidget"}),
        # A trace is made before anybody asks for a plan, and often nobody does.
        # After jax.extend jax 0.12 compiles all anew that the user has run.
        (WITH_JAX[0], {"jax.extend", "scipy", "remat_magic.planning", "remat_magic.views", "remat_magic.editing"}),
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
