"""Which function to inspect where no call says so, and with which arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_magic.notebook.callee import chain, is_checkpoint
from remat_magic.records import RematError

__all__ = ["arguments_from_namespace", "arguments_from_text", "choose"]


def choose(namespace: Mapping[str, Any], defined: Sequence[str], assigned: Sequence[str]) -> Callable[..., Any]:
    """The one function of a cell that is meant: the decorated one, else the only one.

    Args:
        namespace: the user's, after the cell has run.
        defined: names that the cell defines as functions.
        assigned: names to which the cell assigns what a call returned; of these only checkpointed functions count.

    Raises:
        RematError: where there is none, or more than one that could be meant.
    """
    checkpointed = [name for name in (*defined, *assigned) if _is_checkpointed(namespace.get(name))]
    within = [id(layer) for name in checkpointed for layer in chain(namespace[name])]
    plain = [
        name
        for name in defined
        if name not in checkpointed and callable(namespace.get(name)) and id(namespace[name]) not in within
    ]
    match checkpointed, plain:
        case ([only], []) | ([], [only]):
            return namespace[only]
        case [], []:
            raise RematError(
                "nothing to inspect: end the cell with a call, such as loss(params, x), write the call after %%remat, "
                "or define one function in the cell."
            )
        case _:
            names = ", ".join(f"`{name}`" for name in (*checkpointed, *plain))
            raise RematError(
                f"the cell defines {names}: end it with a call of the one to inspect, such as "
                f"{(*plain, *checkpointed)[-1 if not plain else len(plain) - 1]}(...)."
            )


def arguments_from_text(text: str, namespace: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``text`` writes, as between a call's brackets, evaluated in the namespace.

    Raises:
        RematError: if a name in them is not defined; what else goes wrong is raised as it is.
    """
    source = f"(lambda *args, **kwargs: (args, kwargs))(\n{text}\n)"
    try:
        return eval(compile(source, "<--args>", "eval"), dict(namespace))  # noqa: S307  (the user's own Python)
    except NameError as error:
        if error.name is None or error.name in namespace:
            raise
        raise RematError(f"--args names `{error.name}`, which is not defined: assign it, or name another.") from None


def arguments_from_namespace(
    fun: Callable[..., Any], namespace: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]:
    """The variables with the names of the parameters, and which names were used.

    Parameters with a default may lack a variable; ``*args`` and ``**kwargs`` get nothing.

    Raises:
        RematError: if a variable is missing, or the parameters cannot be known.
    """
    name = getattr(fun, "__name__", type(fun).__name__)
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        raise RematError(f"the parameters of `{name}` cannot be read: give its arguments with --args.") from None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    used: list[str] = []
    missing: list[str] = []
    positional = True
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            positional = False
        elif parameter.name not in namespace:
            positional = False
            if parameter.default is parameter.empty:
                missing.append(parameter.name)
        elif positional and parameter.kind is not parameter.KEYWORD_ONLY:
            args.append(namespace[parameter.name])
            used.append(parameter.name)
        elif parameter.kind is not parameter.POSITIONAL_ONLY:
            kwargs[parameter.name] = namespace[parameter.name]
            used.append(parameter.name)
    if missing:
        raise RematError(
            f"`{name}` needs {' and '.join(f'`{one}`' for one in missing)}, and no variable has "
            f"{'this name' if len(missing) == 1 else 'these names'}: assign {'it' if len(missing) == 1 else 'them'}, "
            f'or give the arguments with --args "...".'
        )
    return tuple(args), kwargs, tuple(used)


def _is_checkpointed(fun: Any) -> bool:
    return callable(fun) and any(is_checkpoint(layer) for layer in chain(fun))
