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


def _checkpoint_of(library: str) -> str:
    """What a library has for ``jax.checkpoint``; JAX's own where it has none."""
    usual, _, name = libraries.CHECKPOINTS.get(library, ("jax", "", "checkpoint"))
    return f"{usual}.{name}"


@dataclass(frozen=True, slots=True)
class CallingLoop:
    """A loop that makes a call in each step."""

    length: int
    function: str
    module: str
    kind: str
    has_inputs: bool
    has_outputs: bool
    lower: str
    is_reversed: bool

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
        """The code of a checkpoint around so many steps, such as a scan of scans, and comments on it.

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
            code = f"{scan}({_checkpoint_of(self.module)}({inner}{options}), ...)"
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
    checkpoint, options = _checkpoint_of(callee.module), _options(policy, _positions(static))
    written = f"@functools.partial({checkpoint}{options})" if options else f"@{checkpoint}"
    where = f"{'above other decorators ' if callee.module == 'flax.linen' else ''}on {name}"
    # Of nnx it gives all by position, what has its default too.
    return _commented(
        [written], [where, "" if callee.module == "flax.nnx" else _by_position(static), _leaks_comment(callee)]
    )


def _positions(static: Iterable[tuple[int | None, str]]) -> list[int]:
    return [position for position, _ in static if position is not None]


def _by_position(static: Iterable[tuple[int | None, str]]) -> str:
    """The comment on the calls of a function with static parameters; empty without any."""
    names = [name for position, name in static if position is not None]
    return f"its calls give {' and '.join(names)} by position" if names else ""


def _leaks_comment(callee: CalledFunction) -> str:
    """The comment on a function that leaves something unreturned; empty for another."""
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


def code_of_group(place: Place, size: int, policy: str = "") -> str:
    """What to write for a checkpoint around so many calls after one another, in loops and elsewhere."""
    code, comments = ("", []) if place.loop is None else place.loop.code(size, policy)
    codes = [code] if code else []
    if place.loop is None or place.is_besides:
        own = "self, " if place.callee.library == "flax.linen" else ""
        codes.append(_call("group", place.callee, policy))
        comments.append(f"group({own}...): {size} of these calls with what is between them")
    return _commented(codes, comments)


def _commented(codes: Iterable[str], comments: Iterable[str]) -> str:
    """Codes with comments behind them: ``code; code  # comment; comment``."""
    comment = "; ".join(filter(None, comments))
    return "; ".join(codes) + (f"  # {comment}" if comment else "")


def _call(function: str, callee: CalledFunction, policy: str, static: Sequence[int] = ()) -> str:
    return f"{_checkpoint_of(callee.library)}({function}{_options(policy, static)})"


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


@dataclass(slots=True, eq=False)
class Place:
    """A function, and what is known of its calls that have a checkpoint, or of those that have none.

    ``times`` is how often it is called, None where that is not known; ``loop`` the longest that makes one call in each
    step, and ``is_besides``: there are calls that no loop makes. Of loops whose steps are worth a checkpoint around
    several, as this takes up most of them, ``steps`` run in all.
    """

    callee: CalledFunction
    decorated: bool
    times: int | None = 0
    loop: CallingLoop | None = None
    is_besides: bool = False
    steps: int = 0

    def add(self, scope: Scope, calls: Sequence[Interval]) -> None:
        """Take in the calls that stand in one jaxpr."""
        for _ in calls:
            self.times = None if scope.times is None or self.times is None else self.times + scope.times
        if scope.eqn is None or not _jax.is_scan(scope.eqn) or len(calls) > 1:
            self.is_besides = True
            return
        loop = CallingLoop.of(scope.eqn, self.callee)
        if self.loop is None or loop.length > self.loop.length:
            self.loop = loop


@dataclass(frozen=True, slots=True)
class PossibleSites:
    """The places of a program that have no checkpoint, each as a site, and the functions by their keys: ``callees``.

    ``places`` are these and those that have a checkpoint, by key; ``groups`` steps of loops that are worth a checkpoint
    around them, as sites.
    """

    sites: tuple[Site, ...]
    callees: Mapping[str, CalledFunction]
    places: Mapping[str, Place]
    groups: tuple[Site, ...]

    def where(self, key: str) -> Where | None:
        """What a key asks for, where that can be; None where it is of no such place."""
        if key in self.places:
            return None if self.places[key].decorated else Where(self.callees[key])
        match = _KEY.fullmatch(key)
        name = match["name"] if match else ""
        if match is None or name not in self.places:
            return None
        place = self.places[name]
        chosen = slice(None)
        if match["slice"]:
            chosen = slice(*(int(text) if text else None for text in match["slice"][1:-1].split(":")))
        group = int(match["group"] or 1)
        if group < 1 or chosen.step == 0:
            raise RematError(f"at={key!r}: a step, or a number of calls in a group, is 1 at least.")
        if place.decorated and match["slice"]:  # their calls share one trace, which does not tell them apart
            raise RematError(
                f"at={key!r}: {name} has a checkpoint of its own: choose all of its calls, or groups of them."
            )
        return Where(place.callee, chosen, group, place.decorated, int(match["parts"] or 0))

    def code(self, key: str, policy: str = "") -> str:
        """What to write for a checkpoint at a place; arguments are those of ``where`` and ``code_of``."""
        where = self.where(key)
        assert where is not None
        if where.group > 1:
            name = _KEY.fullmatch(key)["name"]  # pyright: ignore[reportOptionalSubscript] - `where` matched
            return code_of_group(self.places[name], where.group, policy)
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
        writing = {number for number, eqn in enumerate(jaxpr.eqns) if _jax.writes_to_inputs(eqn)}
        intervals = [
            interval
            for interval in intervals
            if interval.callee.who not in self._calls.elsewhere
            and writing.isdisjoint(range(interval.first, interval.last))
        ]
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


def _leaks(eqns: Sequence[Any], interval: Interval, last_read: Mapping[Any, int]) -> bool:
    """Whether something that the equations of a call make is read after it, and is known not to be returned."""
    later = {var for eqn in eqns for var in eqn.outvars if last_read.get(var, 0) >= interval.last}
    return interval.is_known and not later.issubset(interval.returned)


def possible_sites(closed: Any, calls: Calls, table: SiteTable) -> PossibleSites:
    """The places of a program, in the order of their first call; ``table`` has those with a checkpoint."""
    intervals, found = Intervals(closed, calls), dict[tuple[Identity, bool], Place]()
    for scope in scopes(closed, is_walked):
        jaxpr = scope.jaxpr
        bare = intervals.of(jaxpr, scope.eqn)
        last_read = last_reads(jaxpr.eqns, jaxpr.outvars)
        here = defaultdict[Place, list[Interval]](list)
        for decorated, some in ((True, intervals.decorated(jaxpr)), (False, bare)):
            for call in some:
                who = call.callee.who
                callee = CalledFunction(who) if decorated else call.callee
                here[found.setdefault((who, decorated), Place(callee, decorated))].append(call)
        for place, some in here.items():
            place.add(scope, some)
            callee = place.callee
            for call in some if not place.decorated and callee.module in ("", "class") else ():
                within = callee.within or within_library(jaxpr.eqns[call.first : call.last], callee.who)
                # What a library's own checkpoint lets out, such as state, may leave a function of it.
                leaks = callee.leaks or (not within and _leaks(jaxpr.eqns[call.first : call.last], call, last_read))
                place.callee = callee = replace(callee, within=within, leaks=leaks)
        alone = [(place, some[0]) for place, some in here.items() if len(some) == 1]
        if alone and scope.eqn is not None and _jax.is_scan(scope.eqn) and _jax.scan_length(scope.eqn) >= SHORTEST:
            widest, _ = max(alone, key=lambda it: (it[1].last - it[1].first, "<" not in it[1].callee.who[0]))
            widest.steps += scope.times or 0
    site_keys = frozenset(table.keys.values())
    keys = keys_of(tuple(who for who, decorated in found if not decorated))
    # A function may have a checkpoint in one place, and be called without one in another.
    keys = {who: f"{key} (without a checkpoint)" if key in site_keys else key for who, key in keys.items()}
    places = {key: found.get((who, True), Place(CalledFunction(who), True)) for who, key in table.keys.items()}
    places |= {keys[who]: place for (who, decorated), place in found.items() if not decorated}
    groups = list[Site]()
    for (who, decorated), place in found.items():
        if place.steps and place.loop is not None:
            key, size = (table.keys if decorated else keys)[who], segment_of(place.loop.length)
            groups.append(_site(f"{key}/{size}", who, math.ceil(place.steps / size), code_of_group(place, size)))
    bare_places = {key: place for key, place in places.items() if not place.decorated}
    return PossibleSites(
        tuple(_site(key, it.callee.who, it.times or 0, code_of(it.callee)) for key, it in bare_places.items()),
        {key: place.callee for key, place in bare_places.items()},
        places,
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
