"""Places that could have a checkpoint and have none.

A place is a function that is called, by its definition. Its key, as ``at=``, is the function's name; ``block[::2]`` is
every second of its calls, ``block[:8]`` the first eight, ``block/3`` one checkpoint around each three in a row, with
what is between them: where a loop of JAX's makes one call in each step, around three of its steps. ``block in 4`` is
each of its calls in fourths of the batch. Functions that have a checkpoint have such places too. And what to write in
the source there.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remat_magic import _jax, libraries
from remat_magic.engine.calls import CalledFunction, Calls, Interval, within_library
from remat_magic.engine.sites import Identity, SiteTable, definition, identity, keys_of
from remat_magic.jaxprs.provenance import Spans
from remat_magic.jaxprs.walk import Scope, last_reads, scopes
from remat_magic.records import RematError, Site
from remat_magic.user_files import is_user_file

# By the module of a library: what it has for jax.checkpoint.
_CHECKPOINTS = {
    "equinox": "eqx.filter_checkpoint",
    "flax.linen": "nn.remat",
    "flax.nnx": "nnx.remat",
    "haiku": "hk.remat",
}


@dataclass(frozen=True, slots=True)
class CallingLoop:
    """A loop that makes a call in each step."""

    length: int = 0
    function: str = ""
    module: str = ""
    kind: str = "scan"
    has_inputs: bool = True
    has_outputs: bool = False
    lower: str = ""
    is_reversed: bool = False

    @classmethod
    def of(cls, eqn: Any, callee: CalledFunction) -> CallingLoop:
        """That of a scan's equation."""
        name, file, _ = _jax.function_name(_jax.scan_body(eqn))
        kind = "fori_loop" if _jax.use_of(_jax.scan_body(eqn)) == "fori_loop" else "scan"
        consts, carries, _ = _jax.scan_split(eqn)
        if not (file and is_user_file(file)):
            name, kind = callee.who[0], "scan" if carries else "map"
        library = libraries.scan_in(file)
        inputs = len(eqn.invars) > consts + carries
        lower = ""
        if kind == "fori_loop":
            first = eqn.invars[consts]
            lower = str(int(first.val) or "") if _jax.is_literal(first) else "lower"
        return cls(
            _jax.scan_length(eqn),
            name if name.replace(".", "_").isidentifier() else "body",
            library,
            kind,
            inputs,
            not all(map(_jax.is_dropped, eqn.outvars[carries:])),
            lower,
            _jax.is_reversed(eqn),
        )

    def code(self, size: int, policy: str = "") -> tuple[str, list[str]]:
        """What to write for a checkpoint around so many steps, and what is to be said of it.

        ``policy`` is as for ``code_of``.
        """
        size = max(1, min(size, self.length))  # a loop may have no step at all
        count, rest = divmod(self.length, size)
        options = f", policy={policy}" if policy else ""
        reverse = ", reverse=True" if self.is_reversed else ""
        comments = [f"chunks: xs reshaped to ({count}, {size}, ...)"] if self.has_inputs else []
        if self.module:
            scan = {"flax.linen": "nn.scan", "flax.nnx": "nnx.scan"}[self.module]
            inner = f"{scan}({self.function.partition('.')[0]}, ...)"
            code = f"{scan}({_CHECKPOINTS[self.module]}({inner}{options}), ...)"
            within = " by nn.map_variables, under the name that it has" if self.module == "flax.linen" else ""
            comments = [f"variables cut to ({count}, {size}, ...){within}"]
        elif self.kind == "fori_loop":
            first = f"{self.lower} + " if self.lower else ""
            step = f"lambda j, x: {self.function}({first}{size} * i + j, x)"
            code = f"jax.checkpoint(lambda i, x: jax.lax.fori_loop(0, {size}, {step}, x){options})"
            code = f"jax.lax.fori_loop(0, {count}, {code}, x)"
        elif self.kind == "map":
            code = f"jax.lax.map(jax.checkpoint(lambda chunk: jax.lax.map({self.function}, chunk){options}), chunks)"
            code = f"jax.tree.map(jax.numpy.concatenate, {code})"
        else:
            xs, chunks = ("chunk", "chunks") if self.has_inputs else (f"length={size}", f"length={count}")
            step = f"lambda carry, {'chunk' if self.has_inputs else '_'}: "
            step += f"jax.lax.scan({self.function}, carry, {xs}{reverse})"
            code = f"jax.lax.scan(jax.checkpoint({step}{options}), carry, {chunks}{reverse})"
            if self.has_outputs:
                code = f"carry, ys = {code}; ys = jax.tree.map(jax.numpy.concatenate, ys)"
        if self.has_outputs:
            comments.append(f"ys reshaped to ({count * size}, ...) again")
        if rest:
            comments.append(f"and the last {rest} under a checkpoint of their own")
        return code, comments


def code_of(callee: CalledFunction, policy: str = "") -> str:
    """What to write for a checkpoint on a function: all that is called and saved by name goes by its name then, too.

    Where the calls are to be changed for it, a comment says how: a checkpoint takes what is no array by position. Only
    an edit reads the calls, and is tried. Without a ``policy``, as code, the checkpoint saves nothing.
    """
    name, file, _ = callee.who
    by_library = callee.within or callee.library in ("haiku", "class") or (callee.module and not is_user_file(file))
    static = () if callee.module == "equinox" else callee.static  # which sees for itself
    # Some have no definition to write it on, or none that it may stand on.
    if by_library or name == "<lambda>" or any(position is None for position, _ in static):
        return code_of_calls(callee, policy)
    checkpoint, options = _CHECKPOINTS.get(callee.module, "jax.checkpoint"), _options(policy, _positions(static))
    written = f"@functools.partial({checkpoint}{options})" if options else f"@{checkpoint}"
    where = f"{'above other decorators ' if callee.module == 'flax.linen' else ''}on {name}"
    # Of nnx it gives all by position, what has its default too.
    return _commented(
        [written], [where, "" if callee.module == "flax.nnx" else _by_position(static), _leaks_comment(callee)]
    )


def _positions(static: Iterable[tuple[int | None, str]]) -> list[int]:
    return [position for position, _ in static if position is not None]


def _by_position(static: Iterable[tuple[int | None, str]]) -> str:
    """What is to be said of the calls of a function with static parameters."""
    names = [name for position, name in static if position is not None]
    return f"its calls give {' and '.join(names)} by position" if names else ""


def _leaks_comment(callee: CalledFunction) -> str:
    """What is to be said of a function that leaves something unreturned."""
    if not callee.leaks:
        return ""
    return "let it return what it leaves in a list, a dict or an object: a checkpoint lets nothing else out"


def code_of_calls(callee: CalledFunction, policy: str = "", key: str = "") -> str:
    """What to write in the place of a function where it is called; ``key`` is that of the place, if of some calls."""
    static = () if callee.module == "equinox" else callee.static
    names = [name for position, name in static if position is None]
    function, said, shift = _in_its_place(callee, "".join(f", {name}={name}" for name in names))
    without = f"without {' and '.join(names)} in the call" if names else ""
    code = _call(function, callee, policy, [position + shift for position in _positions(static)])
    of_place = f"for {key}" if key else ""
    return _commented([code], [said, without, _by_position(static), of_place, _leaks_comment(callee)])


def _in_its_place(callee: CalledFunction, keywords: str) -> tuple[str, str, int]:
    """A function as a checkpoint at its call is given it, what to say of that, and by how much positions shift.

    ``keywords`` are those that it is to be called with, as text.
    """
    cls, _, method = callee.who[0].rpartition(".")
    if callee.module in ("flax.linen", "flax.nnx"):  # which must see the module
        called = "module" if method == "__call__" else f"module.{method}"
        return f"lambda module, *args: {called}(*args{keywords})", f"given the {cls} before its arguments", 0
    shift = -(callee.module in ("class", "haiku"))  # whose objects are no arguments
    if callee.module == "class":
        function = f"self.{method}"
    elif callee.module:
        function = _instance(cls, method)
    else:
        function = f"lambda {', '.join(callee.parameters)}: ..." if method == "<lambda>" else method
    if callee.within == "flax.linen":
        said = "given the module that calls it (self) before its arguments"
        return f"lambda module, *args: {function}(*args{keywords})", said, shift + 1
    if keywords:
        return f"functools.partial({function}{keywords})", f"in place of {function}", shift
    return function, "", shift


def code_of_group(
    callee: CalledFunction, size: int, loop: CallingLoop | None, is_called_besides: bool, policy: str = ""
) -> str:
    """What to write for a checkpoint around so many calls after one another.

    ``loop`` is one of JAX's that makes a call in each step; ``is_called_besides``: there are calls that none makes.
    """
    code, comments = ("", []) if loop is None else loop.code(size, policy)
    codes = [code] if code else []
    if loop is None or is_called_besides:
        own = "self, " if callee.library == "flax.linen" else ""
        codes.append(_call("group", callee, policy))
        comments.append(f"group({own}...): {size} of these calls with what is between them")
    return _commented(codes, comments)


def _commented(codes: Iterable[str], comments: Iterable[str]) -> str:
    """What to write at one place or another, and what is to be said of it."""
    comment = "; ".join(filter(None, comments))
    return "; ".join(codes) + (f"  # {comment}" if comment else "")


def _call(function: str, callee: CalledFunction, policy: str, static: Sequence[int] = ()) -> str:
    return f"{_CHECKPOINTS.get(callee.library, 'jax.checkpoint')}({function}{_options(policy, static)})"


def _options(policy: str, static: Sequence[int]) -> str:
    """The further arguments of a checkpoint."""
    options = f", policy={policy}" if policy else ""
    return f"{options}, static_argnums={tuple(static)}" if static else options


def _instance(cls: str, method: str) -> str:
    """What stands in code for an object of a class, or for a method of it."""
    variable = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls).lower()
    return variable if method == "__call__" else f"{variable}.{method}"


# -------------------------------------------------------------------------------------------------------------- places


_KEY = re.compile(
    r"(?P<name>.+?)(?P<slice>\[(-?\d*):(-?\d*)(?::(-?\d*))?\])?(?:/(?P<group>\d+)| in (?P<parts>[1-9]\d*))?"
)


@dataclass(frozen=True, slots=True)
class Where:
    """Which calls of a function have a checkpoint: ``calls`` of those in the order of the program.

    One is around ``group`` of them after one another, or around each of so many ``parts`` of a call (0: it is whole).
    ``decorated``: they have one already.
    """

    callee: CalledFunction
    calls: slice = field(default_factory=lambda: slice(None))
    group: int = 1
    decorated: bool = False
    parts: int = 0


@dataclass(frozen=True, slots=True)
class PossibleSites:
    """The places of a program that have no checkpoint, each as a site, and the functions by their keys: ``callees``.

    ``decorated`` are those that have a checkpoint, by the keys of their sites; ``loops`` by key of either kind the loop
    that makes one call in each step, the longest of several; ``besides`` the keys of either kind of which there are
    calls that no such loop makes; ``groups`` steps of these loops that are worth a checkpoint around them, as sites.
    """

    sites: tuple[Site, ...]
    callees: Mapping[str, CalledFunction]
    decorated: Mapping[str, CalledFunction]
    loops: Mapping[str, CallingLoop]
    besides: frozenset[str]
    groups: tuple[Site, ...]

    def where(self, key: str) -> Where | None:
        """What a key asks for, where that can be; None where it is of no such place."""
        if key in self.decorated:
            return None
        if key in self.callees:
            return Where(self.callees[key])
        match = _KEY.fullmatch(key)
        name = match["name"] if match else ""
        callee = self.decorated.get(name) or self.callees.get(name)
        if match is None or callee is None:
            return None
        chosen = slice(None)
        if match["slice"]:
            chosen = slice(*(int(text) if text else None for text in match["slice"][1:-1].split(":")))
        group = int(match["group"] or 1)
        if group < 1 or chosen.step == 0:
            raise RematError(f"at={key!r}: a step, or a number of calls in a group, is 1 at least.")
        if name in self.decorated and match["slice"]:  # their calls share one trace, which does not tell them apart
            raise RematError(
                f"at={key!r}: {name} has a checkpoint of its own: choose all of its calls, or groups of them."
            )
        return Where(callee, chosen, group, name in self.decorated, int(match["parts"] or 0))

    def code(self, key: str, policy: str = "") -> str:
        """What to write for a checkpoint at a place; arguments are those of ``where`` and ``code_of``."""
        where = self.where(key)
        assert where is not None
        if where.group > 1:
            name = _KEY.fullmatch(key)["name"]  # pyright: ignore[reportOptionalSubscript] - `where` matched
            return code_of_group(where.callee, where.group, self.loops.get(name), name in self.besides, policy)
        return code_of(where.callee, policy) if key in self.callees else code_of_calls(where.callee, policy, key)


class Intervals:
    """The intervals of a program's jaxprs that a checkpoint can be put around. Reads each jaxpr once."""

    def __init__(self, closed: Any, calls: Calls) -> None:
        self._root = _jax.open_jaxpr(closed)
        self._calls = calls
        self._spans = Spans()
        self._of: dict[int, tuple[Any, list[Interval]]] = {}
        self._decorated: dict[int, tuple[Any, list[Interval]]] = {}

    def of(self, jaxpr: Any, around: Any = None) -> list[Interval]:
        """Those of an open jaxpr, which is the body of the equation ``around``; outer ones first."""
        cached = self._of.get(id(jaxpr))
        if cached is None:
            cached = self._of[id(jaxpr)] = jaxpr, self._find(jaxpr, around)
        return cached[1]

    def _find(self, jaxpr: Any, around: Any) -> list[Interval]:
        intervals = self._calls.of(jaxpr)
        is_decorated = around is not None and (_jax.is_checkpoint(around) or _jax.is_jit(around))
        if jaxpr is self._root or is_decorated:  # the function itself, or one that is a place by its equation
            intervals = [interval for interval in intervals if (interval.first, interval.last) != (0, len(jaxpr.eqns))]
        for number, eqn in enumerate(jaxpr.eqns):
            callee = self._jitted(eqn)
            if callee is not None and len(jaxpr.eqns) > (jaxpr is self._root):
                intervals.append(_alone(callee, eqn, number))
        intervals = [interval for interval in intervals if self._can_have_checkpoint(jaxpr, interval)]
        return sorted(intervals, key=lambda interval: (interval.first, -interval.last))

    def decorated(self, jaxpr: Any) -> list[Interval]:
        """The calls in a jaxpr that have a checkpoint already, each of one equation."""
        cached = self._decorated.get(id(jaxpr))
        if cached is None:
            calls = list[Interval]()
            for number, eqn in enumerate(jaxpr.eqns):
                if _jax.is_checkpoint(eqn):
                    seen, who = self._seen(_jax.checkpoint_body(eqn)), identity(eqn, self._spans)
                    calls.append(_alone(CalledFunction(who, parameters=seen.parameters if seen else ()), eqn, number))
            cached = self._decorated[id(jaxpr)] = jaxpr, calls
        return cached[1]

    def _seen(self, body: Any) -> CalledFunction | None:
        """The function that was seen to make all of a body."""
        count = len(_jax.open_jaxpr(body).eqns)
        return next((call.callee for call in self._calls.of(body) if call.last - call.first == count), None)

    def _jitted(self, eqn: Any) -> CalledFunction | None:
        """The function of the user's own that an equation is the jitted call of."""
        if not _jax.is_jit(eqn):
            return None
        (body,) = _jax.bodies(eqn)
        name, file, line = _jax.function_name(body.jaxpr)
        if seen := self._seen(body.jaxpr):
            return seen
        return CalledFunction((name, file, line)) if file and line and is_user_file(file) else None

    def _can_have_checkpoint(self, jaxpr: Any, interval: Interval) -> bool:
        eqns = jaxpr.eqns[interval.first : interval.last]
        return interval.callee.who not in self._calls.elsewhere and not any(map(_jax.writes_to_inputs, eqns))


def _alone(callee: CalledFunction, eqn: Any, number: int) -> Interval:
    """The interval of a call that is one equation, by what JAX calls what that takes."""
    names = (re.split(r"[\[.]", name)[0] for name in _jax.argument_names(_jax.bodies(eqn)[0].jaxpr))
    given = {atom: name for atom, name in zip(eqn.invars, names, strict=False) if name and not _jax.is_literal(atom)}
    return Interval(callee, number, number + 1, given, tuple(eqn.outvars), True)


def is_walked(eqn: Any) -> bool:
    """Whether places are looked for inside an equation."""
    return not _jax.is_custom_rule(eqn)  # what the rules of custom derivatives do is Python


SHORTEST = 4
"""Steps: of fewer there is nothing to nest."""

_Place = tuple[Identity, bool]
"""A function, and whether its calls have a checkpoint."""


class _Looped:
    """Which places stand once in each step of a loop.

    Attributes:
        longest: by place the longest loop that makes one call in each step.
        worth_grouping: by place such a loop whose steps are worth a checkpoint around several, as that place takes up
            most of them, and how many steps run in all.
        besides: the places of which there are calls that no such loop makes.
    """

    def __init__(self) -> None:
        self.longest: dict[_Place, CallingLoop] = {}
        self.worth_grouping: dict[_Place, tuple[CallingLoop, int]] = {}
        self.besides: set[_Place] = set()

    def add(self, scope: Scope, intervals: Iterable[tuple[Interval, bool]]) -> None:
        """Take in the calls in a jaxpr, each with whether it has a checkpoint."""
        calls = defaultdict[_Place, list[Interval]](list)
        for interval, decorated in intervals:
            calls[interval.callee.who, decorated].append(interval)
        around = scope.eqn
        if around is None or not _jax.is_scan(around):
            self.besides.update(calls)
            return
        alone = {place: intervals[0] for place, intervals in calls.items() if len(intervals) == 1}
        self.besides.update(calls.keys() - alone.keys())
        for place, interval in alone.items():
            loop = CallingLoop.of(around, interval.callee)
            self.longest[place] = max(loop, self.longest.get(place, CallingLoop()), key=lambda loop: loop.length)
        if alone:
            place, widest = max(
                alone.items(), key=lambda item: (item[1].last - item[1].first, "<" not in item[1].callee.who[0])
            )
            if CallingLoop.of(around, widest.callee).length >= SHORTEST:
                _, steps = self.worth_grouping.get(place, (CallingLoop(), 0))
                self.worth_grouping[place] = self.longest[place], steps + (scope.times or 0)


def _leaks(eqns: Sequence[Any], interval: Interval, last_read: Mapping[Any, int]) -> bool:
    """Whether something that the equations of a call make is read after it, and is known not to be returned."""
    later = {var for eqn in eqns for var in eqn.outvars if last_read.get(var, 0) >= interval.last}
    return interval.is_known and not later.issubset(interval.returned)


def possible_sites(closed: Any, calls: Calls, table: SiteTable) -> PossibleSites:
    """The places of a program, in the order of their first call; ``table`` has those with a checkpoint."""
    intervals, looped = Intervals(closed, calls), _Looped()
    times: dict[Identity, int | None] = {}
    callees: dict[Identity, CalledFunction] = {}
    for scope in scopes(closed, is_walked):
        jaxpr, around = scope.jaxpr, scope.eqn
        bare = intervals.of(jaxpr, around)
        last_read = last_reads(jaxpr.eqns, jaxpr.outvars)
        looped.add(scope, [*((call, True) for call in intervals.decorated(jaxpr)), *((call, False) for call in bare)])
        for interval in bare:
            who = interval.callee.who
            before = times.get(who, 0)
            times[who] = None if scope.times is None or before is None else before + scope.times
            callee = callees.setdefault(who, interval.callee)
            if callee.module in ("", "class") and not callee.within:
                eqns = jaxpr.eqns[interval.first : interval.last]
                within = within_library(eqns, who)
                # What a library's own checkpoint lets out, such as state, may leave a function of it.
                leaks = callee.leaks or (not within and _leaks(eqns, interval, last_read))
                callees[who] = replace(callee, within=within, leaks=leaks)
    site_keys = frozenset(table.keys.values())
    keys: dict[Identity, str] = {}
    for who, key in keys_of(tuple(times)).items():
        # A function may have a checkpoint in one place, and be called without one in another.
        keys[who] = f"{key} (without a checkpoint)" if key in site_keys else key
    key_of = {
        **{(who, False): key for who, key in keys.items()},
        **{(who, True): key for who, key in table.keys.items()},
    }
    groups = list[Site]()
    for (who, decorated), (loop, steps) in looped.worth_grouping.items():
        size = segment_of(loop.length)
        code = code_of_group(callees.get(who, CalledFunction(who)), size, loop, (who, decorated) in looped.besides)
        groups.append(_site(f"{key_of[who, decorated]}/{size}", who, math.ceil(steps / size), code))
    return PossibleSites(
        tuple(_site(keys[who], who, count or 0, code_of(callees[who])) for who, count in times.items()),
        {keys[who]: callees[who] for who in times},
        {key: CalledFunction(who) for who, key in table.keys.items()},
        {key_of[place]: loop for place, loop in looped.longest.items() if place in key_of},
        frozenset(key_of[place] for place in looped.besides if place in key_of),
        tuple(groups),
    )


def _site(key: str, who: Identity, times: int, code: str) -> Site:
    name = who[0].rpartition(".")[2]
    return Site(key, who[0], times, "", definition((name, *who[1:])), possible=True, code=code)


def segment_of(length: int) -> int:
    """Steps a segment: near the square root, and a divisor of the length if one is within a factor of two of it."""
    root = math.sqrt(length)
    near = [n for n in range(2, length) if length % n == 0 and root / 2 <= n <= root * 2]
    return min(near, key=lambda n: abs(math.log(n / root)), default=round(root))
