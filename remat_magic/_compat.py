"""The one seam to what JAX does not publish, and the only place that branches on a JAX version.

Checked on jax 0.10.2 and 0.12.0.1. Each branch says which version it is for and why.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint, config, core, dtypes, mesh
from jax._src.interpreters import partial_eval as pe

from remat_magic.model import RematError

JAX_VERSION: tuple[int, ...] = jax.__version_info__

Jaxpr = core.Jaxpr
ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)  # 0.12 has one class for open and closed jaxprs
Literal = core.Literal
Var = core.Var
JaxprEqn = core.JaxprEqn
ShapedArray = core.ShapedArray

# From 0.12 on, the "high-level" primitives of jax_remat3 are instances held in one call primitive's params.
_RematTraced = getattr(ad_checkpoint, "RematTraced", None)
_NAMES_HIGH = tuple(
    cls for name in ("CheckpointName", "CheckpointNameFwd") if (cls := getattr(ad_checkpoint, name, None)) is not None
)
NAME_PRIMITIVE: Any = ad_checkpoint.name_p  # what policies are asked about a named value with, under jax_remat3 too
_call_hi: Any = getattr(ad_checkpoint, "call_hi_primitive_p", None)
_PrimalLeft = getattr(ad_checkpoint, "PrimalLeftTangentRight", None)


# ---------------------------------------------------------------------------------------------------- settings of JAX


def remat3() -> bool:
    """Whether ``jax_remat3`` is on.

    Raises:
        RematError: it is on in a JAX that only has half of it (before 0.12): names are lost there.
    """
    on = bool(config.remat3.value) if hasattr(config, "remat3") else False
    if on and JAX_VERSION < (0, 12):
        raise RematError(
            f"jax_remat3 is unfinished in jax {jax.__version__}: turn it off "
            "(jax.config.update('jax_remat3', False)) or install jax 0.12 or newer."
        )
    return on


def x64() -> bool:
    """Whether 64-bit types are on in this thread."""
    return bool(config.enable_x64.value)


def thread_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Take down the settings of JAX that this thread has made in ``with`` blocks, meshes included.

    They are the thread's own, and contextvars do not carry them.

    Returns:
        A context manager's maker, which puts them in force in whichever thread enters it.
    """
    # Most are entries of `config_states`; meshes, default devices and the like are plain Config objects, which 0.10
    # has in `config` and 0.12 in the modules that use them.
    known: dict[int, Any] = {id(state): state for state in config.config_states.values()}
    for name, module in list(sys.modules.items()):
        if name.startswith("jax._src"):
            known.update((id(item), item) for item in list(vars(module).values()) if isinstance(item, _Config))
    made = [(item, value) for item in known.values() if (value := item.get_local()) is not config.config_ext.unset]
    meshes = list(mesh.thread_resources.stack[1:])  # those of the old `with mesh:`

    @contextlib.contextmanager
    def in_force() -> Iterator[None]:
        before = [(item, item.swap_local(value)) for item, value in made]
        resources = mesh.thread_resources
        old = (resources.stack, resources.env)
        resources.stack = [*resources.stack, *meshes]
        resources.env = resources.stack[-1]
        try:
            yield
        finally:
            resources.stack, resources.env = old
            for item, value in reversed(before):
                item.set_local(value)

    return in_force


_Config: Any = config.config_ext.Config


def default_device() -> Any:
    """The device that a program runs on whose arguments name none."""
    chosen = config.default_device.value
    if isinstance(chosen, str):  # the name of a platform
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


_generations = itertools.count(0x52454D41)  # far from any profile version that a user sets


def new_generation() -> int:
    """A number that keys a set of entries in JAX's trace caches which nobody else uses."""
    return next(_generations)


@contextlib.contextmanager
def tracing(generation: int, use_remat3: bool, x64: bool) -> Iterator[None]:
    """Trace apart from the user's cached traces, with ``jax_remat3`` and ``jax_enable_x64`` pinned.

    ``jax_xla_profile_version`` is part of the key of every trace cache and means nothing to tracing itself, so that
    nested functions that the user has redefined are traced anew while the user's own entries stay as they are.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.jax_xla_profile_version(generation))
        if hasattr(config, "remat3"):
            stack.enter_context(config.remat3(use_remat3))
        stack.enter_context(config.enable_x64(x64))
        yield


def stale_traces(generation: int, top: Callable[..., Any], closed: Any) -> list[tuple[Callable[..., Any], str]]:
    """The user's functions of which JAX still holds an older trace than the one made under ``generation``.

    No Python of the user runs: JAX's cache is asked with tracing forbidden, so that a miss raises.

    Args:
        generation: the number the fresh trace was made under.
        top: the function that was traced, and
        closed: its fresh jaxpr, compared with older traces of ``top`` itself.

    Returns:
        The stale functions with their names, each once.
    """
    cache = pe.trace_to_jaxpr
    stale: dict[int, tuple[Callable[..., Any], str]] = {}

    def differs(fresh: Any, old: Any) -> bool:
        fresh, old = open_jaxpr(fresh), open_jaxpr(old)
        return len(fresh.eqns) != len(old.eqns) or pretty(fresh) != pretty(old)

    usual = config.jax_xla_profile_version.value
    users: dict[Any, Any] = {}
    fresh_keys: list[tuple[Any, tuple[Any, ...], Any, Any]] = []
    for ref, context, args, kwargs in cache.cache_keys():
        function = ref()
        if function is None:
            continue
        if generation in context:
            fresh_keys.append((function, context, args, kwargs))
        elif function is top:
            users[id(function), args] = (function, args, kwargs)
    with config.no_tracing(True):
        for function, _, args, kwargs in fresh_keys:
            with config.jax_xla_profile_version(usual):
                try:
                    old = cache(function, *args, **dict(kwargs))[0]
                except Exception:  # noqa: BLE001 - not in the user's cache: nothing old to be wrong about
                    continue
            with config.jax_xla_profile_version(generation):
                try:
                    fresh = cache(function, *args, **dict(kwargs))[0]
                except Exception:  # noqa: BLE001 - evicted meanwhile
                    continue
            if differs(fresh, old):
                stale[id(function)] = (function, args[1].func_name)
        for function, args, kwargs in users.values():
            try:
                old = cache(function, *args, **dict(kwargs))[0]
            except Exception:  # noqa: BLE001 - made under another configuration than today's
                continue
            same_types = [str(v.aval) for v in open_jaxpr(old).invars] == [
                str(v.aval) for v in open_jaxpr(closed).invars
            ]
            if same_types and differs(closed, old):
                stale[id(function)] = (function, args[1].func_name)
    return list(stale.values())


# -------------------------------------------------------------------------------------------------------------- jaxprs


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


def replace_eqns(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any] | None = None) -> Any:
    """An open jaxpr with other equations (and outputs)."""
    jaxpr = open_jaxpr(jaxpr)
    changes: dict[str, Any] = {"eqns": list(eqns), "debug_info": jaxpr.debug_info}
    if outvars is not None:
        changes["outvars"] = list(outvars)
    return jaxpr.replace(**changes)


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
    return isinstance(var, core.DropVar)


def as_function(closed: Any) -> Callable[..., list[Any]]:
    """A function of flat arguments that evaluates a closed jaxpr."""
    return core.jaxpr_as_fun(closed)


# ---------------------------------------------------------------------------------- checkpoint equations, names, others


def _high(eqn: Any) -> Any:
    return eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None


def is_checkpoint(eqn: Any) -> bool:
    """Whether an equation is an application of ``jax.checkpoint``."""
    if eqn.primitive.name in ("remat2", "checkpoint", "remat"):
        return "policy" in eqn.params
    return _RematTraced is not None and type(_high(eqn)) is _RematTraced


def checkpoint_body(eqn: Any) -> Any:
    """The jaxpr under a checkpoint equation."""
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else _high(eqn).params["jaxpr"]


def checkpoint_policy(eqn: Any) -> Any:
    """The policy of a checkpoint equation; None saves nothing."""
    return eqn.params["policy"] if "policy" in eqn.params else _high(eqn).params["policy"]


def replace_checkpoint(eqn: Any, jaxpr: Any, policy: Any) -> Any:
    """The checkpoint equation with another body and policy."""
    if "jaxpr" in eqn.params:
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr, "policy": policy})
    prim = _high(eqn)  # jax_remat3: the instance is immutable, build another
    return eqn.replace(params={**eqn.params, "_prim": type(prim)(**{**prim.params, "jaxpr": jaxpr, "policy": policy})})


def old_checkpoint(eqn: Any, jaxpr: Any) -> Any:
    """A checkpoint equation with another body, as it is without jax_remat3, where it is a primitive of its own."""
    if "jaxpr" in eqn.params:
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr})
    params = _high(eqn).params
    return eqn.replace(
        primitive=ad_checkpoint.remat_p,
        params={
            "jaxpr": open_jaxpr(jaxpr),
            "policy": params["policy"],
            "prevent_cse": params["prevent_cse"],
            "differentiated": False,
        },
    )


def checkpoint_name_of(eqn: Any) -> str | None:
    """The name that an equation gives to its operand, or None."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    prim = _high(eqn)
    return prim.name if _NAMES_HIGH and isinstance(prim, _NAMES_HIGH) else None


def name_equation(like: Any, operand: Any, output: Any, name: str) -> Any:
    """An equation that gives a checkpoint name to a value, as ``checkpoint_name`` makes it under today's settings.

    Args:
        like: the equation whose source position and context it takes.
        operand: the variable to name.
        output: the variable that is the named value.
        name: the name.
    """
    if remat3():  # an instance in the one call primitive
        primitive, params = _call_hi, {"_prim": _NAMES_HIGH[0](name, operand.aval)}
    else:
        primitive, params = ad_checkpoint.name_p, {"name": name}
    return like.replace(invars=[operand], outvars=[output], primitive=primitive, params=params, effects=core.no_effects)


def is_primal_left(eqn: Any) -> bool:
    """jax_remat3's marker of a saved value; only its first operand is read in a backward pass."""
    return _PrimalLeft is not None and type(_high(eqn)) is _PrimalLeft


def primitive_name(eqn: Any) -> str:
    """The primitive's name, seen through JAX 0.12's one call primitive for all high-level ones."""
    prim = _high(eqn)
    if prim is None:
        return eqn.primitive.name
    return {"RematTraced": "checkpoint", "CheckpointName": "name", "CheckpointNameFwd": "name"}.get(
        type(prim).__name__, type(prim).__name__
    )


def high_params(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation, a high-level primitive's own included."""
    prim = _high(eqn)
    return eqn.params if prim is None else dict(getattr(prim, "params", {}))


def scan_split(eqn: Any) -> tuple[int, int, int]:
    """``(consts, carries, stacked outputs)`` of a scan equation.

    0.10 writes two numbers; 0.12 writes the tree of its operands, of which the numbers are the sizes.
    """
    params = eqn.params
    if "num_carry" in params:
        consts, carries = params["num_consts"], params["num_carry"]
    else:
        consts, carries = (len(list(part)) for part in params["ft_in"].unpack()[:2])
    return consts, carries, len(eqn.outvars) - carries


def function_name(jaxpr: Any) -> tuple[str, str, int]:
    """``(name, file, line)`` of the function that a jaxpr was traced from; empty and 0 where JAX does not know."""
    info = open_jaxpr(jaxpr).debug_info
    try:
        return info.func_name or "", info.func_filename or "", info.func_lineno or 0
    except Exception:  # noqa: BLE001 - jaxprs that JAX builds itself have no function
        return "", "", 0


def name_stack(eqn: Any) -> str:
    """The name stack of an equation, as text."""
    return str(eqn.source_info.name_stack)


def traceback_of(eqn: Any) -> Any:
    """The traceback object of an equation (None where JAX kept none); its identity is the key of provenance."""
    return eqn.source_info.traceback


def with_traceback(eqn: Any, token: Any) -> Any:
    """A copy of an equation that carries ``token`` in place of its traceback."""
    return eqn.replace(source_info=eqn.source_info.replace(traceback=token))


def short_dtype(aval: Any) -> str:
    """JAX's short form of a dtype ("f32", "key<fry>")."""
    dtype = getattr(aval, "dtype", None)
    return type(aval).__name__ if dtype is None else dtypes.short_dtype_name(dtype)


def is_key(aval: Any) -> bool:
    """Whether values of a type are PRNG keys."""
    return bool(jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key))


def zero_keys(aval: Any) -> Any:
    """An array of PRNG keys of a type, made of zeros."""
    impl = aval.dtype._impl
    data = jax.numpy.zeros((*aval.shape, *impl.key_shape), jax.numpy.uint32)
    return jax.random.wrap_key_data(data, impl=impl)


def memory_space(aval: Any) -> str:
    """The memory that values of a type live in; empty for the device's own."""
    space = str(getattr(aval, "memory_space", "") or "").rsplit(".", 1)[-1].lower()
    return "" if space in ("", "device", "any") else space


def pretty(jaxpr: Any, source_map: list[list[tuple[int, int, Any]]] | None = None) -> str:
    """JAX's own text of a jaxpr, without colours (inside ipykernel ``str`` has ANSI codes).

    Args:
        jaxpr: the jaxpr.
        source_map: filled with one list per line of ``(start column, end column, traceback or token)``.
    """
    return open_jaxpr(jaxpr).pretty_print(use_color=False, source_map=source_map)
