"""What is saved for the backward pass, where each value comes from and who needs it; and what is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import _jax
from remat_magic.engine.halves import Forward
from remat_magic.facts.cost import Cost
from remat_magic.jaxprs.provenance import Provenance, Provenances, marks_on
from remat_magic.jaxprs.rewriting import is_given
from remat_magic.jaxprs.walk import LiveEquations, Maker, Scope, dependents, leaves, makers, readers, walk
from remat_magic.records import Equation, Kind, Origin, Reader, Residual


@dataclass(frozen=True, slots=True)
class Saved:
    """One saved value: its variable in the forward jaxpr and the residual outputs that carry it."""

    atom: Any
    leaves: tuple[int, ...]


def saved_values(forward: Any, outputs: int) -> list[Saved]:
    """The saved values in the order in which JAX lists them: literals, constants, arguments, intermediates.

    Same as ``jax.ad_checkpoint.print_saved_residuals``: a value saved twice counts once, and ``reduce_precision``
    (which JAX puts on every residual) is looked through. The first ``outputs`` outputs of the forward jaxpr are the
    function's, the others the residuals.
    """
    jaxpr = _jax.open_jaxpr(forward)
    through = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if _jax.is_rounding(eqn)}
    literals: list[Saved] = []
    leaves: dict[Any, list[int]] = {}
    for leaf, atom in enumerate(jaxpr.outvars[outputs:]):
        if not _jax.is_literal(atom):
            while not _jax.is_literal(atom) and atom in through:
                atom = through[atom]
        if _jax.is_literal(atom):
            literals.append(Saved(atom, (leaf,)))
        else:
            leaves.setdefault(atom, []).append(leaf)
    bound = [
        *jaxpr.constvars,
        *jaxpr.invars,
        *(var for eqn in jaxpr.eqns for var in eqn.outvars),
    ]
    return literals + [Saved(var, tuple(leaves[var])) for var in bound if var in leaves]


def locate(provenances: Provenances, scope: Scope, eqn: Any) -> Provenance:
    """The primal place of an equation, else what its own traceback and nesting tell."""
    path, times = scope.nesting
    provenance = provenances.of(eqn, scope.chain)
    if provenance is not None:
        # JAX hoists what does not change out of a loop: where an equation stands now says how often it runs.
        return provenance if provenance.times == times else replace(provenance, times=times)
    frames = provenances.spans.frames(_jax.traceback_of(eqn))
    here: Scope | None = scope
    while frames.source is None and here is not None and here.eqn is not None:
        outer = provenances.of(here.eqn, here.parent.chain if here.parent else ())
        frames = frames.inside(outer.frames if outer else provenances.spans.frames(_jax.traceback_of(here.eqn)))
        here = here.parent
    return Provenance("", "", frames, path, times, ())


def _origin(provenances: Provenances, maker: Maker, arguments: Sequence[str]) -> Origin:
    name = next((name for name in maker.names if not is_given(name)), None)
    if maker.eqn is None:
        path, times = maker.scope.nesting
        argument = arguments[maker.argument] if maker.argument is not None else None
        return Origin("", None, path, times, name, argument)
    place = locate(provenances, maker.scope, maker.eqn)
    return Origin(_jax.primitive_name(maker.eqn), place.source, place.path, place.times, name, library=place.library)


def _kind(atom: Any, top: Scope, made_by: Sequence[Maker]) -> Kind:
    if _jax.is_literal(atom):
        return "literal"
    if atom in top.inputs:
        return "argument"
    if atom in top.constants:
        return "constant"
    if _jax.memory_space(atom.aval):
        return "offloaded"
    if made_by and not any(maker.copied for maker in made_by):
        if all(maker.argument is not None for maker in made_by):
            return "argument"
        if all(maker.eqn is None and maker.argument is None for maker in made_by):
            return "constant"
    return "intermediate"


def residuals(
    half: Forward, saved: Sequence[Saved], provenances: Provenances, arguments: Sequence[str]
) -> tuple[Residual, ...]:
    """The residuals of a forward half without ``needed_by``; ``arguments`` are the names of its inputs."""
    top = Scope(_jax.open_jaxpr(half.closed))
    types: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the identity of the type, which stays alive so
    rows: list[Residual] = []
    for value in saved:
        made_by = makers(top, value.atom)
        kind = _kind(value.atom, top, made_by)
        origins = tuple(dict.fromkeys(_origin(provenances, maker, arguments) for maker in made_by))
        first = origins[0] if origins else Origin("")
        aval = half.type_of(value.atom)
        if id(aval) not in types:
            types[id(aval)] = aval, _as_held(aval)
        rows.append(
            Residual(
                **types[id(aval)][1],
                kind=kind,
                primitive=first.primitive,
                name=first.name,
                argument=first.argument,
                source=first.source,
                library=first.library,
                path=first.path,
                times=first.times,
                origins=origins,
            )
        )
    return tuple(rows)


def _as_held(aval: Any) -> dict[str, Any]:
    """What a residual has from its type."""
    text = _jax.type_text(aval)
    return {
        "dtype": text[: text.index("[")],
        "shape": tuple(int(size) for size in getattr(aval, "shape", ())),
        "nbytes": _jax.nbytes(aval),
        "memory_space": _jax.memory_space(aval),
        "replicated": _jax.is_replicated(aval),
        "sharding": _jax.sharding_text(aval, text),
        "shard_shape": tuple(int(size) for size in getattr(_jax.of_one_device(aval), "shape", ())),
    }


def needed_by(
    backward: Scope,
    saved: Sequence[Saved],
    provenances: Provenances,
    live: Callable[[Any], bool],
    recomputing: Callable[[Any], bool],
    gradients: Sequence[str],
) -> list[tuple[Reader, ...]]:
    """For each saved value the operations of the backward pass that read it, each kind of reader once.

    The first inputs of ``backward`` are the residual leaves, ``gradients`` the argument of each of its outputs.
    ``live`` tells an equation that matters from dead code, ``recomputing`` whether one recomputes a forward value.
    """
    rows: list[tuple[Reader, ...]] = []
    known: dict[tuple[int, int], Reader] = {}
    for value in saved:
        readers_of_value: dict[Reader, None] = {}
        for leaf in value.leaves:
            for scope, eqn in readers(backward, backward.jaxpr.invars[leaf], live):
                key = id(scope), id(eqn)
                if key not in known:
                    place = provenances.of(eqn, scope.chain)
                    where = place or locate(provenances, scope, eqn)
                    known[key] = Reader(
                        _jax.primitive_name(eqn),
                        place.label if place else "",
                        where.source,
                        where.path,
                        recomputing(eqn),
                        ", ".join(gradients[output] for output in _becomes(scope, eqn, live)),
                    )
                readers_of_value.setdefault(known[key])
        rows.append(tuple(readers_of_value))
    return rows


def _becomes(scope: Scope, eqn: Any, live: Callable[[Any], bool]) -> list[int]:
    """The outputs of the program that the results of an equation are, moved, cast and summed up, and no more."""
    found, seen = set[int](), set[tuple[int, int]]()
    todo = [(scope, var) for var in eqn.outvars]
    while todo:
        here, value = todo.pop()
        if (id(here), id(value)) in seen:
            continue
        seen.add((id(here), id(value)))
        if here.parent is None and value in here.outputs:
            found |= {number for number, out in enumerate(here.jaxpr.outvars) if out is value}
        todo += here.after.get(value, ())
        for reader, operand in here.readers.get(value, ()):
            if not live(reader):
                continue
            entered = [(inner, var) for inner in here.inner(reader) for var in inner.entered_by.get(operand, ())]
            if entered:
                todo += entered
            elif _jax.is_transparent(reader):
                todo.append((here, reader.outvars[operand if len(reader.outvars) == len(reader.invars) else 0]))
            elif _jax.moves_or_adds(reader):
                todo += [(here, var) for var in reader.outvars]
            else:
                return []
    return sorted(found)


# ---------------------------------------------------------------------------------------- what is computed again
# An operation of a backward pass computes a forward value again, or for the first time.

# How far back operands are compared. One step tells apart what the derivatives of 25 functions of JAX's do (powers,
# softplus, decompositions, special functions); layers that add to one stream are a chain as long as the model, and each
# would be compared with all before it.
_DEEP = 8


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The branches that a scope stands in (see ``Equation``), and how often a device runs it at least."""

    branches: tuple[tuple[int, int, int], ...] = ()
    runs: int = 1


class Recomputation:
    """What a backward jaxpr recomputes, judged against the forward jaxpr of the same policy."""

    def __init__(self, forward: Any, backward: Any, provenances: Provenances, residuals: int) -> None:
        self._residuals = residuals
        self._on_cotangents: set[tuple[int, int]] | None = None
        self.top = Scope(_jax.open_jaxpr(backward))
        self.live = LiveEquations(self.top.jaxpr)
        self._provenances = provenances
        # By the identity of the equation, since a body that several calls share does the same in each.
        self._forward: dict[int, dict[int, tuple[Scope, Any]]] = {}
        for scope, eqn in walk(forward, once=True):
            if not scope.inner(eqn):
                self._forward.setdefault(id(_jax.traceback_of(eqn)), {})[id(eqn)] = (scope, eqn)
        self._in_rules = [
            (scope, eqn, rule)
            for scope, eqn in (walk(forward, once=True) if provenances.rules else ())
            if not scope.inner(eqn) and (rule := self._rule_of(scope, eqn)) is not None
        ]
        self._told_apart: set[int] = set()
        self._looked_up = 0  # how often an equation was looked up among readers of cotangents: calls may differ in it
        self._known: dict[tuple[int, bool, int], _Entries] = {}
        self._surroundings = {id(self.top): Surroundings()}
        self._conditionals: dict[tuple[int, int], tuple[int, int]] = {}  # by the identity of the scope and equation
        self._copies: Counter[int] = Counter()
        self.equations = tuple(_expanded(self.top, self._find(self.top, False, 0)))
        self.kinds: dict[int, bool] = {}
        for scope, eqn in self.equations:
            if id(eqn) not in self.kinds:
                self.kinds[id(eqn)] = self._ran_forward(scope, eqn) or self._ran_in_rule(scope, eqn)

    def __call__(self, eqn: Any) -> bool:
        """Whether an equation of the backward jaxpr is recomputation."""
        return id(eqn) in self.kinds

    def repeated(self, eqn: Any) -> bool:
        """Whether a recomputed operation also ran in the forward pass."""
        return self.kinds[id(eqn)]

    def surroundings(self, scope: Scope) -> Surroundings:
        """What is around the equations of a scope of the backward jaxpr."""
        around = self._surroundings.get(id(scope))
        if around is None:
            assert scope.parent is not None
            assert scope.body is not None
            outer = self.surroundings(scope.parent)
            branches, times = outer.branches, 1 if scope.body.times is None else scope.body.times
            if scope.body.kind == "branch":
                branches += ((*self._conditional(scope), scope.parent.inner(scope.eqn).index(scope)),)
            around = Surroundings(branches, outer.runs * times)
            self._surroundings[id(scope)] = around
        return around

    def _conditional(self, branch: Scope) -> tuple[int, int]:
        """The number of a conditional in the function, and which of the copies of it this one is."""
        assert branch.parent is not None
        key = (id(branch.parent), id(branch.eqn))
        if key not in self._conditionals:
            provenance = self._provenances.of(branch.eqn, branch.parent.chain)
            number = provenance.number or 0 if provenance else 0
            self._conditionals[key] = number, self._copies[number]
            self._copies[number] += 1
        return self._conditionals[key]

    def _find(self, scope: Scope, inside: bool, marks: int) -> _Entries:
        """The recomputed equations of a scope, found once for a body that several calls share."""
        key = (id(scope.jaxpr), inside, marks)
        if key in self._known:
            return self._known[key]
        before = self._looked_up
        entries: _Entries = []
        for eqn in scope.jaxpr.eqns:
            if not self.live(eqn):
                continue
            # r2 marks the equation or one around it in the name stack, on top of the marks that the primal program has
            # itself; r3 keeps a checkpoint around what it redoes.
            total = marks + marks_on(eqn)
            here = inside or _jax.is_high_checkpoint(eqn)
            if not here and total:
                fewest, most = self._provenances.marks(eqn)
                # Between the two, an equation can stem from one that the program itself rematerialises (its derivative
                # then reads a cotangent) or from one that it does not.
                here = total > most or (total > fewest and not self._reads_cotangent(scope, eqn))
            deeper = scope.inner(eqn)
            for number, inner in enumerate(deeper):
                within = self._find(inner, here, total)
                if within:
                    entries.append((eqn, number, within))
            if here and not deeper and not _jax.is_transparent(eqn):
                entries.append((eqn, None, []))
        if self._looked_up == before:
            self._known[key] = entries
        return entries

    def _reads_cotangent(self, scope: Scope, eqn: Any) -> bool:
        self._looked_up += 1
        if self._on_cotangents is None:
            self._on_cotangents = dependents(self.top, self.top.jaxpr.invars[self._residuals :])
        return (id(scope), id(eqn)) in self._on_cotangents

    def _rule_of(self, scope: Scope, eqn: Any) -> int | None:
        """The call of a custom derivative that an equation is of: of its function, or of a rule of it.

        What a rule makes has the traceback of the call.
        """
        rules, traceback = self._provenances.rules, id(_jax.traceback_of(eqn))
        if traceback in rules:
            return traceback
        place = self._provenances.of(eqn, scope.chain) if rules else None
        return next((link for link in reversed(place.chain) if link in rules), None) if place else None

    def _ran_in_rule(self, scope: Scope, eqn: Any) -> bool:
        """Whether the forward half does the same in that call: a rule may have other text than its function."""
        rule = self._rule_of(scope, eqn)
        return rule is not None and any(
            place == rule and _same_operation(scope, eqn, there, other, self._rule_of)
            for there, other, place in self._in_rules
        )

    def by_rules(self) -> Iterator[tuple[Scope, Any]]:
        """What backward rules of custom derivatives run again of the forward half, whatever the policy."""
        if not self._provenances.has_backward_rules:
            return
        recomputed = {(id(scope), id(eqn)) for scope, eqn in self.equations}

        def rule_of(scope: Scope, eqn: Any) -> int | None:
            rule = self._rule_of(scope, eqn)  # what the policy recomputes is to a rule as if it were saved
            again = rule is not None and any((id(there), id(leaf)) in recomputed for there, leaf in leaves(scope, eqn))
            return None if again else rule

        ran: dict[int | None, dict[Hashable, tuple[Scope, Any]]] = {}
        for there, other, rule in self._in_rules:
            ran.setdefault(rule, {}).setdefault(_signature(there, other, rule_of), (there, other))
        for scope, eqn in walk(self.top, self.live):
            leaf = self.live(eqn) and not scope.inner(eqn) and not _jax.is_transparent(eqn)
            candidates = ran.get(rule_of(scope, eqn), {}).values() if leaf else ()
            ran_before = any(_same_operation(scope, eqn, *candidate, rule_of) for candidate in candidates)
            if ran_before and not self._reads_cotangent(scope, eqn):
                yield scope, eqn

    def _ran_forward(self, scope: Scope, eqn: Any) -> bool:
        traceback = id(_jax.traceback_of(eqn))
        candidates = self._forward.get(traceback, {})
        if len(candidates) > _FEW and traceback not in self._told_apart:
            # Of a body that JAX inlined for each of its calls there are as many copies, of which one will do.
            self._told_apart.add(traceback)
            distinct = {_signature(*candidate): candidate for candidate in candidates.values()}
            candidates = self._forward[traceback] = {id(other): (there, other) for there, other in distinct.values()}
        return any(_same_operation(scope, eqn, there, other) for there, other in candidates.values())

    def records(self, cost: Callable[[Any], Cost]) -> tuple[Equation, ...]:
        """The recomputed operations as plain data, of what one run of each costs."""
        rows: list[Equation] = []
        known: dict[tuple[Any, ...], Equation] = {}  # most are alike in all calls of a body
        for scope, eqn in self.equations:
            place, around = locate(self._provenances, scope, eqn), self.surroundings(scope)
            key = id(eqn), id(place.source), id(place.library), place.path, place.times, around.branches, around.runs
            if key not in known:
                price, runs = cost(eqn), around.runs
                talk = _jax.communication(eqn) if price.communicated else None
                known[key] = Equation(
                    primitive=_jax.primitive_name(eqn),
                    outputs=tuple(_jax.type_text(var.aval) for var in eqn.outvars),
                    flops=None if price.uncosted else price.flops * runs,
                    bytes=None if price.uncosted else price.bytes * runs,
                    times=place.times,
                    source=place.source,
                    library=place.library,
                    path=place.path,
                    repeated=self.repeated(eqn),
                    name=_name_given(scope, eqn),
                    branches=around.branches,
                    communicated_bytes=price.communicated * runs,
                    sent_bytes=price.sent * runs,
                    collective="" if talk is None else talk.kind,
                    over=() if talk is None else talk.over,
                )
            rows.append(known[key])
        return tuple(rows)


_Entries = list[tuple[Any, int | None, list[Any]]]
"""Recomputed equations, and for those that hold others the number of the body with the entries in it."""


def _expanded(scope: Scope, entries: _Entries) -> Iterator[tuple[Scope, Any]]:
    for eqn, number, within in entries:
        if number is None:
            yield scope, eqn
        else:
            yield from _expanded(scope.inner(eqn)[number], within)


def _traceback(_: Scope, eqn: Any) -> int:
    return id(_jax.traceback_of(eqn))


def _same_operation(
    scope: Scope,
    eqn: Any,
    there: Scope,
    other: Any,
    call: Callable[[Scope, Any], int | None] = _traceback,
    depth: int = _DEEP,
) -> bool:
    """Whether two equations of one traceback, or ``call``, are the same operation, and not one the other's derivative.

    The derivative of ``pow`` is a ``pow`` of the same traceback and parameters, so the operands decide: where an
    operation of that traceback makes one (the exponent less one), the same operation must make its counterpart.
    """
    if eqn.primitive is not other.primitive or len(eqn.invars) != len(other.invars):
        return False
    if [var.aval for var in eqn.outvars] != [var.aval for var in other.outvars]:
        return False
    calls = _called(scope, eqn), _called(there, other)
    if calls[0] != calls[1] or not (calls[0] or _jax.same_params(eqn, other)):
        return False
    place = call(scope, eqn)
    for operand, other_operand in zip(eqn.invars, other.invars, strict=True):
        if _jax.is_literal(operand) or _jax.is_literal(other_operand):
            if _jax.is_literal(operand) and _jax.is_literal(other_operand) and str(operand) != str(other_operand):
                return False
            continue
        maker = scope.makers.get(operand) if depth else None
        if maker is None or call(scope, maker[0]) != place:
            continue  # came from elsewhere, or was saved: nothing to compare
        if _jax.is_transparent(maker[0]):
            continue
        other_maker = there.makers.get(other_operand)
        if other_maker is None or call(there, other_maker[0]) != place:
            return False
        if not _same_operation(scope, maker[0], there, other_maker[0], call, depth - 1):
            return False
    return True


_FEW = 4


def _signature(
    scope: Scope, eqn: Any, call: Callable[[Scope, Any], int | None] = _traceback, depth: int = _DEEP
) -> Hashable:
    """All of an equation that another is compared with by ``_same_operation``."""
    place = call(scope, eqn)
    operands: list[Hashable] = []
    for operand in eqn.invars:
        maker = None if _jax.is_literal(operand) or not depth else scope.makers.get(operand)
        if _jax.is_literal(operand):
            operands.append(str(operand))
        elif maker is None or call(scope, maker[0]) != place:
            operands.append(None)
        else:
            operands.append((_jax.is_transparent(maker[0]), _signature(scope, maker[0], call, depth - 1)))
    key = _called(scope, eqn) or _jax.params_key(eqn)
    return eqn.primitive, tuple(var.aval for var in eqn.outvars), key, tuple(operands)


def _called(scope: Scope, eqn: Any) -> tuple[str, ...]:
    """What is done inside an equation, by name: a rule that is traced anew has jaxprs of its own."""
    return tuple(_jax.primitive_name(leaf) for _, leaf in leaves(scope, eqn) if leaf is not eqn)


def _name_given(scope: Scope, eqn: Any) -> str | None:
    todo = list(eqn.outvars)
    for var in todo:
        for reader, _ in scope.readers.get(var, ()):
            name = _jax.checkpoint_name_of(reader)
            if is_given(name):  # a plan's name: the program's own may follow
                todo += reader.outvars
            elif name is not None:
                return name
    return None
