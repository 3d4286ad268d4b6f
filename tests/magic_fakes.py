"""An engine and a widget that only record what they are given, so that the magic is tested on its own."""

import atexit
import sys

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import remat_magic.api
from remat_magic.notebook import magic
from remat_magic.records import Choice, RematError, Report, Site


class FakeTrace:
    """Answers as ``rm.trace`` would; runs the function once with its own arguments, as tracing does."""

    def __init__(self, fun, args, kwargs, wrt, has_aux):
        self.fun, self.args, self.kwargs, self.wrt, self.has_aux = fun, args, kwargs, wrt, has_aux
        self.function_name = getattr(fun, "__name__", "?")
        self.names, self.stale, self.notes, self.gradient = ("a", "b", "attn_out"), (), (), None
        self.gradients, self.gradient = (), None
        self.sites = (Site(key="block:3", function="block", times=2, policy="none"),)
        self.groups, self.vmaps, self.mesh_devices = (), (), 1
        self.previews = []

    def preview(self, policy="as_written", at=None, namespace=None):
        if at not in (None, "function", "sites", "block:3"):
            raise RematError(f"there is no checkpoint site `{at}`: there are function, sites, block:3.")
        key = getattr(policy, "key", policy)
        self.previews.append((key, at))
        return Report(policy=key, at=at or "function", function=self.function_name)

    def report(self, policy="as_written", at=None, namespace=None, *, device=None):
        return self.preview(policy, at, namespace)

    def function(self, policy="as_written", at=None):
        def under(*args, **kwargs):
            return ("under", policy, self.fun(*args, **kwargs))

        return under

    def choices(self):
        return (Choice("as_written", "", ""), Choice("dots_saveable", "", "", aliases=("checkpoint_dots",)))


class FakeWidget:
    def __init__(
        self,
        trace,
        policy="as_written",
        at=None,
        *,
        title="",
        apply=None,
        namespace=None,
        cell_id=None,
        device="",
    ):
        self.device = device
        self.trace, self.policy, self.at, self.title, self.apply = trace, policy, at, title, apply
        self.namespace, self.cell_id = namespace, cell_id
        self.closed = False

    @property
    def function(self):
        return self.trace.function(self.policy, self.at)

    def close(self):
        self.closed = True

    def __repr__(self):
        return "<widget>"


class FakeEngine:
    """Stands in for ``remat_magic.trace``; ``last`` is what it traced."""

    def __init__(self):
        self.last = None
        self.runs = True
        self.raises = None

    def trace(self, fun, /, *args, wrt=None, has_aux=False, gradient=None, **kwargs):
        if self.raises is not None:
            raise self.raises
        if self.runs:
            fun(*args, **kwargs)
        self.last = FakeTrace(fun, args, kwargs, wrt, has_aux)
        return self.last


class Cells:
    """An isolated shell that runs cells and keeps what they print."""

    def __init__(self, shell, capsys):
        self.shell, self._capsys = shell, capsys
        self.out = self.err = ""

    @property
    def ns(self):
        return self.shell.user_ns

    def run(self, *lines):
        """Run a cell; its output goes to ``out`` and ``err``."""
        self._capsys.readouterr()
        result = self.shell.run_cell("\n".join(lines), store_history=True)
        self.out, self.err = self._capsys.readouterr()
        return result

    def ok(self, *lines):
        """Run a cell that must not fail; return its value."""
        result = self.run(*lines)
        assert result.success, self.out + self.err
        return result.result

    def complaint(self, *lines):
        """Run a cell that must end in one sentence, and nothing else; return the sentence."""
        result = self.run(*lines)
        assert isinstance(result.error_in_exec, UsageError), result
        sentence = str(result.error_in_exec)
        assert self.err == f"UsageError: {sentence}\n"
        assert "\n" not in sentence
        assert sentence.endswith(".")
        assert "Traceback" not in self.out
        return sentence


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A shell of its own, with the magic loaded and nothing of the developer's."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    InteractiveShell.clear_instance()
    # The one instance, since IPython's tracebacks ask for it to say In[n].
    ip = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}), ipython_dir=str(tmp_path))
    ip.colors = "nocolor"
    magic.load(ip)
    yield ip
    magic.unload(ip)
    atexit.unregister(ip.atexit_operations)
    ip.displayhook.do_full_cache = False  # to forget the outputs it would have all garbage collected, each time
    ip.atexit_operations()
    InteractiveShell.clear_instance()


@pytest.fixture
def cells(shell, capsys):
    return Cells(shell, capsys)


@pytest.fixture
def engine(monkeypatch):
    """The fake engine, in the place of the real one, with a widget and a text view that only record."""
    fake = FakeEngine()
    monkeypatch.setitem(vars(remat_magic.api), "trace", fake.trace)
    monkeypatch.setattr("remat_magic.widget.RematWidget", FakeWidget)
    return fake
