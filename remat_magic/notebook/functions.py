"""What a function is for: which calls are gradients, which train, which prepare something, which only use a result.

Objects are recognised, not their spelling: a gradient may be stored, jitted or made elsewhere.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.ad_checkpoint import print_saved_residuals

from remat_magic import _jax, libraries
from remat_magic._jax.wrappers import is_backward_pass, is_jitted
from remat_magic.libraries import layers
from remat_magic.user_files import is_user_file

# Of JAX's own functions those that are called for what comes out of others.
_CONSUMERS = (jax.block_until_ready, jax.device_get, jax.device_put, jax.debug.print)
_CONSUMING_MODULES = sys.stdlib_module_names | {"numpy", "IPython", "matplotlib", "pandas", "rich", "tqdm"}


def makes_a_function(fun: Any) -> bool:
    """Whether a call of this is no call yet: ``jax.grad(f)`` alone, without the arguments of ``f``."""
    makers = (jax.grad, jax.value_and_grad, jax.jacrev, jax.jit, jax.checkpoint, jax.vmap, functools.partial)
    return any(fun is maker for maker in makers)


def consumes(fun: Any) -> bool:
    """Whether a function is called for its effect, or makes another thing of a result: ``print``, ``float``.

    Where a call is in its brackets, that is meant.
    """
    if isinstance(fun, type | types.BuiltinFunctionType) or any(fun is consumer for consumer in _CONSUMERS):
        return not makes_a_function(fun)
    function = getattr(fun, "__func__", fun)
    if not isinstance(function, types.FunctionType):
        return False
    module = str(function.__globals__.get("__name__"))  # functools.wraps gives __module__ to what it wraps
    return module.partition(".")[0] in _CONSUMING_MODULES or module.endswith((".tree_util", ".tree"))


def prepares(fun: Any) -> bool:
    """Whether a function only prepares or reads something, as ``jnp.ones`` and ``optimizer.init`` do, or ``float``.

    All others are gradients, or code of the user's own.
    """
    if consumes(fun) or makes_a_function(fun) or not callable(fun) or is_backward_pass(fun):
        return True
    if differentiates(fun) or lowered_by(fun) is not None:
        return False
    return not any(libraries.applies_a_model(layer) or _is_users(layer) for layer in layers(fun))


def is_compiled(fun: Any) -> bool:
    """Whether it was compiled ahead of time or exported: there is no Python that could be traced."""
    exported = getattr(sys.modules.get("jax.export"), "Exported", ())
    return isinstance(fun, jax.stages.Compiled) or isinstance(getattr(fun, "__self__", None), exported)


def differentiates(fun: Any) -> bool:
    """Whether a call of this takes a gradient, or makes ready to."""
    return any(takes_the_function(layer) or libraries.is_gradient(layer) for layer in layers(fun))


def takes_a_gradient(fun: Any) -> bool:
    """Whether a call of this takes a gradient for sure, as no call does that only tells of one."""
    only_tell = (jax.eval_shape, print_saved_residuals)
    return differentiates(fun) and not any(layer is one for layer in layers(fun) for one in only_tell)


def takes_the_function(fun: Any) -> bool:
    """Whether it is ``jax.vjp`` or its like, which are called with a function and then its arguments."""
    takers = (jax.vjp, jax.linearize, jax.eval_shape, print_saved_residuals)
    of_equinox = getattr(sys.modules.get("equinox"), "filter_vjp", None)
    return fun is not None and any(fun is taker for taker in (*takers, of_equinox, libraries.vjp_of_nnx()))


def lowered_by(fun: Any) -> Any:
    """The jitted function that this is the ``lower``, or a similar method, of; None for anything else."""
    owner: Any = getattr(fun, "__self__", None)
    return owner if is_jitted(owner) and fun in (owner.lower, owner.trace, owner.eval_shape) else None


def _is_users(fun: Any) -> bool:
    """Whether a function, or the class of an object, is the user's own."""
    code = getattr(getattr(fun, "__func__", fun), "__code__", None)
    if code is not None:
        return is_user_file(code.co_filename)
    module = sys.modules.get(type(fun).__module__)
    file = getattr(module, "__file__", None)
    return module is not builtins and (not file or is_user_file(file))


def name_of(fun: Any) -> str:
    """The function's own name, or its type's."""
    return str(getattr(fun, "__name__", type(fun).__name__))


# ------------------------------------------------------------------------------------- what trains, while it is traced


class Trains(BaseException):
    """Breaks off the trace of a function that trains; the code that is traced does not see it as an error."""


@contextlib.contextmanager
def unless_it_trains(fun: Any) -> Iterator[None]:
    """Trace a function until it shows that it trains: where a loop of its own, or of what it calls, takes a gradient.

    Then ``Trains`` is raised. Nothing is done for None, and for what is no function or method written in Python.
    """
    code = getattr(getattr(fun, "__func__", fun), "__code__", None)
    if not isinstance(code, types.CodeType) or not is_user_file(code.co_filename):
        yield
        return

    def hold(traceable: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        frames, frame = list[types.FrameType](), sys._getframe(1)  # noqa: SLF001
        while frame is not None and (not frames or frames[-1].f_code is not code):
            frames.append(frame)
            frame = frame.f_back
        own = itertools.takewhile(lambda one: not str(one.f_globals.get("__name__")).startswith("jax."), frames[::-1])
        if frames[-1].f_code is code and any(_in_loop(one) for one in own if is_user_file(one.f_code.co_filename)):
            raise Trains
        return traceable

    with _jax.holding(hold):
        yield


def _in_loop(frame: types.FrameType) -> bool:
    """Whether the call that a frame is making stands in a ``for`` or ``while`` of its code."""
    at = frame.f_lasti
    jumps = (one for one in dis.get_instructions(frame.f_code) if "JUMP_BACKWARD" in one.opname)
    return any(one.argval <= at <= one.offset for one in jumps if "NO_INTERRUPT" not in one.opname)
