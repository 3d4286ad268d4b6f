"""``rm.show``: the widget without a magic, and where there is no kernel of IPython's."""

import sys
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.widget import widget as widget_module
from tests.programs import f32


def traced():
    return rm.trace(lambda w, x: jnp.sin(jnp.tanh(w @ x)).sum(), f32(4, 4), f32(4))


def test_show_gives_a_widget_of_a_trace_and_refuses_all_else():
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


class Screen:
    """The part of a shell that shows outputs; itself its own publisher."""

    def __init__(self):
        self.display_pub, self.outputs = self, []

    def publish(self, data, metadata=None, **_):
        self.outputs.append((data, metadata))


def test_in_colab_the_output_names_the_manager_that_can_draw_it(monkeypatch):
    """Colab draws a widget that is not ipywidgets' own only where the output's metadata name such a manager.

    Nobody has Colab here: its module is one with the function and the address that anywidget asks it for.
    """
    colab = ModuleType("google.colab.output")
    manager = SimpleNamespace(_installed_url=None)
    colab.__dict__.update(
        _widgets=manager, enable_custom_widget_manager=lambda: setattr(manager, "_installed_url", "https://manager")
    )
    monkeypatch.setitem(sys.modules, "google.colab.output", colab)
    widget, screen = rm.show(traced()), Screen()
    monkeypatch.setattr(widget_module, "_kernel", lambda: object())
    monkeypatch.setattr(widget_module, "get_ipython", lambda: screen)
    widget._ipython_display_()
    view = "application/vnd.jupyter.widget-view+json"
    (of_the_live_one,) = [metadata for data, metadata in screen.outputs if view in data]
    assert of_the_live_one == {view: {"colab": {"custom_widget_manager": {"url": "https://manager"}}}}
    widget.close()
