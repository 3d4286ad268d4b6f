"""Which policy goes where: from a policy and an ``at`` to the change that it makes to the program."""

from __future__ import annotations

import difflib
import functools
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.ad_checkpoint import Offloadable, Recompute, Saveable

from remat_magic.engine.parts import PartedCall
from remat_magic.engine.primal import Primal
from remat_magic.engine.sites import own_checkpoint
from remat_magic.engine.vmaps import Vmap, parts_in
from remat_magic.errors import one_line, text_of
from remat_magic.jaxprs.rewriting import NamedProgram
from remat_magic.policies import AS_WRITTEN, MIXED, NO_CHECKPOINT, Resolved
from remat_magic.records import Note, Plan, RematError
from remat_magic.records.fit import by_hand

_PLACES = 12  # named at most where a place is not known


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice made precise.

    ``whole`` is the policy of a checkpoint to put around the whole function (None: none is put there), ``at_sites``
    the sites whose policy changes. ``policy``, ``at`` and ``code`` are for the reader. ``label`` is what people
    call the policy where that is not its key. ``identity`` is equal for selections that make the same program,
    ``report_key`` for those that also read alike. ``naming`` is the program with every value named, where the policy is
    of those names and not of the program's own: those of the values of ``plan``. ``resolved`` is the policy, None where
    several places have one each. ``donate`` are the arguments that a training step may write over besides those that it
    donates as written, which changes what is held and nothing else.
    """

    policy: str
    at: str
    whole: Any
    at_sites: tuple[tuple[str, Any], ...]
    code: str
    notes: tuple[Note, ...] = ()
    naming: NamedProgram | None = None
    label: str = ""
    resolved: Resolved | None = None
    plan: Plan | None = None
    donate: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key of the program: the objects chosen, by identity."""
        named = () if self.naming is None else (("", id(self.naming)),)
        sites = ((key, id(p)) for key, p in self.at_sites)
        return (id(self.whole) if self.whole is not None else None, *sites, *named)

    @property
    def report_key(self) -> tuple[Any, ...]:
        """Key of the report."""
        return (self.policy, self.at, self.identity, self.donate)


class Selector:
    """Makes selections for one program, with one policy object per key so that JAX's caches hit."""

    def __init__(
        self,
        primal: Primal,
        vmaps: Mapping[str, Vmap],
        parts: Mapping[str, int],
        code_of_cut: Callable[[str | None], str],
        parted: Callable[[str], list[PartedCall]],
    ) -> None:
        self._sites = {site.key: site for site in primal.table.sites}
        self._possible, self._vmaps = primal.possible, vmaps
        self._code_of_cut, self._parted = code_of_cut, parted
        self._parts = {f"{key} in {count}": vmaps.get(key) for key, count in parts.items()}
        self._function = primal.name
        self._interned: dict[tuple[str | int, ...], Resolved] = {}
        self._lock = threading.Lock()
        own = own_checkpoint(primal.closed)
        self._own = primal.site_of(own) if own is not None else None
        self.default = "function" if self._own or not self._sites else "sites"

    def intern(self, resolved: Resolved) -> Resolved:
        """The one object for a policy: factories make unequal closures for equal arguments (jax 0.12)."""
        # Policies of the user's own are told apart by what they are; `own` keeps them alive.
        identity = (resolved.key, *map(id, resolved.own))
        with self._lock:
            if identity not in self._interned:
                if resolved.own:
                    namesakes = sum(key == resolved.key for key, *_ in self._interned)
                    key = f"{resolved.key} #{namesakes + 1}" if namesakes else resolved.key
                    alone = resolved.policy is resolved.own[0]
                    policy = _guard(resolved.policy, resolved.key) if alone else resolved.policy
                    resolved = replace(resolved, key=key, policy=policy)
                self._interned[identity] = resolved
            return self._interned[identity]

    def used(self) -> list[Resolved]:
        """The policies seen so far."""
        with self._lock:
            return list(self._interned.values())

    def select(self, resolved: Resolved, at: str | None) -> Selection:
        """One policy at one place, or at all sites."""
        return replace(self._select(resolved, at), resolved=resolved)

    def _select(self, resolved: Resolved, at: str | None) -> Selection:
        at = self.default if at is None else at
        if at == "function":
            if self._own is not None:
                return self._at_sites(resolved, at, (self._own,))
            written = resolved.policy is AS_WRITTEN or resolved.policy is NO_CHECKPOINT
            whole = None if written else resolved.policy
            code = f"{self._function} = jax.checkpoint({self._function}{option_of(resolved)})" if whole else ""
            return Selection(resolved.key, at, whole, (), code, resolved.notes)
        if at in self._parts and self._parts[at] is None:  # microbatches, each under that policy
            whole = None if resolved.policy is AS_WRITTEN or resolved.policy is NO_CHECKPOINT else resolved.policy
            code = self._code_of_cut(None if whole is None else option_of(resolved))
            return Selection(resolved.key, at, whole, (), code, resolved.notes)
        if at == "sites":
            if not self._sites:
                raise RematError(f"{self._function} has no checkpoint site: use at='function'.")
            return self._at_sites(resolved, at, tuple(self._sites))
        as_written = resolved.policy is AS_WRITTEN and parts_in([at])  # which is in no parts
        where = None if at in self._sites else self._possible.where(at)
        if where is not None and where.parts and resolved.policy is not AS_WRITTEN:
            option = None if resolved.policy is NO_CHECKPOINT else option_of(resolved)
            codes = dict.fromkeys(call.code(option) for call in self._parted(at))
            code = "\n".join(codes) if all(codes) else ""
            return Selection(resolved.key, at, None, ((at, resolved.policy),), code, resolved.notes)
        if where is not None or (at not in self._sites and as_written):
            return self._at_calls(resolved, at)
        self._check(at)
        return self._at_sites(resolved, at, (at,))

    def select_each(self, chosen: Mapping[str, Resolved]) -> Selection:
        """A policy for each of some sites; the others stay as written."""
        whole, pairs, codes, notes, unknown = None, [], [], [], False
        for key, resolved in chosen.items():
            selection = self.select(resolved, key)
            whole = selection.whole if selection.whole is not None else whole
            pairs += selection.at_sites
            codes += [selection.code] if selection.code else []
            unknown |= by_hand(key) and not selection.code and resolved.policy is not AS_WRITTEN
            notes += selection.notes
        text = ", ".join(f"{key}={resolved.key}" for key, resolved in chosen.items())
        lines = any("\n" in code or ".map(" in code for code in codes)
        together = "" if unknown else ("\n" if lines else "; ").join(codes)
        return Selection(MIXED, text, whole, tuple(sorted(pairs, key=lambda p: p[0])), together, tuple(notes))

    def _at_sites(self, resolved: Resolved, at: str, keys: tuple[str, ...]) -> Selection:
        if resolved.policy is AS_WRITTEN:
            return Selection(resolved.key, at, None, (), "", resolved.notes)
        pairs = tuple((key, resolved.policy) for key in keys)
        functions = dict.fromkeys(self._sites[key].function for key in keys)
        bare = resolved.policy is NO_CHECKPOINT
        if vmap := self._parts.get(at):
            code = vmap.code(parts_in([at])[vmap.key], None if bare else option_of(resolved))
        elif bare:
            code = f"# take jax.checkpoint off {', '.join(functions)}"
        else:
            texts = [source.text if (source := self._sites[key].source) else "" for key in keys]
            if all(text.lstrip().startswith("@") for text in texts):
                own = re.search(r"[\w.]*(checkpoint|remat)\b", texts[0])  # a library's, as eqx.filter_checkpoint
                wrapper = own[0] if own else "jax.checkpoint"
                option = option_of(resolved)
                decorator = f"@functools.partial({wrapper}{option})" if option else f"@{wrapper}"
                code = f"{decorator}  # on {', '.join(functions)}"
            else:
                code = "; ".join(f"jax.checkpoint({name}{option_of(resolved)})" for name in functions)
        return Selection(resolved.key, at, None, pairs, code, resolved.notes)

    def _at_calls(self, resolved: Resolved, at: str) -> Selection:
        if resolved.policy is AS_WRITTEN or resolved.policy is NO_CHECKPOINT:
            return Selection(resolved.key, at, None, (), "", resolved.notes)
        code = self._possible.code(at, _code(resolved))
        return Selection(resolved.key, at, None, ((at, resolved.policy),), code, resolved.notes)

    def _check(self, key: str) -> None:
        if key in self._sites:
            return
        places = [*self._sites, *self._possible.callees]
        if key in self._vmaps:
            raise RematError(f"{key} is a place in parts: write at='{key} in {self._vmaps[key].divisors[0]}'.")
        name, parts = re.fullmatch(r"(.*?)( in \d+)?", key).groups("")  # pyright: ignore[reportOptionalMemberAccess]
        close = [f"{place}{parts}" for place in difflib.get_close_matches(name, places, 1)]
        if not places:
            raise RematError(f"{self._function} has no checkpoint site {key!r}: use at='function'.")
        listed = ", ".join(map(repr, ["function", *places[:_PLACES]])) + (", ..." if len(places) > _PLACES else "")
        has = f"did you mean {close[0]!r}?" if close else f"its places are {listed}."
        raise RematError(f"{self._function} has no checkpoint site {key!r}: {has}")


def _code(resolved: Resolved) -> str:
    """A policy as code for ``policy=``; empty for the one that a checkpoint has by itself."""
    return "" if resolved.key == "nothing_saveable" else resolved.code


def option_of(resolved: Resolved) -> str:
    """The argument of a checkpoint for a policy, after others."""
    code = _code(resolved)
    return f", policy={code}" if code else ""


def policy_of_each(text: str) -> dict[str, str]:
    """The places and policies of a text such as ``"block=none, head=dots_saveable"``, as ``select_each`` writes it."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        quote = "" if character == quote else quote or (character if character in "'\"" else "")
        depth += 0 if quote else (character in "([{") - (character in ")]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    pairs = [part.strip().partition("=") for part in parts]
    if not all(key and policy for key, _, policy in pairs):
        raise RematError(f"at={text!r} with the policy {MIXED!r} is to name a policy for each place: 'a=none, b=...'.")
    return {key: policy for key, _, policy in pairs}


_ANSWERS = (
    bool,
    type(Saveable),
    type(Recompute),
    Offloadable,
)


def _guard(policy: Any, key: str) -> Any:
    """The user's policy, with its mistakes told in the user's terms; JAX asserts, or takes any answer for a yes."""

    @functools.wraps(policy)
    def guarded(prim: Any, *args: Any, **params: Any) -> Any:
        try:
            answer = policy(prim, *args, **params)
        except Exception as error:
            reason = f" ({text})" if (text := one_line(text_of(error))) else ""
            raise RematError(
                f"the policy {key} raised {type(error).__name__} when asked about {prim}{reason}; a policy is called "
                "as policy(primitive, *types, **parameters) and returns True to save."
            ) from error
        if isinstance(answer, _ANSWERS):
            return answer
        if callable(answer):
            raise RematError(f"the policy {key} returned a function: it is a factory, so call it and pass its result.")
        returned = one_line(text_of(answer, repr), 100)
        raise RematError(
            f"the policy {key} returned {returned} for {prim}: it must return True or False (or Saveable, Recompute or "
            "Offloadable of jax.ad_checkpoint)."
        )

    return guarded
