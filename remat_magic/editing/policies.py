"""Writing a policy into the user's texts: at the checkpoints that they apply, or with a new one."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from remat_magic.editing.applications import Application
from remat_magic.editing.edited_texts import EditedTexts, Imports
from remat_magic.editing.live_code import NewWrapper
from remat_magic.editing.new_checkpoints import NewCheckpoints, PolicyText
from remat_magic.editing.text_changes import TextChanges
from remat_magic.editing.user_code import UserCode, referent
from remat_magic.editing.ways import Way
from remat_magic.facts.facts import Facts
from remat_magic.libraries import class_of_linen
from remat_magic.parsing import parse_expression
from remat_magic.policies import Key
from remat_magic.records import Plan, RematError, Site

__all__ = ["Policies"]

_POLICIES = "jax.checkpoint_policies."


class Policies:
    """Writes policies into texts."""

    def __init__(self, facts: Facts, code: UserCode, texts: EditedTexts) -> None:
        self._code, self._texts = code, texts
        self._new = NewCheckpoints(facts, code, texts)
        self._written: dict[Application, tuple[str, tuple[str, ...]]] = {}  # by where

    def write(
        self,
        plan: Plan,
        names: tuple[str, ...],
        sites: tuple[Site, ...],
        places: Mapping[str, Sequence[Application]],
        way: Way,
    ) -> None:
        """Write a plan's policy.

        Args:
            plan: the plan.
            names: what it saves by name, where it is no policy of JAX.
            sites: the checkpoint sites that it is for; none: a new checkpoint around the whole function.
            places: where the source applies the checkpoint of each site, by its key.
            way: how a new checkpoint is written.

        Raises:
            RematError: the place is not in the user's text, or the policy is the user's own.
        """
        factory = "" if plan.names or plan.policy == "none" else _code_of(plan.policy)
        takes_off = plan.policy == "none" and not plan.names

        def policy(changes: TextChanges, imports: Imports, indent: str, used: int) -> str:
            """The policy's text, on a line that is so far indented, and so long already."""
            start = f"{imports.jax()}.checkpoint_policies"
            if not names:
                return factory.replace(_POLICIES, f"{start}.") or f"{start}.nothing_saveable"
            return changes.names_call(f"{start}.save_only_these_names", names, indent, used)

        for site in sites:
            if not places.get(site.key):
                raise RematError(
                    f"the jax.checkpoint of {site.function} cannot be found in source text of yours: a library applies "
                    "it, or it is passed on under another name, so give it the policy by hand."
                )
        for place in {id(place): place for site in sites for place in places[site.key]}.values():
            before = self._written.get(place)
            self._written[place] = plan.policy, names
            if before is not None and before != (plan.policy, names):
                of = ", ".join(key for key, own in places.items() if place in own)
                raise RematError(
                    f"line {place.text.start(place.node)[0]} of {place.text.place} applies the checkpoints of {of} "
                    "together: choose one policy for them."
                )
            if before is not None:
                continue
            if takes_off:
                self._take_off(place, way.names_kept)
            else:
                self._set(place, policy)
        if not sites and not takes_off:
            self._new.write(way, policy)

    def _set(self, place: Application, policy: PolicyText) -> None:
        """Give a checkpoint another policy."""
        node, indent = place.node, place.text.indent(place.node.lineno)
        changes, imports = self._texts.of(place.text)
        if isinstance(node, ast.Call):
            used = 20 if place.is_decorator else place.text.end(node)[1] - len(indent)
            written = policy(changes, imports, indent, used)
            changes.set_keyword(node, "policy", written)
        else:
            partial = imports.partial()
            written = policy(changes, imports, indent, 30)
            changes.wrap(node, f"{partial}(", f", policy={written})")
        self._texts.wrappers.append(NewWrapper(place.text, place.maker(parse_expression(written)), place))

    def _take_off(self, place: Application, names_kept: bool) -> None:
        text, node = place.text, place.node
        changes, _ = self._texts.of(text)
        if place.is_decorator:
            (first, column), (last, end) = text.start(node), text.end(node)
            if text.lines[first - 1][:column].strip() != "@" or text.lines[last - 1][end:].strip():
                raise RematError(
                    f"line {first} of {text.place} holds more than the decorator: take jax.checkpoint off by hand."
                )
            changes.delete_lines(first, last)
            if isinstance(place.inner, ast.ClassDef):
                name = place.inner.name
                changes.add_after(place.inner, f"{name} = {_class_of_same_name(name, name)}")
        elif place.whole is not None and isinstance(place.inner, ast.expr):
            inner = text.segment(place.inner)
            is_part = isinstance(text.parents.get(id(place.whole)), ast.Call | ast.Attribute)
            bare = isinstance(place.inner, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            if place.made_class(self._code) or (names_kept and place.is_of_linen):
                cls = referent(place.inner, self._code.scope(text.file))
                changes.replace(place.whole, _class_of_same_name(inner, getattr(cls, "__name__", "")))
            else:
                changes.replace(place.whole, inner if bare or not is_part else f"({inner})")
        else:
            name = self._texts.new_name("function")
            self._texts.added[1].add(name)
            changes.replace(node, f"(lambda {name}: {name})")
        self._texts.wrappers.append(NewWrapper(text, None, place))


def _class_of_same_name(inner: str, name: str) -> str:
    """A class like another one, but called as that which flax's checkpoint makes of it: so are its parameters."""
    new = f'"{class_of_linen(name)}"' if name else f'f"{class_of_linen("")}{{{inner}.__name__}}"'
    return f"type({new}, ({inner},), {{}})"


def _code_of(policy: str) -> str:
    """The expression for a policy of JAX's that a report was given of, so that its names are those of the program.

    Raises:
        RematError: it is the user's own, or holds one.
    """
    try:
        key = Key.parse(policy)
    except RematError:  # what a policy of the user's is called need be no expression: <lambda>
        key = Key.own(policy)
    if any(alternative.own for alternative in key.alternatives):
        raise RematError(f"{policy} is a policy of your own: give it to jax.checkpoint by hand.")
    return key.code
