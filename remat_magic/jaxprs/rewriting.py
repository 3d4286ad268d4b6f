"""Writing a program anew, jaxpr by jaxpr: what policies, checkpoints, names and texts put into it goes this one way."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from remat_magic import _jax
from remat_magic.jaxprs.walk import walk


class Renamed(dict[Any, Any]):
    """The variables or literals that are read in the place of variables."""

    def atom(self, atom: Any) -> Any:
        """What is read in the place of a variable or literal: itself if it is not renamed."""
        return atom if _jax.is_literal(atom) else self.get(atom, atom)

    def reads(self, eqn: Any) -> bool:
        """Whether an equation reads one of the variables."""
        return bool(self) and any(not _jax.is_literal(atom) and atom in self for atom in eqn.invars)

    def reading(self, eqn: Any) -> Any:
        """An equation that reads what it is to read, itself where nothing of it is renamed."""
        return eqn.replace(invars=[*map(self.atom, eqn.invars)]) if self.reads(eqn) else eqn


class Rewriter:
    """Writes jaxprs anew, each once: bodies that several calls share stay shared.

    JAX's own caches are keyed by the jaxpr, and twelve copies of one block would be traced twelve times. Several closed
    jaxprs may hold one open jaxpr (jax 0.10: branches that are closed anew at each call), which stays one as well.
    """

    def __init__(self) -> None:
        self._done: dict[Hashable, tuple[Any, Any]] = {}  # keeps the old one, so that its identity stays its own

    def __call__(self, jaxpr: Any, write: Callable[[Any, Renamed], Iterable[Any]], *key: Hashable) -> Any:
        """A jaxpr, open or closed, with other equations; itself where nothing changes.

        ``write`` gives the equations of an open jaxpr anew, and puts down what is renamed by them; ``key`` tells apart
        what is written of one jaxpr.
        """
        old = _jax.open_jaxpr(jaxpr)
        if (id(jaxpr), *key) not in self._done:
            opened = self._done.get((id(old), *key))
            new = self._written(old, write) if opened is None else opened[1]
            self._done[id(old), *key] = old, new
            self._done[id(jaxpr), *key] = jaxpr, jaxpr if new is old else _jax.with_body(jaxpr, new)
        return self._done[id(jaxpr), *key][1]

    @staticmethod
    def _written(old: Any, write: Callable[[Any, Renamed], Iterable[Any]]) -> Any:
        renamed = Renamed()
        eqns = [*write(old, renamed)]
        if not renamed and len(eqns) == len(old.eqns) and all(a is b for a, b in zip(eqns, old.eqns, strict=True)):
            return old
        return _jax.replace_eqns(old, eqns, [*map(renamed.atom, old.outvars)])


def without_checks(jaxpr: Any) -> Any:
    """A program that calls no Python for equinox's ``error_if``: its checks find nothing. Itself where it has none."""
    rewriter = Rewriter()

    def write(old: Any, _: Renamed) -> Iterable[Any]:
        return [_jax.map_jaxprs(_jax.unchecked(eqn), lambda inner: rewriter(inner, write)) for eqn in old.eqns]

    return rewriter(jaxpr, write)


# --------------------------------------------------------------------------------------------------- every value named


PREFIX = "remat_magic/value "  # no name of a user's begins like this
COMPLEX = "complex values"
"""What JAX cannot save under a policy, among what names do not reach."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedValue:
    """A value that was given a name: the primal equation that makes it, with the output's index.

    A value that a loop carries in has no ``output``; its equation is the first of the loop's body. ``name`` is the name
    that the program itself gives it; ``in_rule`` tells that only the rule of a custom derivative makes it.
    """

    eqn: Any
    output: int | None
    aval: Any
    name: str | None = None
    in_rule: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class NamedProgram:
    """A program in which every candidate has a name of its own.

    ``values`` tells for each name what it was given to. ``rules`` has, for the identity of each call of a custom
    derivative, the jaxpr of its rule with names. ``fingerprint`` is equal for programs of the same operations, whatever
    their shapes. ``unreached`` tells where there are values without names here though a policy may keep them, or JAX
    without one (``COMPLEX``).
    ``perturbed`` has for each rule that was named, in program order, which operands had tangents.
    """

    closed: Any
    values: dict[str, NamedValue]
    rules: dict[int, Any]
    fingerprint: str
    unreached: tuple[str, ...] = ()
    perturbed: tuple[tuple[bool, ...], ...] = ()


def checkpoint_names(closed: Any) -> tuple[str, ...]:
    """The names that a program gives its values, in its order, each once."""
    names = (_jax.checkpoint_name_of(eqn) for _, eqn in walk(closed, once=True))
    return tuple(dict.fromkeys(name for name in names if name is not None))


def is_given(name: str | None) -> bool:
    """Whether a name is one that ``name_everything`` gave, and not the user's."""
    return name is not None and name.startswith(PREFIX)


def name_everything(
    closed: Any,
    within: Callable[[Any], bool] | None = None,
    *,
    rules: bool = True,
    differentiate: Callable[[], object] | None = None,
    like: NamedProgram | None = None,
) -> NamedProgram:
    """Name every value that a policy could save, also in calls, checkpoints, scans and shard_map.

    So are those in the rules of custom derivatives, which JAX differentiates a call by in the place of its jaxpr.
    Without jax_remat3 in force, checkpoints become those of JAX without it. ``within`` tells the checkpoint equations
    that a policy is chosen for, only in which values are named; None for a policy of the whole program. ``rules``: a
    policy reaches into the rules of custom derivatives; under jax_remat3 it does not. ``differentiate`` has JAX
    differentiate the program, called where it has not yet and what it asks a rule follows from that. ``like`` is the
    same program, named before: its rules had tangents of the same operands.
    """
    namer = _Namer(within or (lambda _: True), rules, differentiate, like)
    named = namer.jaxpr(closed, (), within is None)
    return NamedProgram(
        named,
        namer.values,
        namer.rules,
        namer.digest.hexdigest()[:16],
        tuple(sorted(namer.unreached)),
        tuple(namer.perturbed),
    )


class _Namer:
    def __init__(
        self,
        within: Callable[[Any], bool],
        rules: bool,
        differentiate: Callable[[], object] | None,
        like: NamedProgram | None,
    ) -> None:
        self.values: dict[str, NamedValue] = {}
        self.digest = hashlib.sha256()
        self.rules: dict[int, Any] = {}
        self.unreached: set[str] = set()
        self._next, self._in_rule = 0, False
        self._within, self._rules = within, rules
        self.perturbed: list[tuple[bool, ...]] = []
        self._differentiate, self._asked_before = differentiate, iter(() if like is None else like.perturbed)
        self._anew = Rewriter()

    def _name(self, like: Any, var: Any, output: int | None, own: str | None) -> tuple[Any, Any]:
        name = f"{PREFIX}{self._next}"
        self._next += 1
        self.values.setdefault(name, NamedValue(like, output, var.aval, own, self._in_rule))
        named = _jax.fresh_var(var)
        return named, _jax.name_equation(like, var, named, name)

    def jaxpr(self, jaxpr: Any, carried: Sequence[int], active: bool, tangents: Sequence[Any] = ()) -> Any:
        """The jaxpr with names, those of the invars ``carried`` included; where not ``active``, only in checkpoints.

        What is computed from ``tangents`` has no names: they are for the values that a derivative is of.
        """
        write = functools.partial(self._equations, carried=carried, active=active, tangents=tangents)
        return self._anew(jaxpr, write, active)

    def _equations(
        self, old: Any, renamed: Renamed, *, carried: Sequence[int], active: bool, tangents: Sequence[Any]
    ) -> Iterator[Any]:
        # What only carries an argument, a constant or a literal on is no value of its own.
        given = {*old.constvars, *(var for i, var in enumerate(old.invars) if i not in carried)}
        tangent = set(tangents)
        own = {
            eqn.invars[0]: name
            for eqn in old.eqns
            if (name := _jax.checkpoint_name_of(eqn)) is not None and not _jax.is_literal(eqn.invars[0])
        }
        for index in carried if active else ():
            var = old.invars[index]
            if old.eqns and self._is_choice(var):
                renamed[var], naming = self._name(old.eqns[0], var, None, own.get(var))
                yield naming
        for eqn in old.eqns:
            self.digest.update(_jax.primitive_name(eqn).encode() + b";")
            eqn = renamed.reading(eqn)
            if any(not _jax.is_literal(atom) and atom in tangent for atom in eqn.invars):
                tangent.update(eqn.outvars)
                if active:
                    self._pass_by(eqn, "the rules of custom derivatives")
                yield eqn
                continue
            yield self._inside(eqn, active)
            if _jax.is_transparent(eqn):
                given.update(
                    out
                    for out, atom in zip(eqn.outvars, eqn.invars, strict=False)
                    if _jax.is_literal(atom) or atom in given
                )
            for index, var in enumerate(eqn.outvars):
                named = var in given or _jax.checkpoint_name_of(eqn) is not None
                if active and not named and self._is_choice(var):
                    renamed[var], naming = self._name(eqn, var, index, own.get(var))
                    yield naming

    def _inside(self, eqn: Any, active: bool) -> Any:
        if _jax.is_checkpoint(eqn):
            body = self.jaxpr(_jax.checkpoint_body(eqn), (), active or self._within(eqn))
            if _jax.remat3():
                return _jax.replace_checkpoint(eqn, body, _jax.checkpoint_policy(eqn))
            return _jax.old_checkpoint(eqn, body)
        if active and _jax.is_custom_rule(eqn):
            return self._rule(eqn)
        if not (_jax.is_call(eqn) or _jax.is_scan(eqn) or _jax.is_shard_map(eqn)):
            if active or self._has_checkpoint(eqn):
                self._pass_by(eqn, "the branches of a conditional" if _jax.is_cond(eqn) else _jax.primitive_name(eqn))
            return eqn
        carried = _jax.carried_operands(eqn)
        return _jax.map_jaxprs(eqn, lambda body: self.jaxpr(body, carried, active))

    def _has_checkpoint(self, eqn: Any) -> bool:
        """Whether a checkpoint that is planned for stands inside an equation."""
        inner = (inner for body in _jax.bodies(eqn) for inner in body.jaxpr.eqns)
        return any(self._within(it) if _jax.is_checkpoint(it) else self._has_checkpoint(it) for it in inner)

    def _rule(self, eqn: Any) -> Any:
        """The call of a custom derivative, whose rule is differentiated no further: those inside it are plain calls."""
        where = "the rules of custom derivatives"
        if self._in_rule or not self._rules:
            self._pass_by(eqn, where)
            return eqn
        first, jaxprs = self._next, list[Any]()

        def named(rule: Any, inputs: int) -> Any:
            # Asked again for other tangents, the same values get the same names.
            after, anew = self._next, self._anew
            self._next, self._anew, self._in_rule = first, Rewriter(), True
            try:
                jaxprs.append(self.jaxpr(rule, (), True, rule.invars[inputs:]))
                return jaxprs[-1]
            finally:
                self._next, self._anew, self._in_rule = max(after, self._next), anew, False

        perturbed = self._perturbed(eqn)
        self.perturbed.append(perturbed)
        try:
            eqn = _jax.map_rule(eqn, named, perturbed)
            self.rules.update({id(eqn): jaxpr for jaxpr in jaxprs})
            return eqn
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - the rule's own, which differentiating tells of
            self._pass_by(eqn, where)
            return eqn

    def _perturbed(self, eqn: Any) -> tuple[bool, ...]:
        """Which operands of the next rule have tangents: all that can, where JAX does not say."""
        perturbed = next(self._asked_before, None) or _jax.perturbed_operands(eqn)
        if perturbed is None and self._differentiate is not None:
            differentiate, self._differentiate = self._differentiate, None
            differentiate()
            perturbed = _jax.perturbed_operands(eqn)
        return tuple(_jax.is_inexact(atom.aval) for atom in _jax.rule_inputs(eqn)) if perturbed is None else perturbed

    def _is_choice(self, var: Any) -> bool:
        """Whether a value can be saved by name; that complex values cannot be is taken down."""
        can_be_named = _can_be_named(var)
        if not can_be_named and not _jax.is_dropped(var) and _jax.is_inexact(var.aval):
            self.unreached.add(COMPLEX)
        return can_be_named

    def _pass_by(self, eqn: Any, where: str) -> None:
        """Take down that values inside an equation have no names, if there are any that a policy may keep."""
        inside = (var for body in _jax.bodies(eqn) for inner in body.jaxpr.eqns for var in inner.outvars)
        if not _jax.is_while(eqn) and any(map(_can_be_named, inside)):
            self.unreached.add(where)


def _can_be_named(var: Any) -> bool:
    """Whether a value can be saved by name: floating-point numbers, and masks and indices beside them."""
    if _jax.is_dropped(var) or getattr(var.aval, "shape", None) is None:
        return False
    # Complex values cannot be saved at all: JAX rounds what it saves by reduce_precision, which refuses them.
    kind = getattr(var.aval.dtype, "kind", "")
    return kind in ("b", "i", "u") or (not _jax.is_complex(var.aval) and _jax.is_inexact(var.aval))
