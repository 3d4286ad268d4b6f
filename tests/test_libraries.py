"""Values made in installed packages: the user's line that called them, and the library's own line beside it."""

import importlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.user_files import is_library_file, is_user_file
from remat_magic.views.source import listing_html
from tests.test_views_listing import f32

SHELF = """\
import jax
import jax.numpy as jnp


def unused(x):
    return x


class Dense:
    # A long way from the name of the function to what it computes.
    #
    #
    #
    def apply(self, W, x):




        y = jnp.sin(x @ W)
        return y


@jax.jit
def jitted(x):
    return jnp.sin(x)


def through(f, x):
    return f(x)
"""


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """An installed package of one module."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "shelf.py").write_text(SHELF)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("shelf")
    sys.modules.pop("shelf")


def line_of(text):
    return SHELF.split("\n").index(text) + 1


def kept(report):
    return [residual for residual in report.residuals if residual.kind == "intermediate"]


def test_both_lines_are_known(shelf, remat3):
    def f(W, x):
        return jnp.sum(shelf.Dense().apply(W, x) ** 2)

    report = rm.trace(f, f32(4, 4), f32(3, 4)).report("nothing_saveable")
    (dot,) = [equation for equation in report.repeated if equation.primitive == "dot_general"]
    assert dot.source.function == "f"
    assert dot.source.expression == "shelf.Dense().apply(W, x)"
    assert dot.library.place == f"shelf.py:{line_of('        y = jnp.sin(x @ W)')}"
    assert dot.library.expression == "x @ W"


def test_values_and_programs_have_it_too(shelf, remat3):
    def f(x):
        return jnp.sum(shelf.jitted(x) * 2)

    report = rm.trace(f, f32(3)).report("everything_saveable")
    (cos,) = kept(report)
    assert cos.library.expression == "jnp.sin(x)"  # inside the library's own jit
    assert [origin.library for origin in cos.origins] == [cos.library]
    lines = [line for line in report.forward.lines if line.primitive in ("sin", "cos")]
    assert lines
    assert all(line.library == cos.library for line in lines)


def test_code_of_ones_own_that_a_library_calls_is_ones_own(shelf):
    def f(x):
        return jnp.sum(shelf.through(jnp.sin, x) + shelf.through(lambda x: jnp.sin(x), x))

    report = rm.trace(f, f32(3)).report("everything_saveable")
    libraries = [residual.library for residual in kept(report)]
    assert sorted(library.function if library else "" for library in libraries) == ["", "through"]


def test_a_function_that_is_a_librarys_own(shelf):
    """No line of the user's makes anything; the library's do."""
    trace = rm.trace(shelf.jitted, f32(3))
    report = trace.report("everything_saveable")
    (cos,) = kept(report)
    assert (cos.source, cos.library.function) == (None, "jitted")
    assert trace.sources == ()
    assert "no line of yours" in listing_html(report)


def test_jax_is_no_library():
    assert not is_library_file(jax.nn.__file__)
    assert not is_library_file(re.__file__)
    assert not is_library_file(rm.__file__)
    assert is_library_file(pytest.__file__)
    assert not is_user_file(jax.nn.__file__)  # nor anybody's own where it is installed from its repository


def test_code_that_libraries_generate_is_not_the_users():
    assert not is_user_file("<generated_unflatten_Linear>")  # of equinox
    assert not is_user_file("<attrs generated init __main__.Config>")
    assert is_user_file("<ipython-input-1-0123>")
    assert is_user_file("<stdin>")


def test_what_pip_put_into_a_folder_of_ones_own_is_a_library_and_what_lies_beside_it_is_not(tmp_path):
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "tool-1.0.dist-info").mkdir()
    (tmp_path / "tool-1.0.dist-info" / "RECORD").write_text("tool/helpers.py,sha256=x,0\nsingle.py,,\n")
    for file, installed in (("tool/helpers.py", True), ("single.py", True), ("train.py", False)):
        assert is_library_file(str(tmp_path / file)) == installed
        assert is_user_file(str(tmp_path / file)) != installed
