"""What is known of equinox, flax nnx and optax. None of them is imported to tell: who uses one has imported it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from remat_magic._jax import transforms
from remat_magic.user_files import is_library_file


def _probe(x: Any) -> Any:
    return x


def attribute(thing: Any, name: str) -> Any:
    """An attribute of an object of any kind; None where it has none, whatever the object's own code raises then."""
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001 - a table that says so in an error of its own
        return None


def layers(fun: Any) -> Iterator[Any]:
    """A function and what it wraps, outermost first, as far as wrappers tell."""
    seen: set[int] = set()
    while fun is not None and id(fun) not in seen:
        seen.add(id(fun))
        yield fun
        fun = fun.func if isinstance(fun, functools.partial) else getattr(fun, "__wrapped__", None)


def has_attributes(thing: Any, *names: str) -> bool:
    """Whether the class of an object has these; ``functools.wraps`` and ``jax.jit`` copy those of what they wrap."""
    kind = type(thing)
    return all(hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", ()) for name in names)


def method_of(fun: Any) -> tuple[Any, Any] | None:
    """The function and the object of a bound method; a callable pytree is its own ``__call__``.

    Pytrees that wrap a function (equinox has such) keep what they hold: they are wrappers, not models.
    """
    if has_attributes(fun, "__func__", "__self__"):
        return fun.__func__, fun.__self__
    if isinstance(fun, types.FunctionType) or hasattr(fun, "__wrapped__") or jax.tree_util.all_leaves([fun]):
        return None
    call: Any = fun.__call__
    return (call.__func__, call.__self__) if hasattr(call, "__func__") else None


def wrapped_in(fun: Any) -> tuple[Any, Callable[[Any, Any, Any], Any]] | None:
    """What this very object maps or jits, if ``jax.vmap``, ``eqx.filter_jit`` or the like made it.

    And what makes one like it with other arrays: it is given those that this one holds, the others, and the function of
    these.
    """
    if (mapped := transforms.mapped_in(fun)) is not None:
        return mapped[0], lambda _held, _others, other: mapped[1](other)
    inner, by_equinox = getattr(fun, "__wrapped__", None), _made_by_equinox(fun, "filter_jit")
    is_tree = not jax.tree_util.all_leaves([inner])
    if is_tree and (by_equinox or _made_by_equinox(fun, "filter_vmap", "filter_checkpoint")):
        return inner, lambda own, others, _other: _with_leaves(fun, own, others)
    if (by_equinox and not fun.donate_rest) or transforms.is_jitted_plainly(fun):
        jit = sys.modules["equinox"].filter_jit if by_equinox else jax.jit
        with contextlib.suppress(TypeError):
            hash(inner)  # JAX refuses what has none
            return inner, lambda _held, _others, other: jit(other)
    return None


def _with_leaves(tree: Any, own: Any, others: Any) -> Any:
    """A pytree with other leaves in the place of those that it holds, which are found by identity."""
    instead = dict(zip(map(id, jax.tree.leaves(own)), jax.tree.leaves(others), strict=True))
    return jax.tree.map(lambda leaf: instead.get(id(leaf), leaf), tree)


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _made_by_equinox(fun: Any, *names: str) -> bool:
    equinox = sys.modules.get("equinox")
    makers = [getattr(equinox, name, None) for name in names if equinox is not None]
    return any(maker is not None and type(fun) is type(maker(_probe)) for maker in makers)


def is_jitted(fun: Any) -> bool:
    """Whether this very object is what ``eqx.filter_jit`` or ``nnx.jit`` returns, which have what they jit inside."""
    of_nnx = type(fun).__module__ == "flax.nnx.transforms.compilation" and hasattr(fun, "__wrapped__")
    return of_nnx or _made_by_equinox(fun, "filter_jit")


def unjitted(fun: Any) -> Any:
    """What this very object jits, by ``jax.jit`` or a library's; the object itself where it is none such."""
    return fun.__wrapped__ if is_jitted(fun) or transforms.is_jitted(fun) else fun


def is_jitted_by_equinox(fun: Any) -> bool:
    """Whether this very object is what ``eqx.filter_jit`` returns."""
    return _made_by_equinox(fun, "filter_jit")


def jit_like(fun: Any) -> Callable[..., Callable[..., Any]]:
    """What jits as an object is jitted, with the same static arguments: ``jax.jit``, or a library's."""
    if is_jitted_by_equinox(fun):
        return sys.modules["equinox"].filter_jit
    static = fun if is_jitted(fun) else getattr(fun, "_jit_info", None)
    options = {name: getattr(static, name, None) for name in ("static_argnums", "static_argnames")}
    return functools.partial(_nnx().jit if is_jitted(fun) else jax.jit, **options)


def applies_a_model(fun: Any) -> bool:
    """Whether this very object is a model, or applies one: what flax's and haiku's ``apply`` are, and modules."""
    names = "flax.linen", "flax.nnx", "equinox"
    linen, nnx, equinox = (getattr(sys.modules.get(name), "Module", ()) for name in names)
    if isinstance(fun, types.MethodType):
        return isinstance(fun.__self__, linen) and fun.__name__ == "apply"
    if isinstance(fun, types.FunctionType):
        return fun.__name__ == "apply_fn" and fun.__module__.startswith("haiku.")
    return isinstance(fun, (linen, nnx, equinox)) and not hasattr(fun, "__wrapped__")


def applied_parameters(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """What linen's ``apply`` and ``init`` call the positional arguments of a call: by the module's own method.

    Empty where it is neither of these, whatever is wrapped around it.
    """
    linen, number = getattr(sys.modules.get("flax.linen"), "Module", None), len(args)
    calls = ("apply", "init", "init_with_output") if linen is not None else ()
    methods = [inspect.unwrap(getattr(linen, call)) for call in calls]
    while (inner := getattr(fun, "__func__", fun)) not in methods:
        if isinstance(fun, functools.partial):
            args, kwargs, fun = (*fun.args, *args), {**fun.keywords, **kwargs}, fun.func
        elif (wrapped := getattr(inner, "__wrapped__", None)) is not None and methods:
            fun = wrapped if inner is fun else types.MethodType(wrapped, fun.__self__)
        else:
            return []
    first = ["self", next(itertools.islice(inspect.signature(inner).parameters, 1, None))]  # variables, or rngs
    given = (fun.__self__, *args) if inner is not fun else tuple(args)
    module = given[0] if given else None
    method = kwargs.get("method") or "__call__"
    method = getattr(type(module), method, None) if isinstance(method, str) else getattr(method, "__func__", method)
    own = list(inspect.signature(method).parameters.values())[1:] if callable(method) else []
    names = [*first, *(p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))]
    return names[len(given) - number :]


CHECKPOINTS = {
    "equinox": ("eqx", "import equinox as eqx", "filter_checkpoint"),
    "flax.linen": ("nn", "import flax.linen as nn", "remat"),
    "flax.nnx": ("nnx", "from flax import nnx", "remat"),
    "haiku": ("hk", "import haiku as hk", "remat"),
}
"""By the module of a library: what it is usually called, the import of it, and what it has for jax.checkpoint."""


def checkpoints() -> list[Any]:
    """``jax.checkpoint`` by all its names, and what libraries have in its place."""
    own = (("jax", "checkpoint"), ("jax", "remat"), ("jax.ad_checkpoint", "checkpoint"))
    others = (("flax.linen", "remat"), ("flax.nnx", "remat"), ("equinox", "filter_checkpoint"))
    there = (getattr(sys.modules.get(module), name, None) for module, name in (*own, *others))
    return [present for present in there if present is not None]


# -------------------------------------------------------------------------------------------------------- gradients


def loss_of_equinox(fun: Any) -> Any:
    """What ``eqx.filter_grad`` or ``eqx.filter_value_and_grad`` was given; None where neither made this object."""
    return fun.__wrapped__ if _made_by_equinox(fun, "filter_grad", "filter_value_and_grad") else None


def loss_of_optax(fun: Any) -> Any:
    """What ``optax.value_and_grad_from_state`` was given; None where that did not make this object."""
    make = getattr(sys.modules.get("optax"), "value_and_grad_from_state", None)
    same = make is not None and isinstance(fun, types.FunctionType) and fun.__code__ is make(_probe).__code__
    return _closure(fun).get("value_fn") if same else None


class ModuleGradient(NamedTuple):
    """What ``nnx.grad`` or ``nnx.value_and_grad`` was given; ``of`` makes such a gradient of another function."""

    loss: Callable[..., Any]
    of: Callable[[Callable[..., Any]], Callable[..., Any]]


def loss_of_nnx(fun: Any) -> ModuleGradient | None:
    """What this very object differentiates, if ``nnx.grad`` or ``nnx.value_and_grad`` made it."""
    nnx = _nnx()
    inner = getattr(fun, "__wrapped__", fun)  # nnx wraps it in the context of its updates
    if nnx is None or not isinstance(inner, types.FunctionType) or inner.__module__ != nnx.grad.__module__:
        return None
    closure = _closure(inner)
    options = {name: closure[name] for name in ("has_aux", "graph") if name in closure}
    if (filters := closure.get("index_filter")) is not None:
        argnums = tuple(nnx.DiffState(position, state.filter) for position, state in filters.items())
        loss: Any = closure.get("f")
    elif (gradient := transforms.gradient_in(closure.get("gradded_fn"))) is not None:  # modules as plain pytrees
        options["graph_updates"] = False
        argnums, loss = gradient.argnums, getattr(gradient.fun, "f", None)
    else:
        return None
    return None if loss is None else ModuleGradient(loss, lambda other: nnx.grad(other, argnums=argnums, **options))


def vjp_of_nnx() -> Any:
    """``nnx.vjp``; None where nobody has imported it."""
    return getattr(_nnx(), "vjp", None)


def gradient_by(vjp: Callable[..., Any], loss: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that takes the gradient of another by a library's ``vjp``."""

    def vjp_and_gradient(*primals: Any) -> Any:
        outputs, backward, *_ = vjp(loss, *primals, **options)
        return outputs, backward(jax.tree.map(jnp.ones_like, outputs))

    return vjp_and_gradient


def is_gradient(fun: Any) -> bool:
    """Whether JAX or a library made this object to take a gradient, jitted or not, and it does nothing else."""
    while (jitted := unjitted(fun)) is not fun:
        fun = jitted
    makers = (transforms.gradient_in, loss_of_equinox, loss_of_optax, loss_of_nnx)
    return any(made_by(fun) is not None for made_by in makers)


def _closure(fun: types.FunctionType) -> dict[str, Any]:
    return dict(zip(fun.__code__.co_freevars, (cell.cell_contents for cell in fun.__closure__ or ()), strict=True))


# ---------------------------------------------------------------------------------------------------------- modules


def is_of(library: str, code: types.CodeType) -> bool:
    """Whether code stands in a library itself, such as ``"haiku"`` or ``"flax.linen"``."""
    file = getattr(sys.modules.get(library), "__file__", None)
    return bool(file) and code.co_filename.startswith(os.path.join(os.path.dirname(file), ""))


def is_layer(code: types.CodeType) -> bool:
    """Whether code is the call of a library's layer, and of no wrapper such as equinox has of its own."""
    owner, _, name = code.co_qualname.rpartition(".")
    inside = f"{os.sep}equinox{os.sep}_" in code.co_filename or owner.startswith("_")
    return name == "__call__" and not inside and is_library_file(code.co_filename)


def names_modules(file: str) -> bool:
    """Whether a file is of a library that writes the names of its modules into JAX's name stack, as they are called."""
    return any(f"{os.sep}{library}{os.sep}" in file for library in ("flax", "haiku"))


# What linen's transforms write before the name of a class that they make another of.
_LIFTED = "(?:Add_metadata_axis|Checkpoint|Jit|Map_variables|Remat_scan|Scan|Vmap)"


def class_name_in_linen(name: str, owner: str) -> str:
    """What the user calls a class whose name linen may have made up: ``Block`` of ``ScanCheckpointBlock``.

    ``owner`` is the class of the method that is called, ``Block`` or one that that is derived from.
    """
    if owner and re.fullmatch(f"{_LIFTED}+{re.escape(owner)}", name):
        return owner
    return re.sub(f"^{_LIFTED}*?(Checkpoint|Remat_scan)", "", name)


def written_class(cls: type) -> type:
    """The class as it is written, of which linen's transforms have made this one."""
    while cls.__module__ == "flax.linen.transforms":
        cls = cls.__bases__[0]
    return cls


def module_kind(cls: type) -> str:
    """Whose module a class is: ``"flax.linen"``, ``"flax.nnx"``, ``"equinox"``, ``"haiku"``, or empty for none."""
    for base in cls.__mro__[:-1]:
        if base.__name__ == "Module":
            for library in CHECKPOINTS:
                if f"{base.__module__}.".startswith(f"{library}."):
                    return library
    return ""


# Where they call JAX's own.
_SCANS = {"flax.linen": "flax.core.axes_scan", "flax.nnx": "flax.nnx.transforms.iteration"}


def scan_in(*files: str | None) -> str:
    """Whose scan has its body in one of these files: ``"flax.linen"``, ``"flax.nnx"``, or empty for none."""
    for library, module in _SCANS.items():
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None and file in files:
            return library
    return ""


def is_trial_of_linen(frame: types.FrameType | None) -> bool:
    """Whether a call is made while flax's ``nn.scan`` traces its body to see what is constant in it, for nothing else.

    On JAX 0.10 it does so apart from the jaxpr that is being made.
    """
    scan = getattr(sys.modules.get("flax.core.axes_scan"), "__file__", None)
    while scan is not None and frame is not None:
        if frame.f_code.co_filename == scan and frame.f_locals.get("init_mode") is True:
            return True
        frame = frame.f_back
    return False


def intercepts(frame: types.FrameType) -> bool:
    """Whether a library calls a function around each method or parameter of its modules, as haiku's interceptors."""
    caller = frame.f_back
    return (
        caller is not None
        and caller.f_code.co_qualname.startswith(("run_interceptors", "run_getters", "run_setters", "run_creators"))
        and is_library_file(caller.f_code.co_filename)
    )


def checkpointed_by_linen(cls: Any) -> type | None:
    """The class of which flax's ``nn.remat`` made this very class; None where it made it of none."""
    linen = sys.modules.get("flax.linen")
    if linen is None or not isinstance(cls, type) or not issubclass(cls, linen.Module):
        return None
    call, base = vars(cls).get("__call__"), cls.__bases__[0]
    is_of_linen = cls.__name__ == f"Checkpoint{base.__name__}"
    while is_of_linen and call is not None:
        if call.__code__.co_filename == linen.transforms.__file__:
            return base
        call = getattr(call, "__wrapped__", None)
    return None


def lifted(
    transform: Callable[[Callable[..., Any]], Callable[..., Any]], fun: Callable[..., Any], args: Any, kwargs: Any
) -> Callable[..., Any] | None:
    """``transform(fun)`` for arguments that hold modules of nnx, which ``fun`` may change; None where they hold none.

    A transformation that traces sees pytrees. So nnx's own way is gone: it takes modules apart around the
    transformation and puts them together within it, and afterwards gives the user's ones the new values.
    """
    nnx = _nnx()
    if nnx is None:
        return None

    def is_node(value: Any) -> bool:
        return isinstance(value, (nnx.Module, nnx.Variable, nnx.Optimizer))

    def writable(node: Any) -> Any:
        """Itself, or a copy of what nnx lets nobody change here: it is from outside of jax.grad, or the like."""
        values = [value for _, value in nnx.iter_graph(node)] if is_node(node) else []
        return node if all(getattr(value, "_can_update", True) for value in values) else jax.tree.map(_probe, node)

    if not any(map(is_node, jax.tree.leaves((args, kwargs), is_leaf=is_node))):
        return None
    tag = "remat_magic"

    def with_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fun(*args, **kwargs)

    general = importlib.import_module("flax.nnx.transforms.general")
    pure = transform(general.merge_inputs(with_all, ctxtag=tag))
    whole = nnx.update_context(tag)(general.split_inputs(pure, ctxtag=tag))
    return lambda *args, **kwargs: whole(*jax.tree.map(writable, (args, kwargs), is_leaf=is_node))


@contextlib.contextmanager
def modules_as_they_were(values: Iterable[Any]) -> Iterator[None]:
    """Give modules of nnx back what they lose in a trace that fails: its transformations take them apart meanwhile."""
    nnx = _nnx()
    modules = [] if nnx is None else [value for value in values if isinstance(value, nnx.Module)]
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, content in before:
            if vars(module).keys() != content.keys():
                vars(module).clear()
                vars(module).update(content)
