"""Which function is inspected where no call is written: one that the cell defines, with the user's variables."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_magic._jax.wrappers import is_checkpoint
from remat_magic.libraries import layers
from remat_magic.notebook.callee import Callee, called
from remat_magic.notebook.functions import name_of
from remat_magic.records import RematError


def defined(
    namespace: Mapping[str, Any], functions: Sequence[tuple[str, bool, tuple[str, ...]]]
) -> tuple[Callable[..., Any], str]:
    """The function of a cell that is meant, and a remark where several could be; RematError where there is none.

    It is the one decorated with ``jax.checkpoint``, or rather the one that calls that; without any, the one that no
    other of the cell's calls. Of several, the last. ``functions`` are the names to which the cell gives functions, or
    (False) what a call returned, which counts if it is checkpointed; each with the names used in it.
    """
    uses = {name: set(used) for name, _, used in functions if callable(namespace.get(name))}
    for _ in uses:
        for name, used in uses.items():
            uses[name] = used.union(*(uses[other] for other in used & uses.keys()))
    checkpointed = {name for name in uses if any(map(is_checkpoint, layers(namespace[name])))}
    candidates = {name: uses[name] for name, is_function, _ in functions if name in uses and is_function}
    candidates = {name: uses[name] for name in uses if name in candidates or name in checkpointed}
    if checkpointed:
        candidates = {name: used for name, used in candidates.items() if checkpointed & {name, *used}}
    inside = {other for name, used in candidates.items() for other in used if other != name}
    *others, chosen = [name for name in candidates if name not in inside] or candidates or [None]
    if chosen is None:
        raise RematError(
            "nothing to inspect: end the cell with a call, such as loss(params, x), write the call after %%remat, "
            "or define one function in the cell."
        )
    if not others:
        return namespace[chosen], ""
    names = " and ".join(f"`{name}`" for name in (*others, chosen))
    return namespace[chosen], (
        f"The cell defines {names}: the last is inspected; to choose another, end the cell with its call, such as "
        f"{others[-1]}(...)."
    )


def with_arguments(fun: Any, written: str | None, namespace: Mapping[str, Any], variables: Mapping[str, Any]) -> Callee:
    """A function, or a gradient, with arguments that no call gives.

    They are ``written`` as between a call's brackets, to be evaluated in the namespace, else the ``variables`` with the
    names of the parameters. RematError where one is missing; what else goes wrong in them is raised as it is.
    """
    __tracebackhide__ = True
    if written is not None:
        return called(fun, *_written_arguments(written, namespace))
    args, kwargs, used = _arguments_by_name(fun, variables)
    note = f"Arguments: your variable{'s' * (len(used) > 1)} {', '.join(used)}." if used else ""
    return called(fun, args, kwargs).saying(note)


def _written_arguments(written: str, namespace: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    __tracebackhide__ = True
    code = f"(lambda *args, **kwargs: (args, kwargs))(\n{written}\n)"
    try:
        return eval(compile(code, "<--args>", "eval"), dict(namespace))  # noqa: S307  (the user's own Python)
    except NameError as error:
        if error.name is None or error.name in namespace:
            raise
        raise RematError(f"--args names `{error.name}`, which is not defined: assign it, or name another.") from None


def _arguments_by_name(
    fun: Callable[..., Any], variables: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """The variables with the names of the parameters, and which names were used.

    Parameters with a default may lack a variable; ``*args`` and ``**kwargs`` get nothing.
    """
    name = name_of(fun)
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        raise RematError(f"the parameters of `{name}` cannot be read: give its arguments with --args.") from None
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {each.name: each for each in signature.parameters.values() if each.kind not in various}
    needed = [each for each in named if named[each].default is inspect.Parameter.empty]
    missing = [f"`{each}`" for each in needed if each not in variables]
    if missing:
        this, it = ("this name", "it") if len(missing) == 1 else ("these names", "them")
        raise RematError(
            f"`{name}` needs {' and '.join(missing)}, and no variable has {this}: assign {it}, or give the arguments "
            'with --args "...".'
        )
    given = OrderedDict((each, variables[each]) for each in named if each in variables)
    bound = inspect.BoundArguments(signature, given)
    return bound.args, bound.kwargs, [*bound.arguments]
