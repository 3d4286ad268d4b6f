"""Checkpoint sites: finding them, and writing a jaxpr anew with other policies at them."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from remat_magic import _jax
from remat_magic.jaxprs.provenance import Spans, cell_number
from remat_magic.jaxprs.rewriting import Renamed, Rewriter
from remat_magic.jaxprs.walk import Scope, walk
from remat_magic.libraries import class_name_in_linen, is_layer, names_modules
from remat_magic.policies import AS_WRITTEN, NO_CHECKPOINT
from remat_magic.records import Site, SourceSpan
from remat_magic.user_files import is_user_file

Identity = tuple[str, str, int]  # function name, file, line

PUT_AT = "remat_magic: checkpoint put at "
"""What the body of a checkpoint that is not the program's own was traced for, with the key of its place."""

_RESERVED = frozenset({"function", "sites"})  # what `at` means by itself


def identity(eqn: Any, spans: Spans) -> Identity:
    """What makes two checkpoint equations one site: the function and the line where it is defined.

    Where a library wraps it, JAX has the name of the library's own. Those that wrap whole modules (flax.linen, haiku)
    have the module's name in the name stack; one module is called with several names, and the line of the call decides.
    """
    body = _jax.checkpoint_body(eqn)
    name, file, line = _jax.function_name(body)
    if _jax.NO_BREAK in name:  # a part, by the key of its place
        return name.replace(_jax.NO_BREAK, " "), file, line
    users_own = bool(file) and is_user_file(file)
    if not users_own and names_modules(file):
        body = _with_code(body)
    called = called_in(body)
    if users_own:
        if called is not None and (called.co_filename, called.co_firstlineno) == (file, line):
            name = name_of(called)
        return name or "<lambda>", file, line
    span = spans.of(_jax.traceback_of(eqn))
    module = _module_name(body, called) if names_modules(file or (called.co_filename if called else "")) else ""
    if called is not None and not module:
        return name_of(called), called.co_filename, called.co_firstlineno
    shown = module or (span.function if span else "") or name or "checkpoint"
    return (shown, span.file, span.line) if span is not None else (shown, file, line)


def name_of(code: CodeType) -> str:
    """What a function is called, with the class that a method is of: ``block``, ``Layer.__call__``."""
    return code.co_qualname.rpartition("<locals>.")[2]


def called_in(body: Any) -> CodeType | None:
    """The function that JAX traced a jaxpr of by itself: the user's under a library's wrapper, or a library's layer."""
    for eqn in _jax.open_jaxpr(body).eqns:
        traceback = _jax.traceback_of(eqn)
        codes = () if traceback is None else traceback.raw_frames()[0]  # from within, the innermost first
        for code in reversed(codes):
            if is_user_file(code.co_filename) or is_layer(code):
                return code
    return None


def _with_code(body: Any) -> Any:
    """A jaxpr, or else the first in it, of which it is known what function it is traced of: linen's are in loops."""
    inside = [body]
    for jaxpr in inside:
        if called_in(jaxpr) is not None:
            return jaxpr
        inside += [inner.jaxpr for eqn in _jax.open_jaxpr(jaxpr).eqns for inner in _jax.bodies(eqn)]
    return body


def _module_name(body: Any, called: CodeType | None) -> str:
    """The module under a library's checkpoint: ``ScanCheckpointBlock_0/Dense_1`` in the name stack is a ``Block``."""
    owner = "" if called is None else "".join(called.co_qualname.split(".")[-2:-1])
    for eqn in _jax.open_jaxpr(body).eqns:
        scope = _jax.name_stack(eqn).split("/")[0]
        if re.fullmatch(r"[A-Za-z_]\w*", scope):
            return class_name_in_linen(re.sub(r"_\d+$", "", scope), owner)
    return ""


@dataclass(frozen=True, slots=True)
class SiteTable:
    """The sites of a program: each with its key, and the keys of their identities."""

    sites: tuple[Site, ...]
    keys: Mapping[Identity, str]

    def key_of(self, eqn: Any, spans: Spans) -> str:
        """The key of the site that a checkpoint equation belongs to, or of the place it was put at; empty for none."""
        use = _jax.use_of(_jax.checkpoint_body(eqn))
        return use.removeprefix(PUT_AT) if use.startswith(PUT_AT) else self.keys.get(identity(eqn, spans), "")


def find_sites(closed: Any, spans: Spans, describe: Callable[[Any], str]) -> SiteTable:
    """All sites of a program in the order of their first call; ``describe`` gives the key of a policy as written."""
    times: dict[Identity, int | None] = {}
    policies: dict[Identity, list[str]] = {}
    calls: dict[Identity, SourceSpan | None] = {}

    for scope, eqn in walk(closed):
        if not _jax.is_checkpoint(eqn):
            continue
        who = identity(eqn, spans)
        before = times.get(who, 0)
        times[who] = None if scope.times is None or before is None else before + scope.times
        calls.setdefault(who, nearest_span(spans, scope, eqn))
        written = describe(_jax.checkpoint_policy(eqn))
        if written not in policies.setdefault(who, []):
            policies[who].append(written)
    keys = keys_of(tuple(times))
    sites = tuple(
        Site(keys[who], who[0], count or 0, ", ".join(policies[who]), definition(who) or calls[who])
        for who, count in times.items()
    )
    return SiteTable(sites, keys)


def nearest_span(spans: Spans, scope: Scope, eqn: Any) -> SourceSpan | None:
    """The user's code that an equation, or else the nearest around it, comes from."""
    candidates = (spans.of(_jax.traceback_of(equation)) for equation in (eqn, *scope.around()))
    return next((span for span in candidates if span is not None), None)


def keys_of(identities: tuple[Identity, ...]) -> dict[Identity, str]:
    """The shortest of ``name``, ``name:line`` and ``name:line:file`` that is one function's alone."""
    shapes: list[Callable[[Identity], str]] = [
        lambda who: who[0],
        lambda who: f"{who[0]}:{who[2]}",
        lambda who: f"{who[0]}:{who[2]}:{os.path.basename(who[1])}",
        lambda who: f"{who[0]}:{who[2]}:{who[1]}",
    ]
    counts = [(shape, Counter(map(shape, identities))) for shape in shapes]
    keys: dict[Identity, str] = {}
    for who in identities:
        apart = (key for shape, count in counts if count[key := shape(who)] == 1 and key not in _RESERVED)
        keys[who] = next(apart, shapes[-1](who))
    return keys


def definition(who: Identity) -> SourceSpan | None:
    """The line where a function of the user's own is defined; None for others."""
    name, file, line = who
    if not file or not line or not is_user_file(file):
        return None
    text = linecache.getline(file, line).rstrip("\n")
    return SourceSpan(file, name, line, len(text) - len(text.lstrip()), line, len(text), cell_number(file), text)


def own_checkpoint(closed: Any) -> Any:
    """The checkpoint equation that is the function's own decorator: the whole program is that one equation.

    ``jit`` around or under it does not matter. None if there is no such equation.
    """
    jaxpr = _jax.open_jaxpr(closed)
    while len(jaxpr.eqns) == 1:
        (eqn,) = jaxpr.eqns
        if not set(map(id, jaxpr.outvars)) <= set(map(id, eqn.outvars)):
            return None
        if _jax.is_checkpoint(eqn):
            return eqn
        if not _jax.is_jit(eqn):
            return None
        jaxpr = _jax.bodies(eqn)[0].jaxpr
    return None


class PolicyWriter:
    """Writes jaxprs anew with other policies at their checkpoint equations.

    ``choose`` gives for such an equation the policy to set, ``AS_WRITTEN`` or ``NO_CHECKPOINT``.
    """

    def __init__(self, choose: Callable[[Any], Any]) -> None:
        self._choose, self._anew = choose, Rewriter()

    def __call__(self, jaxpr: Any) -> Any:
        """The jaxpr with the chosen policies, itself where nothing changes."""
        return self._anew(jaxpr, self._equations)

    def _equations(self, jaxpr: Any, renamed: Renamed) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            reading = renamed.reading(eqn)
            if not _jax.is_checkpoint(eqn):
                yield _jax.map_jaxprs(reading, self)
            else:
                yield from self._checkpoint(reading, renamed)

    def _checkpoint(self, eqn: Any, renamed: Renamed) -> Iterator[Any]:
        policy, before = self._choose(eqn), _jax.checkpoint_policy(eqn)
        body = self(_jax.checkpoint_body(eqn))
        if policy is NO_CHECKPOINT:
            yield from _spliced(eqn, body, renamed)
            return
        policy = before if policy is AS_WRITTEN else policy
        same = policy is before and body is _jax.checkpoint_body(eqn)
        yield eqn if same else _jax.replace_checkpoint(eqn, body, policy)


def _spliced(eqn: Any, body: Any, renamed: Renamed) -> Iterator[Any]:
    """A checkpoint's body in place of its equation, with fresh variables."""
    jaxpr = _jax.open_jaxpr(body)
    inside = Renamed(zip(jaxpr.invars, eqn.invars, strict=True))
    for inner in jaxpr.eqns:
        fresh = [var if _jax.is_dropped(var) else _jax.fresh_var(var) for var in inner.outvars]
        yield inner.replace(invars=[*map(inside.atom, inner.invars)], outvars=fresh)
        inside.update(zip(inner.outvars, fresh, strict=True))
    renamed.update((outer, inside.atom(atom)) for outer, atom in zip(eqn.outvars, jaxpr.outvars, strict=True))
