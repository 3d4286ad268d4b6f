"""What a cell asks about its functions and calls while it runs, to find the call that is meant.

``hooked_call`` and ``last_call`` write these questions into the cell. What they ask about is kept until the answer has
been acted on, which is at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from remat_magic.notebook.session import Session


class Inspected(NamedTuple):
    """Told apart from a value of the user's; ``widget`` is None with ``--text``."""

    widget: Any


class Questions:
    """The questions, and what is kept between them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._functions: dict[int, Any] = {}
        self._call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self._result: Any = None

    def forget(self) -> None:
        """Let go of functions that a cell before asked about and then failed."""
        self._functions.clear()

    def consumes(self, number: int, fun: Any, /) -> bool:
        """Whether a call of this function means a call in its brackets, as ``print(f(x))`` does."""
        from remat_magic.notebook.functions import consumes

        self._functions[number] = fun
        return consumes(fun)

    def prepares(self, number: int, fun: Any, /) -> bool:
        """The same where the result has a use: whether a call of this function is none that could be meant."""
        from remat_magic.notebook.functions import prepares

        self._functions[number] = fun
        return prepares(fun)

    def computes(self, number: int) -> bool:
        """Whether the function that was asked about is a library's, as ``jnp.mean`` in ``jnp.mean(f(x))``."""
        from remat_magic.notebook.functions import prepares

        return prepares(self._functions[number])

    def gives_result(self, number: int, fun: Any, steps: tuple[str, ...], /) -> bool:
        """Whether what is done to the result of a call of this function is done to arrays, as in ``f(x).item()``."""
        from remat_magic.notebook.functions import gives_result

        self._functions[number] = fun
        return gives_result(fun, steps)

    def only_show(self, functions: Callable[[], tuple[Any, ...]], gradient: Callable[[], Any] | None = None) -> bool:
        """Whether calls of these functions only show, or read off, something of what a call before them gives.

        Args:
            functions: gives them.
            gradient: gives the function of the call before them, if that has to take a gradient.
        """
        from remat_magic.notebook.functions import differentiates, prepares

        try:
            return all(map(prepares, functions())) and (gradient is None or differentiates(gradient()))
        except Exception:  # noqa: BLE001  (not known yet: what it is shows when the cell comes to it)
            return False

    def kept(self, number: int) -> Any:
        """A function that was asked about."""
        return self._functions.pop(number)

    def is_meant(self, fun: Any, /, *args: Any, **kwargs: Any) -> bool:
        """Whether a call is to be inspected, where the plain cell has a use for its result."""
        from remat_magic.notebook.callee import is_meant

        self._call = fun, args, kwargs
        return is_meant(fun, args, kwargs)

    def run_kept(self) -> Any:
        """Make the call that was asked about last."""
        __tracebackhide__ = True
        fun, args, kwargs = self.take_call()
        return fun(*args, **kwargs)

    def inspection(self, result: Any) -> Any:
        """What is shown, whichever call it is of."""
        return result.widget if isinstance(result, Inspected) else result

    def take_call(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The call that was asked about last: its function, positional and keyword arguments."""
        call, self._call = self._call, None
        assert call is not None, "a call is asked about before it is made"
        return call

    def runs(self, result: Any) -> bool:
        """Whether this is a value as the plain cell has it, and not an inspection."""
        inspected = isinstance(result, Inspected)
        self._result = result.widget if inspected else result
        return not inspected

    def result(self) -> Any:
        """The value, or the widget."""
        result, self._result = self._result, None
        return result
