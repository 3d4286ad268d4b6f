"""Jaxprs, their equations and variables: taken apart, changed, printed, evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as core

from remat_magic._jax.private import courtesy

Jaxpr: Any = core.Jaxpr
ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)  # 0.12 has one class for open and closed jaxprs
Literal: Any = core.Literal
Var: Any = core.Var
DropVar: Any = core.DropVar


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without constants; 0.12 has one class for both and returns itself."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The values of a jaxpr's constvars, empty for an open one."""
    return jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter's value is a jaxpr, open or closed."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def with_body(jaxpr: Any, body: Any) -> Any:
    """``body`` closed as ``jaxpr`` was: with the same constants, or open."""
    if Jaxpr is ClosedJaxpr:  # 0.12: one class; the constants belong to the leading invars
        return body.with_consts(jaxpr.consts) if jaxpr.consts and not body.consts else body
    make: Any = ClosedJaxpr  # 0.10: a class of its own, made of a jaxpr and its constants
    return make(body, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else body


def like_tuple(value: Any, items: Sequence[Any]) -> Any:
    """A tuple of jaxprs with other items: a linear solve has its four in a named tuple, and reads them by name."""
    make = getattr(value, "_make", tuple)
    return make(items)


_allowed = courtesy("jax._src.effects.custom_derivatives_allowed_effects", "steps of losses that print have no memory")


def has_effects(jaxpr: Any) -> bool:
    """Whether running it does more than to compute its outputs, and than a rule of a custom derivative may do.

    Such a rule may print, call back and talk to other devices.
    """
    effects = open_jaxpr(jaxpr).effects
    return bool(_allowed.filter_not_in(effects) if _allowed else effects)


def replace_eqns(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any] | None = None) -> Any:
    """An open jaxpr with other equations (and outputs)."""
    jaxpr = open_jaxpr(jaxpr)
    changes: dict[str, Any] = {"eqns": list(eqns), "debug_info": jaxpr.debug_info}
    if outvars is not None:
        changes["outvars"] = list(outvars)
    return jaxpr.replace(**changes)


def with_outputs(closed: Any, count: int) -> Any:
    """A closed jaxpr with the first ``count`` of its outputs, itself where it has no more."""
    jaxpr = open_jaxpr(closed)
    if len(jaxpr.outvars) == count:
        return closed
    return with_body(closed, replace_eqns(jaxpr, jaxpr.eqns, jaxpr.outvars[:count]))


def name_stack(eqn: Any) -> str:
    """The name stack of an equation, as text."""
    return str(eqn.source_info.name_stack)


def traceback_of(eqn: Any) -> Any:
    """The traceback object of an equation (None where JAX kept none); its identity is the key of provenance."""
    return eqn.source_info.traceback


def with_traceback(eqn: Any, token: Any) -> Any:
    """A copy of an equation that carries ``token`` in place of its traceback."""
    return eqn.replace(source_info=eqn.source_info.replace(traceback=token))


def fresh_var(like: Any) -> Any:
    """A new variable of the same type."""
    return Var(like.aval)


class _TellingVar(Var):
    """A variable that tells what it is called whenever it is printed."""

    __slots__ = ("tell",)

    tell: Callable[[str, Any], None]

    def pretty_print(self, context: Any, *, print_dtype: bool = True) -> str:
        name = super().pretty_print(context, print_dtype=print_dtype)
        self.tell(name, context)
        return name


def telling_var(like: Any, tell: Callable[[str, Any], None]) -> Any:
    """A new variable of the same type that, when a jaxpr's text is made, passes its name to ``tell``.

    The second argument is the printer's context, which is one for all the names that are told apart.
    """
    var = _TellingVar(like.aval)
    var.tell = tell
    return var


def replace_vars(jaxpr: Any, renamed: Callable[[Sequence[Any]], list[Any]]) -> Any:
    """An open jaxpr with other variables for its inputs and outputs, one for one."""
    return jaxpr.replace(
        constvars=renamed(jaxpr.constvars),
        invars=renamed(jaxpr.invars),
        outvars=renamed(jaxpr.outvars),
        debug_info=jaxpr.debug_info,
    )


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal and not a variable."""
    return isinstance(atom, Literal)


def is_dropped(var: Any) -> bool:
    """Whether an output of an equation is thrown away."""
    return isinstance(var, DropVar)


def as_function(closed: Any) -> Callable[..., list[Any]]:
    """A function of flat arguments that evaluates a closed jaxpr."""
    return core.jaxpr_as_fun(closed)


def function_name(jaxpr: Any) -> tuple[str, str, int]:
    """``(name, file, line)`` of the function that a jaxpr was traced from; empty and 0 where JAX does not know."""
    info = open_jaxpr(jaxpr).debug_info
    try:
        return info.func_name or "", info.func_filename or "", info.func_lineno or 0
    except Exception:  # noqa: BLE001 - jaxprs that JAX builds itself have no function
        return "", "", 0


def pretty(jaxpr: Any, source_map: list[list[tuple[int, int, Any]]] | None = None) -> str:
    """JAX's own text of a jaxpr, without colours (inside ipykernel ``str`` has ANSI codes).

    Args:
        jaxpr: the jaxpr.
        source_map: filled with one list per line of ``(start column, end column, traceback or token)``.
    """
    return open_jaxpr(jaxpr).pretty_print(use_color=False, source_map=source_map)
