"""What is said of the environment, and a JAX that lacks some of what it does not promise to keep."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import partial_eval as pe

import remat_magic as rm
from remat_magic import __main__ as command
from remat_magic import _jax
from tests.conftest import package_folder

# Runs a program in which the named things are not where the package looks for them; JAX itself still has them.
HIDE = """
import importlib, sys, types
import jax, jax.ad_checkpoint
import jax._src.interpreters.partial_eval, jax._src.pjit

class Without(types.ModuleType):
    def __init__(self, module, names):
        super().__init__(module.__name__)
        self.__dict__.update({name: value for name, value in vars(module).items() if name not in names})

hidden = {}
for path in sys.argv[1:]:
    module, _, name = path.rpartition(".")
    hidden.setdefault(module, set()).add(name)
for module, names in hidden.items():
    sys.modules[module] = Without(importlib.import_module(module), names)
"""
INSPECT = """
import jax.numpy as jnp
import remat_magic as rm
from remat_magic import _jax

def loss(w, x):
    return jnp.sum(jax.checkpoint(jnp.tanh)(x @ w))

shapes = jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((2, 4), "float32")
for policy in ("none", "nothing_saveable", "dots_saveable"):
    trace = rm.trace(loss, *shapes)
    report = trace.report(policy, "function")
    print(policy, report.saved_bytes, len(report.residuals), report.recomputed_flops, trace.stale)
for lack in _jax.lacks():
    print("LACKS", lack.name)
"""
COURTESIES = [
    "jax._src.util.weakref_lru_cache",
    "jax._src.interpreters.partial_eval.trace_to_jaxpr",
    "jax._src.ad_checkpoint._trace_to_jaxpr",
    "jax._src.pjit._infer_params_cached",
    "jax._src.pjit._check_and_canonicalize_out_shardings",
    "jax._src.config.jax_xla_profile_version",
    "jax._src.config.enable_x64",
    "jax._src.config.no_tracing",
    "jax._src.config.config_ext",
    "jax._src.config.config_states",
    "jax._src.mesh.thread_resources",
    "jax._src.dtypes.short_dtype_name",
]


def run(program: str, *hidden: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE + program, *hidden],
        capture_output=True,
        text=True,
        cwd=package_folder().parent,
        timeout=300,
        check=False,
    )


def figures(ran: subprocess.CompletedProcess[str]) -> list[str]:
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stdout.splitlines() if not line.startswith("LACKS")]


@pytest.mark.slow
def test_a_trace_does_without_every_courtesy():
    ran = run(INSPECT, *COURTESIES)
    assert figures(ran) == figures(run(INSPECT))
    lacking = {line.removeprefix("LACKS ") for line in ran.stdout.splitlines() if line.startswith("LACKS")}
    # The caches are not asked for where there is nothing to make another of them with.
    assert {name for name in COURTESIES if "trace_to_jaxpr" not in name and "jax._src.pjit." not in name} <= lacking


@pytest.mark.slow
def test_one_sentence_says_what_a_jax_lacks_that_is_needed():
    name = "jax._src.ad_checkpoint.name_p"
    ran = run(INSPECT, name)
    assert ran.returncode == 1
    error = ran.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"remat_magic\.errors\.RematError: remat_magic does not work with jax {re.escape(jax.__version__)}: "
        rf"it has no {re.escape(name)}\. It was tested on jax 0\.10, 0\.11, 0\.12: install one of these "
        r"\(pip install 'jax~=0\.12\.0'\), or a newer remat_magic\.",
        error,
    )
    ran = run("import runpy; del sys.argv[1:]; runpy.run_module('remat_magic', run_name='__main__')", name)
    assert ran.returncode == 1
    assert f"this jax has no {name}: nothing can be traced" in ran.stdout


def test_a_failing_search_for_older_traces_costs_its_note_alone(monkeypatch):
    def fail(*_args):
        raise TypeError("keys of another kind")

    monkeypatch.setattr("remat_magic._jax.settings._alive", fail)
    trace = rm.trace(lambda x: jnp.sum(jnp.sin(x)), np.ones(3, "float32"))
    assert trace.stale == ()
    assert trace.report("none").saved_bytes == 12  # cos


def test_jaxprs_written_in_another_way_are_told_in_one_sentence(monkeypatch):
    def fail(*_args):
        raise AttributeError("no traceback")

    monkeypatch.setattr("remat_magic.engine.primal.find_sites", fail)
    with pytest.raises(AttributeError):  # on a JAX that was tested it is our fault
        rm.trace(lambda x: jnp.sum(x), np.ones(3, "float32"))
    monkeypatch.setattr("remat_magic._jax.private.JAX_VERSION", (0, 99, 0))
    with pytest.raises(rm.RematError, match=r"^remat_magic does not work with jax .*: it writes its jaxprs in another"):
        rm.trace(lambda x: jnp.sum(x), np.ones(3, "float32"))


@pytest.mark.parametrize("when", ["before", "during"])
def test_what_another_library_puts_in_the_place_of_a_cache_stays(monkeypatch, when):
    asked = []
    jax_own = pe.trace_to_jaxpr
    monkeypatch.setattr(pe, "trace_to_jaxpr", jax_own)  # put back at the end

    def patch():
        found = pe.trace_to_jaxpr

        def others(*args, **kwargs):
            asked.append(args[0])
            return found(*args, **kwargs)

        pe.trace_to_jaxpr = others
        return others

    patches = [patch()] if when == "before" else []

    def loss(x):
        if when == "during" and not patches:
            patches.append(patch())
        return jnp.sum(jax.checkpoint(jnp.sin)(x))

    report = rm.trace(loss, np.ones(3, "float32")).report("nothing_saveable", "function")
    assert report.recomputed  # the cosine
    assert pe.trace_to_jaxpr is patches[0]
    before = len(asked)
    jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0)
    assert len(asked) > before
    rm.trace(loss, np.ones(3, "float32")).report("nothing_saveable", "function")
    assert pe.trace_to_jaxpr is patches[0]


def test_the_command_prints_versions_and_what_is_missing(monkeypatch, capsys):
    assert command.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"Python {sys.version.split()[0]}" in lines
    assert any(line.startswith(f"jax {jax.__version__}, jaxlib ") and line.endswith("(tested)") for line in lines)
    assert f"jax_remat3 is {'on' if _jax.remat3() else 'off'}" in lines
    assert not any(line.startswith("missing") for line in lines)
    assert any("is kept in" in line and "of at most 1.00 GB" in line for line in lines)
    version = command.version
    monkeypatch.setattr(command, "version", lambda package: "" if package == "rich" else version(package))
    assert command.main() == 1
    assert "missing: rich" in capsys.readouterr().out.splitlines()
