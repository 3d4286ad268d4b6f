"""The gradients that a function takes inside: found while it is traced, and taken under another policy.

A training step differentiates its loss by itself. While the step is traced, each function that JAX is about to
differentiate is traced first, once, and JAX differentiates the jaxpr: so the function is known, and a checkpoint can be
put into the jaxpr.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from remat_magic import _jax
from remat_magic.engine.calls import Calls, recording, watching
from remat_magic.engine.signature import Inputs, Leaf, Returned, can_be_output
from remat_magic.engine.sites import Identity, called_in, name_of
from remat_magic.jaxprs.walk import walk
from remat_magic.records import Half, RematError
from remat_magic.user_files import STAND_IN, is_user_file


@dataclass(eq=False)
class Differentiated(Inputs):
    """A function that is differentiated inside, as it was traced for one call, and its inputs.

    Attributes:
        who: name, file and line of its definition.
        closed: its closed jaxpr; takes what is differentiated, and has what it closes over as constants.
        constants: the indices of those constants that are values of the function around, and their leaves.
        primals: the leaves of what is differentiated.
        static: leaves of its arguments that are no arrays.
        outputs: how many outputs it has.
        auxiliary: how many auxiliary ones that are arrays, which follow.
        depth: how many functions it stands inside of that are differentiated too.
        vmaps: the ``jax.vmap`` calls around it; ``closed`` is of one example, the leaves have the types of them all.
        settings: puts in force the settings that it was traced under, with the axes of ``shard_map`` around it.
        devices: how many there are along each of these axes; ``closed`` is of one device.
    """

    who: Identity
    closed: Any
    constants: Mapping[int, Leaf]
    primals: tuple[Leaf, ...]
    static: tuple[Leaf, ...]
    outputs: int
    auxiliary: int
    depth: int
    vmaps: _jax.Vmaps
    settings: Callable[[], contextlib.AbstractContextManager[None]]
    devices: Mapping[str, int]

    def __post_init__(self) -> None:
        self.function, self.leaves = self.who[0], (*self.constants.values(), *self.primals, *self.static)

    def evaluate(self, *values: Any) -> tuple[list[Any], list[Any]]:
        """The outputs and the auxiliary outputs, from the values closed over and then those differentiated."""
        outer = dict(zip(self.constants, values, strict=False))
        constants = [outer.get(index, value) for index, value in enumerate(_jax.consts_of(self.closed))]
        results = eval_jaxpr(_jax.open_jaxpr(self.closed), constants, *values[len(outer) :])
        return results[: self.outputs], results[self.outputs :]

    def jaxpr(self, fun: Callable[..., Any], flat: Callable[[Any], Any]) -> Any:
        """As ``Signature.jaxpr``: the equations keep the positions that they had when traced inside."""
        return jax.make_jaxpr(lambda *arrays: flat(fun(*arrays)))(*self.types)

    def arrays_of(self, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> list[Any]:
        """An error: the arguments of the function around do not tell what the gradient is given."""
        raise RematError(
            f"what {self.function} is given is computed on the way: leave the inputs out, and random ones are used."
        )

    def require_differentiable(self) -> None:
        """As ``Signature.require_differentiable``: JAX differentiates it, so there is."""

    @property
    def copies(self) -> int:
        """How many examples and devices it is evaluated for at once."""
        return math.prod([*self.vmaps.sizes, *self.devices.values()])

    @property
    def types(self) -> list[Any]:
        """The types of what ``evaluate`` takes, of one example."""
        constants = _jax.consts_of(self.closed)
        return [*(jax.typeof(constants[index]) for index in self.constants), *self.closed.in_avals]


def halves_as_calls(inner: Differentiated, number: int) -> Callable[..., Any]:
    """A flat function of all inputs, whose halves under differentiation are calls of functions with known names."""
    count, differentiated = len(inner.constants), [leaf.differentiated for leaf in inner.primals]

    def forward(*values: Any) -> list[Any]:
        outputs, auxiliary = inner.evaluate(*values)
        return [*outputs, *auxiliary, zero(outputs)]  # the last links it with its backward half

    def backward(link: Any, values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        # What is read is all that matters here, and the types: the half itself is traced apart, under each policy.
        primals = [value for value, yes in zip(values[count:], differentiated, strict=True) if yes]
        both = link + zero(cotangents)
        return [primal + both.astype(primal.dtype) for primal in primals]

    def zero(read: Sequence[Any]) -> Any:
        """A number for which these are read; in a ``shard_map`` it would be another one on each device."""
        used = [value for value in read if _jax.is_inexact(jax.typeof(value)) and not inner.devices]
        return sum((jnp.any(value != value).astype("int32") for value in used), jnp.zeros((), "int32"))

    forward.__name__, backward.__name__ = f"{_FORWARD}{number}", f"{_BACKWARD}{number}"
    forward_call, backward_call = jax.jit(forward), jax.jit(backward)

    @jax.custom_vjp
    def call(*values: Any) -> list[Any]:
        return forward(*values)[:-1]

    def forward_rule(*values: Any) -> tuple[list[Any], Any]:
        *results, link = forward_call(*values)
        return results, (link, values)

    def backward_rule(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        link, values = saved
        gradients = iter(backward_call(link, values, cotangents[: inner.outputs]))
        return (*[None] * count, *(next(gradients) if yes else None for yes in differentiated))

    call.defvjp(forward_rule, backward_rule)
    return call


_FORWARD, _BACKWARD = "remat_magic_forward_", "remat_magic_backward_"


def is_half(label: str) -> bool:
    """Whether a call of that name stands for a half."""
    return label.startswith((_FORWARD, _BACKWARD))


def half_of(eqn: Any) -> tuple[Half, int] | None:
    """Which half an equation is the call of, and the number of the function in the order of ``find_gradients``."""
    if _jax.is_jit(eqn):
        name = _jax.label_of(eqn)
        if name.startswith(_FORWARD):
            return "forward", int(name.removeprefix(_FORWARD))
        if name.startswith(_BACKWARD):
            return "backward", int(name.removeprefix(_BACKWARD))
    return None


def find_gradients(trace: Callable[[], Any], calls: Calls) -> tuple[Any, tuple[Differentiated, ...]]:
    """Call ``trace``; returns what it does, and the functions that it differentiates on the way, outer ones first.

    ``calls`` leaves out what gradients within others call.
    """
    functions: list[Differentiated] = []
    depth = 0

    def replaced(traceable: Callable[..., Any], args: tuple[Any, ...], has_aux: bool) -> Callable[..., Any]:
        nonlocal depth
        place = len(functions)
        depth += 1
        try:
            with calls.nested() if depth > 1 else contextlib.nullcontext():
                call = TracedGradient(traceable, args, has_aux, depth - 1)
        finally:
            depth -= 1
        functions.insert(place, call.inner)  # before those that it differentiates itself
        return call.instead() if depth else call.as_calls(place)

    with _jax.holding(replaced):
        result = trace()
    return result, tuple(_as_mapped(inner, result, number) for number, inner in enumerate(functions))


def _as_mapped(inner: Differentiated, closed: Any, number: int) -> Differentiated:
    """A function of all examples where a ``vmap`` maps a call or loop around its gradient.

    JAX traces such a body for one example, and maps what it traced. ``closed`` is the jaxpr of what takes the gradient,
    ``number`` the one that ``half_of`` gives for its calls there.
    """
    leaves = [*inner.constants.values(), *inner.primals]
    calls = {
        tuple(atom.aval for atom in eqn.invars[len(eqn.invars) - len(leaves) :])
        for _, eqn in walk(closed, once=True)
        if half_of(eqn) == ("forward", number)
    }
    types = calls.pop() if len(calls) == 1 else ()
    vmaps = inner.vmaps.inside(types) if types else None
    if vmaps is None:
        return inner
    mapped = [replace(leaf, value=aval) for leaf, aval in zip(leaves, types, strict=True)]
    constants = dict(zip(inner.constants, mapped, strict=False))
    return replace(inner, constants=constants, primals=tuple(mapped[len(constants) :]), vmaps=vmaps)


def under_policy(
    who: Identity, rewrite: Callable[[Any, Calls], Callable[..., Any]], earlier: Calls
) -> contextlib.AbstractContextManager[None]:
    """Have JAX differentiate, while this is in force, what ``rewrite`` makes of a function's jaxpr.

    Functions other than ``who`` are differentiated as they are. ``rewrite`` gives for the closed jaxpr, and the calls
    recorded when it was traced, a flat function of its inputs. ``earlier`` are calls that were recorded before; it is
    given those that are recorded now.
    """

    def replaced(traceable: Callable[..., Any], args: tuple[Any, ...], has_aux: bool) -> Callable[..., Any]:
        if isinstance(traceable, TracedGradient) and traceable.calls is not None:
            earlier.adopt(traceable.calls)
        with recording(earlier) as calls:
            call = TracedGradient(traceable, args, has_aux)
        if call.inner.who != who:
            return call.instead()
        instead = rewrite(call.inner.closed, calls)
        earlier.adopt(calls, call.inner.closed)
        return call.instead(instead)

    return _jax.holding(replaced)


class TracedGradient:
    """One call of a function that JAX is about to differentiate, traced; to be differentiated in its place.

    Attributes:
        inner: the function as it was traced.
        calls: those that were recorded meanwhile, where whoever differentiates what stands for it records none.
    """

    calls: Calls | None = None

    def __init__(self, traceable: Callable[..., Any], args: tuple[Any, ...], has_aux: bool, depth: int = 0) -> None:
        leaves, tree = tree_flatten(args)
        self._leaves = leaves
        self._returned = Returned()
        watch = _FirstCall(traceable)
        named: list[Any] = []
        counts: list[int] = []

        def flat(*values: Any) -> list[Any]:
            with watching(watch):
                out = traceable(*tree_unflatten(tree, values))
            named[:] = values
            arrays = self._returned.arrays(out)
            pair = has_aux and isinstance(out, (tuple, list)) and len(out) == 2
            counts.append(sum(map(can_be_output, tree_leaves(out[0]))) if pair else len(arrays))
            return arrays

        self._closed = jax.make_jaxpr(flat)(*leaves)
        (outputs,) = counts
        if isinstance(traceable, TracedGradient):
            watch.take_from(traceable.inner, named)
        elif not watch.knows_one_of(named):
            jaxpr = _jax.open_jaxpr(self._closed)
            variables, values = (*jaxpr.invars, *jaxpr.constvars), (*named, *_jax.consts_of(self._closed))
            watch.look_inside(jaxpr, dict(zip(map(id, variables), values, strict=True)))
        primals = watch.names(named, [path for path, _ in tree_flatten_with_path(args)[0]])
        outer = {index: value for index, value in enumerate(_jax.consts_of(self._closed)) if isinstance(value, Tracer)}
        vmaps = _jax.Vmaps([*outer.values(), *leaves])
        types = iter(vmaps.types)
        self.inner = Differentiated(
            watch.who or (getattr(traceable, "__name__", "function"), "", 0),
            self._closed,
            {
                index: _leaf(next(types), name, differentiated=False)
                for index, name in zip(outer, watch.names(list(outer.values())), strict=True)
            },
            tuple(_leaf(next(types), name, differentiated=True) for name in primals),
            watch.static,
            outputs,
            len(self._closed.out_avals) - outputs,
            depth,
            vmaps,
            _jax.thread_settings(),
            _jax.manual_axes(),
        )
        self.__name__, self.evaluate = self.inner.who[0], _jax.as_function(self._closed)

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        return self.results(self.evaluate(*tree_leaves(args)))

    def instead(self, evaluate: Callable[..., Any] | None = None) -> TracedGradient:
        """The function to differentiate, of which ``evaluate`` is another form, from flat inputs to flat results."""
        other = copy.copy(self)
        other.evaluate = evaluate or self.evaluate
        return other

    def results(self, arrays: Sequence[Any]) -> Any:
        """What the function returns, from the arrays in it."""
        return self._returned.with_arrays(arrays)

    @property
    def values(self) -> list[Any]:
        """The values of its constants, and then of what it is differentiated in."""
        return [*_jax.consts_of(self._closed), *self._leaves]

    def of(self, constants: Sequence[Any]) -> TracedGradient:
        """A flat function to differentiate that has other constants: of the leaves, with outputs and auxiliary ones."""
        closed, outputs = _jax.with_consts(self._closed, constants), self.inner.outputs
        other = self.instead(_jax.as_function(closed))
        other.inner = replace(self.inner, closed=closed)
        other.results = lambda arrays: (arrays[:outputs], arrays[outputs:])
        return other

    def as_calls(self, number: int) -> Callable[..., Any]:
        """As ``instead()``, with each half of the gradient as one call, which other halves can be put in the place of.

        Where a call may not stand for it (it is differentiated itself, or has effects that JAX lets no rule have), the
        gradient stands there by itself. ``number`` is the one that ``half_of`` gives for these calls.
        """
        inner = self.inner
        if _jax.has_effects(inner.closed):
            return self.instead()
        outer = [_jax.consts_of(inner.closed)[index] for index in inner.constants]
        if not all(map(_jax.is_staged, (*outer, *self._leaves))):
            return self.instead()
        call = halves_as_calls(inner, number)
        return self.instead(lambda *leaves: call(*outer, *leaves))


def _leaf(aval: Any, name: _Name, *, differentiated: bool) -> Leaf:
    return Leaf(*name, aval, is_array=True, differentiated=differentiated and _jax.is_inexact(aval))


_LOOKED_AT = 1000  # objects, at most, for the function that is called: it is among the first few
_Name = tuple[str, str, int | None]  # of a leaf, of its argument, and the position of that


class _FirstCall:
    """Watches for the first function of the user's own that is called, which is the one that is differentiated.

    It knows by what names the user calls the values that go in, whichever library called it. ``traceable`` is what JAX
    differentiates, which leads to that function.
    """

    def __init__(self, traceable: Any) -> None:
        self._traceable = traceable
        self.who: Identity | None = None
        self._is_named = False
        self.static: tuple[Leaf, ...] = ()
        self._names: dict[int, _Name] = {}
        self._of_variables: dict[int, _Name] = {}  # in a jaxpr that is made apart, as of what is jitted
        self._values: list[Any] = []  # kept alive, so that their identity stays their own

    def begin(self, frame: FrameType) -> None:
        """A function is called."""
        code = frame.f_code
        if self._is_named or not is_user_file(code.co_filename) or _handles_a_container(frame):
            return
        stood_in, self._is_named = self.who, STAND_IN not in code.co_varnames
        self.who = stood_in or (_name_of(code), code.co_filename, code.co_firstlineno)
        named, rest, more, local = inspect.getargvalues(frame)
        given = {name: local.get(name) for name in (*named, rest, more) if name is not None}
        with contextlib.suppress(Exception):  # what does not take what its wrapper was given, is not what that wraps
            wrapper, own = _wrapper(frame, self._traceable)
            function = inspect.unwrap(wrapper)
            if is_user_file(function.__code__.co_filename):
                given = _as_given_to(function, frame, own)
                code = function.__code__
                self.who = stood_in or (_name_of(code), code.co_filename, code.co_firstlineno)
        if not self._is_named:  # it stands in for what it calls, which names what it is given
            return
        with contextlib.suppress(Exception):  # a container of the user's own that cannot be flattened has no names
            self._take_names(frame, given)

    def end(self, frame: FrameType, value: Any) -> None:
        """A function has returned a value."""

    def _take_names(self, frame: FrameType, given: Mapping[str, Any]) -> None:
        static: list[Leaf] = []
        for position, (name, whole) in enumerate(given.items()):
            for leaf_name, value in _paths(name, whole):
                if isinstance(value, (Tracer, jax.Array, np.ndarray)):
                    self._names.setdefault(id(value), (leaf_name, name, position))
                    self._values.append(value)
                    for variable in _jax.variables(value):
                        self._of_variables.setdefault(id(variable), (leaf_name, name, position))
                elif not callable(value):
                    static.append(Leaf(leaf_name, name, position, value, is_array=False, differentiated=False))
        self.static = tuple(static)
        # What the function closes over, and what the functions around it call what they give it. Nothing is traced at
        # the top of a module or cell, where a name may stand for the globals, which hold themselves.
        around: FrameType | None = frame
        while around is not None:
            within = around.f_locals
            if is_user_file(around.f_code.co_filename) and within is not around.f_globals:
                for name, container in list(within.items()):
                    for leaf_name, value in _paths(name, container) if name not in given else ():
                        if isinstance(value, Tracer):
                            self._names.setdefault(id(value), (leaf_name, name, None))
                            self._values.append(value)
            around = around.f_back

    def knows_one_of(self, values: Iterable[Any]) -> bool:
        """Whether the function that was called has a name for one of these values."""
        return any(id(value) in self._names for value in values)

    def look_inside(self, jaxpr: Any, values: Mapping[int, Any]) -> None:
        """Know the values of inputs and constants, by identity, by what a jitted function inside calls them."""
        names = _names_inside(jaxpr, self._seen) or _names_inside(jaxpr, self._noted)
        for variable, name in names.items():
            if variable in values:
                self._names[id(values[variable])] = name
                self._values.append(values[variable])

    def _seen(self, jaxpr: Any) -> dict[int, _Name]:
        """The names of the inputs of an open jaxpr, by the identity of the variable, as a function was called with."""
        return {id(var): name for var in jaxpr.invars if (name := self._of_variables.get(id(var)))}

    def _noted(self, jaxpr: Any) -> dict[int, _Name]:
        """The same, as JAX has noted them: what it had traced before is not called, and nobody has seen it."""
        who = _jax.function_name(jaxpr)
        if not is_user_file(who[1] or __file__) or (self.who or who)[1:] != who[1:]:
            called = None if who[1] == __file__ else called_in(jaxpr)
            if called is not None:  # by what a library jits, which has names of its own for all
                self.who = self.who or (name_of(called), called.co_filename, called.co_firstlineno)
            return {}
        self.who = self.who or who
        paths = {id(var): path for var, path in zip(jaxpr.invars, _jax.argument_names(jaxpr), strict=False) if path}
        arguments = {path: re.split(r"[\[.]", path)[0] for path in paths.values()}
        order = list(dict.fromkeys(arguments.values()))
        return {var: (path, arguments[path], order.index(arguments[path])) for var, path in paths.items()}

    def take_from(self, inner: Differentiated, values: Sequence[Any]) -> None:
        """Know what is known of a function in whose place another is differentiated, called with these values."""
        self.who, self.static = inner.who, inner.static
        constants = _jax.consts_of(inner.closed)
        outer = [(constants[index], leaf) for index, leaf in inner.constants.items()]
        for value, leaf in (*outer, *zip(values, inner.primals, strict=True)):
            self._names[id(value)] = leaf.name, leaf.argument, leaf.position
            self._values.append(value)

    def names(self, values: Sequence[Any], paths: Sequence[Any] = ()) -> list[_Name]:
        """What the user calls each value; ``paths`` to them say where nobody calls it anything."""
        names: list[_Name] = []
        for number, value in enumerate(values):
            path = keystr(paths[number]) if paths else f"[{number}]"
            word = "differentiated" if paths else "closed_over"
            names.append(self._names.get(id(value)) or (f"{word}{path}", word, None))
        return names


def _wrapper(frame: FrameType, holder: Any) -> tuple[Any, int]:
    """What ``functools.wraps`` made that a frame is a call of, and how many arguments are its own; of others itself.

    No frame knows its function: it is looked for among what ``holder`` leads to, what is nearest first.
    """
    code, local = frame.f_code, frame.f_locals
    first = local.get(code.co_varnames[0]) if code.co_argcount else None
    if "__wrapped__" in getattr(first, "__dict__", ()) and code.co_name == "__call__":
        return first, 1
    if not any(callable(local.get(name)) for name in code.co_freevars) or code.co_name == "<lambda>":
        return None, 0
    todo, seen = deque([holder]), dict[int, Any]()
    while todo and len(seen) < _LOOKED_AT:
        value = todo.popleft()
        if id(value) in seen or isinstance(value, type | ModuleType):
            continue
        seen[id(value)] = value
        if not isinstance(value, FunctionType):
            todo += gc.get_referents(value)
            continue
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        if value.__code__ is code and all(local.get(name) is cell.cell_contents for name, cell in cells.items()):
            return (value, 0) if hasattr(value, "__wrapped__") else (None, 0)
        todo += [*cells.values(), vars(value)]
    return None, 0


def _as_given_to(function: Any, frame: FrameType, own: int) -> dict[str, Any]:
    """What the function that a wrapper is around calls the arguments of a call of that, ``own`` of them aside."""
    arguments = inspect.getargvalues(frame)
    named = {name: arguments.locals[name] for name in arguments.args[own:]}
    more = arguments.locals[arguments.keywords] if arguments.keywords else {}
    rest = arguments.locals[arguments.varargs] if arguments.varargs else ()
    return inspect.signature(function).bind(*named.values(), *rest, **more).arguments


def _names_inside(jaxpr: Any, names_of: Callable[[Any], dict[int, _Name]]) -> dict[int, _Name]:
    """The names of the inputs of an open jaxpr, by identity: its own, else those of the first call in it with some."""
    if own := names_of(jaxpr):
        return own
    for eqn in jaxpr.eqns:
        for body in _jax.bodies(eqn):
            if body.kind == "call" and (names := _names_inside(body.jaxpr, names_of)):
                inputs = reversed([*zip(body.jaxpr.invars, body.operands, strict=True)])  # of several the first
                return {id(eqn.invars[n]): names[id(var)] for var, n in inputs if n is not None and id(var) in names}
    return {}


def _handles_a_container(frame: FrameType) -> bool:
    """Whether a call comes from JAX, or a library, putting a container of the user's own together again.

    Or comparing it, making its hash: no other special method than ``__call__`` is what somebody differentiates.
    """
    code = frame.f_code
    special = code.co_name.startswith("__") and code.co_name != "__call__"
    if special or code.co_varnames[:1] == ("_cls",):  # of a namedtuple
        return True
    caller = frame.f_back
    while caller is not None and is_user_file(caller.f_code.co_filename):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.endswith(("tree_util.py", "flattree.py"))


def _paths(name: str, container: Any) -> Iterator[tuple[str, Any]]:
    with contextlib.suppress(Exception):
        for path, value in tree_flatten_with_path(container)[0]:
            yield name + keystr(path), value


def _name_of(code: CodeType) -> str:
    if code.co_name == "__call__":  # of a model's class: the class is what the user knows it by
        return code.co_qualname.split(".")[-2] if "." in code.co_qualname else code.co_name
    return code.co_name
