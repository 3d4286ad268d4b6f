"""The ``vmap`` calls of a program, as places: ``vmap(render) in 16`` is that call in 16 parts, each under a checkpoint.

Parts change the program, and policies go into it: a program in parts is traced anew, and each part's checkpoint is a
site of it, whose key is that of the place.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType
from typing import Any

from remat_magic import _jax
from remat_magic.engine.parts import unused
from remat_magic.engine.sites import Identity, keys_of, name_of
from remat_magic.jaxprs.provenance import Spans
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import is_layer
from remat_magic.parsing import parse_expression
from remat_magic.records import RematError, Site, SourceSpan
from remat_magic.user_files import is_library_file, is_user_file

_KEY = re.compile(r"(?P<what>vmap\(.+\)|batch|microbatches) in (?P<parts>[1-9]\d*)")
BATCH = frozenset({"batch", "microbatches"})  # both are the microbatches of a step's gradient
_AXES = ("in_axes", "out_axes")
_LOOKED_AT = 50  # objects in a wrapper, for what it wraps


@dataclass(frozen=True, slots=True)
class Vmap:
    """A function that is mapped; all calls of ``vmap`` on one function are one.

    Attributes:
        key: ``vmap(render)``.
        who: the function.
        calls: where each is called, in the user's code, and for how many examples.
        refused: why it cannot be done in parts, as the end of a sentence; empty where it can.
        around: the functions that every call is in, each by its file and first line.
        axes: ``in_axes`` and ``out_axes`` of the first call; None where a library makes it.
        called: that call by names, for where its source is another expression.
    """

    key: str
    who: Identity
    calls: tuple[tuple[SourceSpan, int], ...]
    refused: str
    around: frozenset[tuple[str, int]]
    axes: tuple[Any, Any] | None
    called: str

    @property
    def divisors(self) -> list[int]:
        """The numbers of parts that it can be in."""
        size = math.gcd(*(size for _, size in self.calls))
        return [] if self.refused else divisors(size)

    @property
    def site(self) -> Site:
        """It as a place, in about the square root of the most parts."""
        n = middle(self.divisors)
        return Site(f"{self.key} in {n}", self.who[0], n, "", self.calls[0][0], possible=True, code=self.code(n, ""))

    def codes(self, parts: int, option: str | None) -> dict[SourceSpan, str]:
        """What to write for each call that is one expression, such as ``jax.vmap(f, (None, 0))(p, xs)``.

        ``option`` has the checkpoint's further arguments; None for no checkpoint.
        """
        texts = ((span, size, _text_of(span)) for span, size in self.calls)
        codes = {span: _in_parts(text, self.who[0], self.axes, size // parts, option) for span, size, text in texts}
        return {span: code for span, code in codes.items() if code}

    def code(self, parts: int, option: str | None) -> str:
        """What to write for all calls, also for those that are other expressions; empty where that is not known."""
        codes = [*self.codes(parts, option).values()]
        if len(codes) < len(self.calls):
            codes.append(_in_parts(self.called, self.who[0], self.axes, self.calls[0][1] // parts, option))
        return "\n".join(dict.fromkeys(codes)) if all(codes) else ""

    def check(self, parts: int) -> None:
        """Make sure that it can be done in so many parts."""
        if self.refused:
            raise RematError(f"{self.key} cannot be done in parts: {self.refused}.")
        if parts not in self.divisors:
            sizes = " and ".join(str(size) for _, size in self.calls)
            raise RematError(
                f"{self.key} maps {sizes} examples, which {parts} does not divide into parts: choose one of "
                f"{self.divisors[:12]}."
            )


def divisors(size: int) -> list[int]:
    """The numbers of equal parts that so many examples can be in."""
    return [n for n in range(2, size + 1) if size % n == 0]


def middle(divisors: Sequence[int]) -> int:
    """Of some numbers of parts that about the square root of the most."""
    return min(divisors, key=lambda n: abs(math.log(n * n / divisors[-1])))


def _text_of(span: SourceSpan) -> str:
    lines = [linecache.getline(span.file, line) for line in range(span.line, span.end_line + 1)]
    return "".join([*lines[:-1], lines[-1][: span.end_column]])[span.column :]


def _in_parts(text: str, name: str, axes: Any, size: int, option: str | None) -> str:
    """An expression that maps the function ``name``, in parts of a size; empty where it is another expression.

    Empty too where other axes than leading ones of whole arguments are mapped. They are read from the text
    where ``axes`` is None.
    """
    try:
        match parse_expression(text):
            case ast.Call(ast.Call(maker, [mapped, *given], keywords), [_, *_] as arguments, []):
                options = {**dict(zip(_AXES, given, strict=False)), **{str(it.arg): it.value for it in keywords}}
                axes = axes or [ast.literal_eval(options[axis]) if axis in options else 0 for axis in _AXES]
            case _:
                return ""
    except (SyntaxError, ValueError):
        return ""
    each = list(axes[0]) if isinstance(axes[0], (tuple, list)) else [axes[0]] * len(arguments)
    leading = all(axis is None or axis == 0 for axis in each) and len(each) == len(arguments) and axes[1] == 0
    # Haiku's `split_rng` says whether what has nothing mapped has random numbers of its own.
    known = ast.unparse(maker).endswith("vmap") and options.keys() <= {*_AXES, "split_rng"}
    if not known or not leading or any(isinstance(it, ast.Starred) for it in (mapped, *arguments)):
        return ""
    function, *texts = (ast.get_source_segment(text, part) or ast.unparse(part) for part in (mapped, *arguments))
    xs = [written for written, axis in zip(texts, each, strict=True) if axis is not None]
    x = unused("x", (function, *texts))
    parts = iter([x] if len(xs) == 1 else [f"{x}[{number}]" for number in range(len(xs))])
    inner = ", ".join(written if axis is None else next(parts) for written, axis in zip(texts, each, strict=True))
    called = f"({function})" if isinstance(mapped, ast.Lambda) else function
    # A checkpoint asks for a hash, which a function has, and no module of equinox's.
    call = function if function == name and len(texts) == 1 else f"lambda {x}: {called}({inner})"
    call = call if option is None else f"jax.checkpoint({call}{option})"
    return f"jax.lax.map({call}, {xs[0] if len(xs) == 1 else '(' + ', '.join(xs) + ')'}, batch_size={size})"


class Vmaps:
    """Records the ``vmap`` calls of a trace, and has some of them done in parts.

    ``parts`` has by function the key of its place, and how many parts.
    """

    def __init__(self, parts: Mapping[Identity, tuple[str, int]] | None = None) -> None:
        self._parts, self._spans = parts or {}, Spans()
        self._calls = defaultdict[Identity, list[Vmap]](list)

    def __call__(self, call: _jax.VmapCall) -> tuple[str, int] | None:
        """How a call is to be done; see ``_jax.mapping``."""
        users, frame = list[FrameType](), call.frame
        while frame is not None:
            users += [frame] * is_user_file(frame.f_code.co_filename)
            frame = frame.f_back
        who = _who(call, users[0]) if users else None
        if who is None:
            return None
        key, parts = self._parts.get(who, ("", 1))
        if call.size % parts:
            raise RematError(f"{key}: {call.size} examples are not {parts} equal parts.")
        if key and not call.refused:
            return key, parts
        around = frozenset((frame.f_code.co_filename, frame.f_code.co_firstlineno) for frame in users)
        axes = None if is_library_file(call.frame.f_code.co_filename) else call.axes
        names = _parameters(call.function)[: call.arguments] if axes is not None else ()
        called = f"vmap({who[0].strip('<>')})({', '.join(names)})"
        calls = ((self._spans.at(users[0]), call.size),)
        self._calls[who].append(Vmap("", who, calls, call.refused, around, axes, called))
        return None

    def found(self) -> dict[str, Vmap]:
        """Those that were called, by key."""
        vmaps, names = dict[str, Vmap](), keys_of(tuple(self._calls))
        for who, all_calls in self._calls.items():
            key, refused = f"vmap({names[who]})", "".join([it.refused for it in all_calls if it.refused][:1])
            around = frozenset.intersection(*(it.around for it in all_calls))
            calls = tuple(dict.fromkeys(it.calls[0] for it in all_calls))
            vmaps[key] = replace(all_calls[0], key=key, calls=calls, refused=refused, around=around)
        return vmaps


def with_parts(fun: Any, parts: Mapping[Identity, tuple[str, int]]) -> Any:
    """A function like ``fun`` with some of its ``vmap`` calls in parts, whenever it is traced."""

    @functools.wraps(fun)
    def parted(*args: Any, **kwargs: Any) -> Any:
        with _jax.mapping(Vmaps(parts)):
            return fun(*args, **kwargs)

    return parted


def parts_in(keys: Iterable[Any]) -> dict[str, int]:
    """The parts that places ask for, by the keys of ``vmap`` calls, and that of the batch."""
    found = (_KEY.fullmatch(key) for key in keys if isinstance(key, str))
    return {match["what"]: int(match["parts"]) for match in found if match}


def refuse_other_bits(closed: Any, key: str, site_of: Callable[[Any], str]) -> None:
    """Make sure that no part makes random bits that depend on how many examples there are."""
    for scope, eqn in walk(closed, once=True):
        if _jax.has_other_bits(eqn) and any(_jax.is_checkpoint(it) and site_of(it) == key for it in scope.around()):
            raise RematError(
                f"{key}: the function has random keys of kind rbg, of which vmap makes other bits for other numbers of "
                "examples; keys of kind threefry2x32 can be done in parts."
            )


def _parameters(fun: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        return ()


def _who(call: _jax.VmapCall, user: FrameType) -> Identity | None:
    """The user's function, or a library's layer, that is mapped; else what the user's own line maps."""
    todo, seen = deque([call.function]), list[Any]()
    while todo and len(seen) < _LOOKED_AT:
        fun = todo.popleft()
        if not callable(fun) or any(fun is it for it in seen):
            continue
        seen.append(fun)
        code = getattr(fun, "__code__", None)
        if isinstance(code, CodeType) and (is_user_file(code.co_filename) or is_layer(code)):
            return name_of(code).removesuffix(".__call__"), code.co_filename, code.co_firstlineno
        todo.extendleft(getattr(fun, name) for name in ("func", "__func__", "__wrapped__") if hasattr(fun, name))
        if isinstance(fun, FunctionType):
            todo += inspect.getclosurevars(fun).nonlocals.values()
        elif isinstance(fun, type):  # of linen's modules
            todo.append(vars(fun).get("__call__"))
        else:
            todo += [type(fun).__call__, *getattr(fun, "__dict__", {}).values()]
    if user is not call.frame:
        return None  # a library's own
    return getattr(call.function, "__name__", type(call.function).__name__), user.f_code.co_filename, user.f_lineno
