"""Giving a name in the user's namespace its function under a policy, and knowing such a function again.

Nothing nests: what is applied is always made from the original, and applying "as_written" brings the original back.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from remat_magic.records import RematError


def applied(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in the place of ``original``, with the original's metadata."""

    @functools.wraps(original)
    def under_policy(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return under_policy


_APPLIED = applied(lambda: None, lambda: None).__code__


def original_of(fun: Any) -> Any:
    """The function that ``fun`` was made from by ``applied``, or ``fun`` itself.

    Known by its code and not by an attribute, which ``functools.wraps`` would copy on to everything made from it.
    """
    while isinstance(fun, types.FunctionType) and fun.__code__ is _APPLIED:
        fun = fun.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    return fun


class Rebinding:
    """A plain name in a namespace that can be given another function.

    It is that of the first of some functions that has one: the inspected function and what it wraps, else the one that
    it differentiates ``inside`` and what that wraps (then ``is_inside``). RematError where none has: a method, a lambda
    in a call, an attribute.
    """

    def __init__(
        self, namespace: MutableMapping[str, Any], functions: Iterable[Any], inside: Iterable[Any] = ()
    ) -> None:
        functions, inside = list(functions), list(inside)
        self.namespace = namespace
        for number, fun in enumerate((*functions, *inside)):
            name = _name_of(fun, namespace)
            if name is not None:
                self.name, self.original = name, original_of(namespace[name])
                self.is_inside = number >= len(functions)
                return
        outermost, *_ = inside or functions
        name = getattr(outermost, "__qualname__", type(outermost).__name__)
        raise RematError(f"`{name}` has no plain name to rebind: assign the function to a variable and inspect that.")

    def apply(self, function: Callable[..., Any], policy: str) -> str:
        """Bind the name to ``function``, or for "as_written" to the original; a sentence about it."""
        name = self.name
        if original_of(self.namespace.get(name)) is not self.original:
            raise RematError(f"`{name}` has been redefined since it was inspected: inspect it again.")
        as_written = policy == "as_written"
        self.namespace[name] = self.original if as_written else applied(self.original, function)
        what = "as it was written" if as_written else f"under {policy}"
        return f"`{name}` now runs {what}; a jit, grad or partial made of it before keeps the old function."


def _name_of(fun: Any, namespace: MutableMapping[str, Any]) -> str | None:
    own = getattr(fun, "__name__", None)
    if own is not None and own in namespace and original_of(namespace[own]) is fun:
        return own
    public = (name for name in namespace if not name.startswith("_"))
    return next((name for name in public if original_of(namespace[name]) is fun), None)
