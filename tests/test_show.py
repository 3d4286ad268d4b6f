"""``rm.show``: the widget without a magic, and where there is no kernel of IPython's."""

import jax.numpy as jnp
import pytest

import remat_magic as rm
from tests.programs import f32


def traced():
    return rm.trace(lambda w, x: jnp.sin(jnp.tanh(w @ x)).sum(), f32(4, 4), f32(4))


def test_a_widget_without_a_magic():
    trace = traced()
    widget = rm.show(trace, "dots_saveable", device="H100 SXM")
    assert (widget.policy, widget.at) == ("dots_saveable", "function")
    assert widget.report is trace.report("dots_saveable")
    widget.close()
    with pytest.raises(rm.RematError, match=r"rm\.show shows a trace, not function: rm\.show\(rm\.trace\("):
        rm.show(lambda x: x)
    with pytest.raises(rm.RematError, match="nonsense"):
        rm.show(trace, "nonsense")


def test_a_page_without_a_kernel_is_told_everything():
    """As marimo's: it says hello, and what was begun is completed for it."""
    widget = rm.show(traced())
    assert not widget._good.complete
    widget._worker.join()
    assert not widget._good.complete  # nobody looks
    widget._on_message(widget, {"type": "hello"}, [])
    widget._worker.join()
    assert widget._good.complete
    widget._on_message(widget, {"type": "choose", "policy": "nothing_saveable", "at": "function", "serial": 1}, [])
    widget._worker.join()
    assert (widget.policy, widget._good.policy, widget._good.complete) == ("nothing_saveable", "nothing_saveable", True)
    widget.close()
