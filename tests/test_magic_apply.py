"""Apply rebinds a plain name, once the running cell has ended, and never nests."""

import functools

import pytest

from remat_magic.notebook.rebinding import applied, original_of
from remat_magic.records import RematError


@pytest.fixture
def loss(cells, engine):
    """The user's function, defined in a cell of its own."""
    cells.ok("import functools, jax", "def loss(x, scale=1.0):", "    'The loss.'", "    return x * scale")
    return cells.ns["loss"]


def test_the_name_is_rebound_when_the_cell_has_ended(cells, engine, loss):
    cells.ok("%%remat --apply -p dots_saveable", "during = loss", "loss(2.0)")
    assert cells.ns["during"] is loss
    assert cells.ns["loss"] is not loss
    assert cells.ns["loss"](2.0, scale=3.0) == ("under", "dots_saveable", 6.0)
    assert "`loss` now runs under dots_saveable; a jit, grad or partial made of it before keeps" in cells.out


def test_applying_again_replaces(cells, engine, loss):
    for policy in ("dots_saveable", "everything_saveable", "dots_saveable"):
        cells.ok(f"%remat --apply -p {policy} loss(2.0)")
        assert engine.last.fun is loss
        assert cells.ns["loss"].__wrapped__ is loss
        assert cells.ns["loss"](2.0) == ("under", policy, 2.0)


def test_an_applied_function_is_inspected_as_its_original(cells, engine, loss):
    cells.ok("%remat --apply -p dots_saveable loss(2.0)")
    for call in ("loss(2.0)", "jax.grad(loss)(2.0)", "jax.jit(jax.grad(loss))(2.0)", "functools.partial(loss)(2.0)"):
        cells.ok(f"%remat {call}")
        assert engine.last.fun is loss


def test_as_written_brings_the_original_back(cells, engine, loss):
    cells.ok("%remat --apply -p dots_saveable loss(2.0)")
    cells.ok("%remat --apply loss(2.0)")
    assert cells.ns["loss"] is loss
    assert "runs as it was written" in cells.out


@pytest.mark.parametrize("call", ["jax.grad(loss)(2.0)", "jax.jit(loss)(2.0)", "functools.partial(loss, 2.0)()"])
def test_the_function_below_a_wrapper_is_what_is_rebound(cells, engine, loss, call):
    cells.ok(f"%remat --apply -p dots_saveable {call}")
    assert original_of(cells.ns["loss"]) is loss
    assert cells.ns["loss"] is not loss


@pytest.mark.parametrize("call", ["(lambda x: x)(2.0)", "model.loss(2.0)", "table['f'](2.0)"])
def test_plain_names_only(cells, engine, call):
    cells.ok("class Model:", "    def loss(self, x): return x", "model, table = Model(), {'f': lambda x: x}")
    sentence = cells.complaint(f"%remat --apply -p dots_saveable {call}")
    assert "has no plain name to rebind: assign the function to a variable and inspect that" in sentence
    assert cells.ok(f"%remat {call}").apply is None


def test_the_widgets_button_does_the_same(cells, engine, loss):
    widget = cells.ok("%remat -p dots_saveable -o w loss(2.0)")
    assert cells.ns["w"] is widget
    assert cells.ns["loss"] is loss
    assert widget.apply(widget).startswith("`loss` now runs under dots_saveable;")
    assert cells.ns["loss"](2.0) == ("under", "dots_saveable", 2.0)


def test_a_name_that_means_something_else_now_is_left_alone(cells, engine, loss):
    widget = cells.ok("%remat -p dots_saveable loss(2.0)")
    cells.ok("def loss(x): return -x")
    with pytest.raises(RematError, match="`loss` has been redefined since it was inspected: inspect it again"):
        widget.apply(widget)
    assert cells.ns["loss"](1.0) == -1.0


def test_a_failed_cell_applies_nothing(cells, engine, loss):
    assert not cells.run("%%remat --apply -p dots_saveable", "1 / 0", "loss(2.0)").success
    assert cells.ns["loss"] is loss


def test_original_of_what_was_not_applied():
    def f(x):
        return x

    @functools.wraps(applied(f, f))
    def other(x):
        return x

    assert original_of(applied(applied(f, f), f)) is f
    assert original_of(other) is other
    assert original_of(3) == 3
