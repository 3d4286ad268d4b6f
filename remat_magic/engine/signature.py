"""The arguments and results of an inspected call: which leaves are arrays, which are differentiated, their names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from remat_magic import _jax, libraries, units
from remat_magic.records import RematError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the arguments.

    ``name`` is ``params['w']``; ``argument`` the parameter it belongs to; ``value`` the Python value of a static leaf
    or the abstract value of an array; ``differentiated`` leaves are arrays. ``sharding`` says on which devices an
    array lay that was committed to some (None: to none), or a ``ShapeDtypeStruct`` is to lie. ``is_number``: a number
    of Python's or NumPy's, traced as an array.
    """

    name: str
    argument: str
    position: int | None
    value: Any
    is_array: bool
    differentiated: bool
    sharding: Any = None
    is_number: bool = False


_UNNAMED = "<unnamed function>"  # as JAX calls what it is given without a name


def function_name(fun: Any) -> str:
    """What to call a function in a title: its own name, through partials and bound methods."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    while getattr(fun, "__name__", _UNNAMED) == _UNNAMED and hasattr(fun, "__wrapped__"):  # of an object that is called
        fun = fun.__wrapped__
    name = getattr(fun, "__name__", None) or type(fun).__name__
    if name == "__call__":  # of a model's class: the class is what the user knows it by
        return ".".join(getattr(fun, "__qualname__", name).split(".")[-2:-1]) or name
    return name


class Bound(NamedTuple):
    """A function, and the first arguments of its calls that a bound method or a partial holds.

    ``settled`` are the numbers and keywords of those that a partial holds, which are not differentiated unasked.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    settled: frozenset[int | str] = frozenset()

    def around(self, fun: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls another with these arguments first, named as the one that held them."""
        if not self.args and not self.kwargs:
            return fun

        @functools.wraps(like)
        def bound(*args: Any, **kwargs: Any) -> Any:
            return fun(*self.args, *args, **{**self.kwargs, **kwargs})

        return bound


def unbound(fun: Callable[..., Any]) -> Bound:
    """A function, and as arguments what a bound method, a model or a partial holds of it, where that has arrays.

    Also within what ``jax.vmap`` and equinox's transformations make of these.
    """
    inner: Any = fun
    if (made := libraries.wrapped_in(fun)) is not None:
        wrapped, like = made
        bound = unbound(wrapped)

        @functools.wraps(bound.fun)
        def given(*args: Any, **kwargs: Any) -> Any:
            own = Bound(bound.fun, args[: len(bound.args)], {name: kwargs.pop(name) for name in bound.kwargs})
            values, others = (bound.args, bound.kwargs), (own.args, own.kwargs)
            return like(values, others, own.around(bound.fun, wrapped))(*args[len(own.args) :], **kwargs)

        return bound._replace(fun=given) if bound.args or bound.kwargs else Bound(fun)
    args, kwargs, settled = (), dict[str, Any](), list[bool]()
    while True:
        if libraries.has_attributes(inner, "func", "args", "keywords"):  # equinox has a partial of its own
            inner, values, named = inner.func, inner.args, inner.keywords
            # So libraries bind what they have jitted to an object.
            method = len(values) == 1 and getattr(type(values[0]), getattr(inner, "__name__", ""), None) is inner
        elif (of := libraries.method_of(inner)) is not None:
            inner, values, named, method = of[0], of[1:], {}, True
        else:
            break
        args, kwargs, settled = (*values, *args), {**named, **kwargs}, [not method] * len(values) + settled
    if not any(_jax.is_inexact(abstract(leaf)) and not _is_number(leaf) for leaf in jax.tree.leaves((args, kwargs))):
        return Bound(fun)
    return Bound(inner, args, kwargs, frozenset([*kwargs, *(number for number, yes in enumerate(settled) if yes)]))


def argument_names(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, str]:
    """What a function calls the arguments of a call, by their numbers and keywords."""
    names: dict[int | str, str] = {key: key for key in kwargs}
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # builtins and some callables have no signature
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    own = libraries.applied_parameters(fun, args, kwargs) or [parameter.name for parameter in positional]
    for number in range(len(args)):
        names[number] = own[number] if number < len(own) else f"{rest}[{number - len(positional)}]"
    return names


class Inputs:
    """The flattened arguments of a function.

    Attributes:
        function: its name.
        leaves: of its arguments, in their order.
        settings: those of JAX that it is traced under; None for those in force.
        vmaps: the ``jax.vmap`` calls that it is differentiated under, if any; the leaves have the types outside.
    """

    function: str
    leaves: tuple[Leaf, ...]
    settings: Any
    vmaps: Any

    @functools.cached_property
    def arrays(self) -> tuple[Leaf, ...]:
        """The leaves that are traced."""
        return tuple(leaf for leaf in self.leaves if leaf.is_array)

    @functools.cached_property
    def differentiated(self) -> tuple[int, ...]:
        """The positions among ``arrays`` of what is differentiated."""
        return tuple(i for i, leaf in enumerate(self.arrays) if leaf.differentiated)

    @functools.cached_property
    def wrt(self) -> tuple[str, ...]:
        """What is differentiated: whole arguments by name where all their inexact leaves are, else leaves."""
        with_numbers = {leaf.argument for leaf in self.leaves if leaf.is_number}
        left_out = {
            leaf.argument
            for leaf in self.leaves
            if not leaf.differentiated
            and (
                _jax.is_inexact(leaf.value)
                if leaf.is_array
                else leaf.argument in with_numbers and _is_number(leaf.value)
            )
        }
        chosen = (leaf for leaf in self.leaves if leaf.differentiated)
        return tuple(dict.fromkeys(leaf.name if leaf.argument in left_out else leaf.argument for leaf in chosen))

    def text(self, outputs: str) -> str:
        """One line: ``loss(params: 3 leaves 192 B, x f32[4]) -> f32[]``."""
        parts: dict[str, list[Leaf]] = {}
        for leaf in sorted(self.leaves, key=lambda leaf: (leaf.position is None, leaf.position or 0)):
            parts.setdefault(leaf.argument, []).append(leaf)
        shown = [_argument_text(name, leaves) for name, leaves in parts.items()]
        return f"{self.function}({', '.join(shown)}) -> {outputs}"


class Signature(Inputs):
    """The call's arguments, flattened.

    Args:
        fun: the function.
        args: positional arguments.
        kwargs: keyword arguments.
        wrt: argument numbers or names to differentiate, None for every inexact leaf.
        bound: the first of them, which do not stand in the call.
        numbers: whether Python numbers are differentiated where they may be: as arguments or in lists, tuples and
            dicts, as ``jax.grad`` does. In an object of a class (a config, a model) they are settings, and stay what
            they are unless ``wrt`` asks for its argument, or there is nothing else. In a model of equinox they do so
            unless it asks for the number itself: for equinox they are static. NumPy's numbers are traced with them.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wrt: Any,
        bound: Bound | None = None,
        numbers: bool = True,
    ) -> None:
        self.function, self.settings, self.vmaps = function_name(fun), None, None
        self._bound = bound or Bound(fun)
        args, kwargs = (*self._bound.args, *args), {**self._bound.kwargs, **kwargs}
        names = argument_names(fun, args, kwargs)
        paths, self._tree = tree_flatten_with_path((args, kwargs))
        wanted = self._wanted(wrt, args, names)
        leaves: list[Leaf] = []
        owners = _owners((args, kwargs))
        others = (value for (_, value), owner in zip(paths, owners, strict=True) if not (owner and _is_number(value)))
        has_others = any(_jax.is_inexact(abstract(value)) for value in others)
        for (path, value), owner in zip(paths, owners, strict=True):
            position = path[1].idx if path[0].idx == 0 else None
            key = path[1].idx if position is not None else path[1].key
            name = names[key] + keystr(path[2:])
            aval = abstract(value)
            if wanted is None:
                chosen = key not in self._bound.settled
            else:
                chosen = key in wanted or not wanted.isdisjoint(_prefixes(name))
            if _is_number(value) and name not in (wanted or ()):
                setting = owner is not None and (_is_of_equinox(owner) or (wanted is None and has_others))
                if setting or not chosen or not numbers:  # what is not differentiated stays a Python value
                    aval = None
            elif isinstance(value, np.generic) and not numbers:  # np.prod(shape) is one
                aval = None
            differentiated = chosen and aval is not None and _jax.is_inexact(aval)
            leaves.append(
                Leaf(
                    name,
                    names[key],
                    position,
                    value if aval is None else aval,
                    aval is not None,
                    differentiated,
                    None if aval is None else sharding_of(value),
                    aval is not None and (_is_number(value) or isinstance(value, np.generic)),
                )
            )
        self.leaves = tuple(leaves)
        self._check(wanted, names)

    def _wanted(self, wrt: Any, args: tuple[Any, ...], names: Mapping[int | str, str]) -> set[int | str] | None:
        """The keys of the arguments to differentiate, and leaf names such as ``params['w']`` as they are."""
        if wrt is None:
            return None
        wanted: set[int | str] = set()
        by_name = {name: key for key, name in names.items()}
        bound = len(self._bound.args)
        count = len(args) - bound
        for item in wrt if isinstance(wrt, (tuple, list)) else (wrt,):
            if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
                number = int(item) + count if item < 0 else int(item)
                if not 0 <= number < count:
                    raise RematError(
                        f"wrt={item} asks for an argument that the call does not have: {self.function} was given "
                        f"{count} positional argument{'s' * (count != 1)}."
                    )
                wanted.add(bound + number)
            elif isinstance(item, str):
                if item in by_name:
                    wanted.add(by_name[item])
                elif not by_name.keys().isdisjoint(_prefixes(item)):
                    wanted.add(item)
                else:
                    has = ", ".join(map(repr, by_name)) or "no arguments"
                    raise RematError(f"wrt={item!r} is not an argument of this call of {self.function}: it has {has}.")
            else:
                raise RematError(f"wrt takes argument numbers and names, not {type(item).__name__}: {item!r}.")
        return wanted

    def _check(self, wanted: set[int | str] | None, names: Mapping[int | str, str]) -> None:
        for key in wanted or ():
            inside = [
                leaf
                for leaf in self.leaves
                if leaf.argument == names.get(key) or (isinstance(key, str) and _within(leaf.name, key))
            ]
            if not any(leaf.differentiated for leaf in inside):
                text = names.get(key, key)
                if not inside:
                    raise RematError(f"wrt asks for {text!r}, which has no array in this call of {self.function}.")
                leaf = inside[0]
                type_name = _jax.type_text(leaf.value) if leaf.is_array else type(leaf.value).__name__
                raise RematError(
                    f"{text!r} cannot be differentiated: it is {type_name}, and only floating-point arrays can; "
                    "pass floats, or leave it out of wrt."
                )

    def require_differentiable(self) -> None:
        """Make sure that there is something to differentiate."""
        if not self.differentiated:
            if not self.leaves:
                raise RematError(f"{self.function} was called without arguments: nothing to differentiate.")
            kinds = ", ".join(
                f"{leaf.name} is {_jax.type_text(leaf.value) if leaf.is_array else type(leaf.value).__name__}"
                for leaf in self.leaves[:4]
            )
            raise RematError(
                f"no argument of {self.function} can be differentiated ({kinds}): pass a floating-point array or a "
                "jax.ShapeDtypeStruct."
            )

    @functools.cached_property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of Python's and NumPy's that are traced."""
        return tuple(leaf.name for leaf in self.leaves if leaf.is_number)

    def jaxpr(self, fun: Callable[..., Any], flat: Callable[[Any], Any]) -> Any:
        """The closed jaxpr of ``flat`` of what a call of ``fun`` returns, with the array leaves as its inputs.

        Values that the call puts into its arguments, as flax's nnx does and whoever assigns to an item of a dictionary,
        are further outputs.

        JAX takes it for ``fun`` itself: where it says which function and argument a tracer belongs to, those are the
        user's.
        """

        def called(*args: _Arrays, **kwargs: _Arrays) -> Any:
            arrays = jax.tree.leaves((args, kwargs))
            own_args, own_kwargs = self.arguments(arrays)
            outputs = flat(fun(*own_args, **own_kwargs))
            before = {*map(id, arrays)}
            after = [leaf for leaf in jax.tree.leaves((own_args, own_kwargs)) if id(leaf) not in before]
            return [*outputs, *(leaf for leaf in after if arrays and _jax.of_one_trace(leaf, arrays[0]))]

        called.__dict__["__wrapped__"] = fun
        called.__name__ = self.function
        args: dict[int, _Arrays] = {}
        kwargs: dict[str, _Arrays] = {}
        for place, leaves in self._by_place().items():
            arrays = [leaf for leaf in leaves if leaf.is_array]
            paths = tuple(leaf.name.removeprefix(leaf.argument) for leaf in arrays)
            packed = _Arrays(paths, [leaf.value for leaf in arrays])
            if isinstance(place, int):
                args[place] = packed
            else:
                kwargs[place] = packed
        filled = [args.get(number, _Arrays((), ())) for number in range(max(args, default=-1) + 1)]
        return jax.make_jaxpr(called)(*filled, **kwargs)

    def _by_place(self) -> dict[int | str, list[Leaf]]:
        places: dict[int | str, list[Leaf]] = {}
        for leaf in self.leaves:
            places.setdefault(leaf.argument if leaf.position is None else leaf.position, []).append(leaf)
        return places

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with these values in place of the array leaves."""
        values = iter(arrays)
        leaves = [next(values) if leaf.is_array else leaf.value for leaf in self.leaves]
        return tree_unflatten(self._tree, leaves)

    def resized(self, sizes: Mapping[str, int], axis: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the same types, but for the sizes of an axis of some leaves, and the static ones themselves."""
        arrays = list[Any]()
        for leaf in self.arrays:
            aval, shape = leaf.value, [*leaf.value.shape]
            if leaf.name in sizes:
                shape[axis] = sizes[leaf.name]
            weak = getattr(aval, "weak_type", False)
            anew = jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak, sharding=leaf.sharding)
            arrays.append(aval if isinstance(aval, jax.ShapeDtypeStruct) and leaf.name not in sizes else anew)
        return self.arguments(arrays)

    def arrays_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The array leaves of another call with arguments of the same types."""
        leaves, tree = tree_flatten(((*self._bound.args, *args), {**self._bound.kwargs, **kwargs}))
        if tree != self._tree:
            raise RematError(f"the inputs are not arguments that {self.function} was traced with: another structure.")
        arrays = []
        for leaf, value in zip(self.leaves, leaves, strict=True):
            if not leaf.is_array:
                continue
            aval = abstract(value)
            if aval is None or (aval.shape, aval.dtype) != (leaf.value.shape, leaf.value.dtype):
                given = type(value).__name__ if aval is None else _jax.type_text(aval)
                raise RematError(f"the input {leaf.name} is {given}, and was {_jax.type_text(leaf.value)} when traced.")
            arrays.append(value)
        return arrays


def _argument_text(name: str, leaves: Sequence[Leaf]) -> str:
    arrays = [leaf for leaf in leaves if leaf.is_array]
    if len(leaves) == 1 and leaves[0].name == name:
        leaf = leaves[0]
        if leaf.is_array:
            text = _jax.type_text(leaf.value)
            return f"{name} {_jax.sharding_text(leaf.value, text) or text}"
        text = repr(leaf.value) if isinstance(leaf.value, (bool, int, float, complex, str)) else None
        return f"{name}={text if text and len(text) <= 24 else type(leaf.value).__name__}"
    size = sum(_jax.nbytes(leaf.value) for leaf in arrays)
    return f"{name}: {len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'} {units.nbytes(size)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, complex)) and not isinstance(value, np.generic)


def _owners(tree: Any) -> list[type | None]:
    """For each leaf the class of the outermost object around it that is no list, tuple or dict."""
    owners: list[type | None] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: not isinstance(node, (list, tuple, dict, type(None)))):
        leaves = jax.tree.leaves(node)
        owners += [None if leaf is node else type(node) for leaf in leaves]
    return owners


def _is_of_equinox(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "equinox" for base in kind.__mro__)


def _prefixes(name: str) -> list[str]:
    """``params['w'].b``, ``params['w']`` and ``params``: the leaf and what it is in."""
    return [name, *(name[: part.start()] for part in re.finditer(r"[\[.]", name))]


def _within(name: str, prefix: int | str) -> bool:
    return prefix in _prefixes(name)


@dataclass(frozen=True, slots=True)
class _PathText:
    """A key of a pytree's path, already written as ``jax.tree_util.keystr`` would write the whole."""

    text: str

    def __str__(self) -> str:
        return self.text


@jax.tree_util.register_pytree_with_keys_class
class _Arrays:
    """The arrays of one argument under their paths in it, so that JAX's messages call them as the user would."""

    def __init__(self, paths: tuple[str, ...], values: Sequence[Any]) -> None:
        self.paths, self.values = paths, values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[_PathText, Any]], tuple[str, ...]]:
        """As JAX asks: the arrays under their paths, and what is static."""
        return [(_PathText(path), value) for path, value in zip(self.paths, self.values, strict=True)], self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Sequence[Any]) -> _Arrays:
        """As JAX asks: the same paths with other values."""
        return cls(paths, values)


# ----------------------------------------------------------------------------------------- what a value is to a trace


def abstract(leaf: Any) -> Any:
    """The abstract value of an array-like leaf, or None for a value that is no array.

    Nothing is put on a device and the array is not kept: only its type matters to a trace.
    """
    if isinstance(leaf, (bool, int, str, bytes)) or leaf is None:
        return None
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in "biufcV":
        return None
    if isinstance(leaf, (float, complex)):
        return jax.typeof(leaf)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return jax.typeof(leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type):
        return _as_traced(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else _by_shape(leaf))
    return None


def _as_traced(aval: Any) -> Any:
    """The type that JAX traces with: of 32 bits where 64 are not enabled."""
    if not isinstance(aval, jax.ShapeDtypeStruct):
        return aval
    dtype = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    return aval if dtype == aval.dtype else aval.update(dtype=dtype)


def sharding_of(leaf: Any) -> Any:
    """Where a value is to stay: the sharding of a committed array or of a ``ShapeDtypeStruct``, else None."""
    if isinstance(leaf, Tracer):  # traced within another trace: on no device yet
        return None
    if isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and getattr(leaf, "committed", False)):
        return leaf.sharding
    return None


def _by_shape(leaf: Any) -> Any:
    try:
        return jax.typeof(leaf)
    except TypeError:
        pass
    try:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    except Exception:  # noqa: BLE001 - has such attributes, and is no array all the same: a static value
        return None


def can_be_output(leaf: Any) -> bool:
    """Whether a jaxpr can have a value among its outputs; other leaves of what a function returns stay Python's."""
    return abstract(leaf) is not None or isinstance(leaf, (bool, int))


class Returned:
    """What a function returned when it was traced, so that arrays can be put in the places of those in it."""

    def __init__(self) -> None:
        self._tree: Any = None
        self._leaves: list[Any] = []  # None for an array
        self._is_array: list[bool] = []

    def arrays(self, returned: Any) -> list[Any]:
        """The arrays in what a function returned, which is remembered without them."""
        leaves, self._tree = tree_flatten(returned)
        self._is_array = [can_be_output(leaf) for leaf in leaves]
        self._leaves = [None if yes else leaf for leaf, yes in zip(leaves, self._is_array, strict=True)]
        return [leaf for leaf, yes in zip(leaves, self._is_array, strict=True) if yes]

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """The same with other arrays."""
        given = iter(arrays)
        places = zip(self._leaves, self._is_array, strict=True)
        return tree_unflatten(self._tree, [next(given) if yes else leaf for leaf, yes in places])


def flatten_outputs(out: Any, has_aux: bool, function: str) -> tuple[list[Any], list[Any]]:
    """The leaves of the outputs and of the auxiliary ones."""
    aux: Any = ()
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise RematError(f"has_aux=True needs {function} to return a pair (output, auxiliary data).")
        out, aux = out
    return tree_leaves(out), tree_leaves(aux)
