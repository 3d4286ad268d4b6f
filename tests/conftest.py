"""What every test shares: an environment of its own, whatever the developer's machine is set up like."""

import atexit
import gc
import importlib.util
import itertools
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_HOME = Path(tempfile.mkdtemp(prefix="remat-magic-tests-"))
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)

# Set on import, since JAX and IPython read these when they are first imported: no test waits for an accelerator, reads
# the developer's profile and settings, or writes into them. Subprocesses inherit them.
os.environ["JAX_PLATFORMS"] = "cpu"
# XLA's figures and text are the same without LLVM's optimisations, which take half of the time of its compilations.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
for _variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
    os.environ[_variable] = str(_HOME / _variable.lower())
    (_HOME / _variable.lower()).mkdir()
for _variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"):
    os.environ.pop(_variable, None)
for _variable in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONSTARTUP", "JUPYTER_PREFER_ENV_PATH"):
    os.environ.pop(_variable, None)

ROOT = Path(__file__).parent.parent

pytest_plugins = ["tests.magic_fakes", "tests.pretend_compiler"]  # the fixtures `shell`, `cells`, `cache`, `pretend`

# For `from tests.programs import ...`. Last, so that an installed remat_magic is what is tested.
sys.path.append(str(ROOT))


def package_folder() -> Path:
    """Where the remat_magic that is tested lies, which may be an installed one."""
    found = importlib.util.find_spec("remat_magic")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--programs N``: how many programs by chance each test of them tries."""
    parser.addoption("--programs", type=int, default=0, metavar="N", help="programs by chance in each test, new ones")


def pytest_configure(config: pytest.Config) -> None:
    """Hand on how many programs, which is read when the tests' module is imported; workers of xdist inherit it."""
    if config.getoption("--programs"):
        os.environ["REMAT_EXAMPLES"] = str(config.getoption("--programs"))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what chooses jax_remat3 itself, and what needs an extra."""
    for item in items:
        if {"remat2", "remat3"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("sets_remat3")
        for extra in _extras_of(item):
            item.add_marker(extra)
        if getattr(getattr(item, "callspec", None), "params", {}).get("remat3") is True:
            item.add_marker("slow")


def _extras_of(item: pytest.Item) -> Iterator[str]:
    """The markers of a test that is skipped without an extra: by what it calls, since a mark is forgotten."""
    if isinstance(item, pytest.Function):
        calls = {*item.function.__code__.co_names} & {*vars(item.module)}
        yield from (marker for name, marker in {"library": "models", "compiler": "compilers"}.items() if name in calls)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over all modules from here on: tests that call it would wait for that."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """And over what each test leaves in JAX's caches, millions of objects in all, which every edit would look at."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _on_the_cpu() -> None:
    import jax

    assert jax.default_backend() == "cpu", "JAX was imported before tests/conftest.py could choose its platform"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Writes a file of the user's and imports it as a module, under the given name or one of its own."""

    def load(text: str | bytes, name: str = "") -> types.ModuleType:
        name = name or f"written_{next(_NUMBERS)}"
        path = tmp_path / f"{name}.py"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
        return made

    return load


_NUMBERS = itertools.count()


def _remat3_settings() -> list[bool]:
    import importlib.metadata

    # jax 0.10 has the flag, half-done: names are lost under it, so that remat_magic refuses it there.
    return [False, True] if int(importlib.metadata.version("jax").split(".")[1]) >= 12 else [False]


def _under(on: bool) -> Iterator[bool]:
    import jax

    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", on)
    try:
        yield on
    finally:
        jax.config.update("jax_remat3", before)


@pytest.fixture(params=_remat3_settings(), ids=lambda on: "remat3" if on else "remat2")
def remat3(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Run a test under each implementation of ``jax.checkpoint`` that this JAX has."""
    yield from _under(request.param)


@pytest.fixture
def remat2() -> Iterator[bool]:
    """Run a test with jax_remat3 off, whatever the environment says: it asks policies about more operations."""
    yield from _under(False)
