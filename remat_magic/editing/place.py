"""Writing a policy where it applies: on a checkpoint's decorator or call, or around a whole function."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import ad_checkpoint

from remat_magic.editing.setting import EditedCall, Setting, checkpoint_calls, is_checkpoint, resolved
from remat_magic.editing.source import Function, Source, first_line
from remat_magic.editing.text import Writer
from remat_magic.records import RematError, Site

__all__ = ["Imports", "write_policy"]


class Imports:
    """What to call things of JAX's in one source, with the imports that this takes."""

    def __init__(self, source: Source, space: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self._space, self._known = space, dict[str, str]()
        self._local = _bound_in_functions(source)

    def name(self, thing: Any, plain: str, line: str) -> str:
        """The name of something, an import of it added where it has none.

        Args:
            thing: the object.
            plain: what it is usually called.
            line: the import that binds it to that name.
        """
        if plain in self._known:
            return self._known[plain]
        found = plain
        if self._space.get(plain) is not thing or plain in self._local:
            same = (name for name, value in self._space.items() if value is thing and name not in self._local)
            found = next((name for name in same if not name.startswith("_")), "")
            if not found:
                found = plain
                while found in self._local or found in self._space:
                    found = f"{found}_"
                self.lines.append(line if found == plain else f"{line} as {found}")
        self._known[plain] = found
        return found

    def jax(self) -> str:
        """The module jax."""
        return self.name(jax, "jax", "import jax")

    def checkpoint_name(self) -> str:
        """``jax.ad_checkpoint.checkpoint_name``."""
        line = "from jax.ad_checkpoint import checkpoint_name"
        return self.name(ad_checkpoint.checkpoint_name, "checkpoint_name", line)

    def partial(self) -> str:
        """``functools.partial``."""
        if self._space.get("functools") is functools and self._space.get("partial") is not functools.partial:
            return "functools.partial"
        return self.name(functools.partial, "partial", "from functools import partial")


def _bound_in_functions(source: Source) -> set[str]:
    found: set[str] = set()
    for function in source.functions:
        found |= {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
        found |= {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    return found


PolicyText = Callable[[Writer, Imports, str, int], str]


def write_policy(
    setting: Setting,
    writer: Callable[[str], tuple[Writer, Imports]],
    sites: tuple[Site, ...],
    policy: PolicyText | None,
    static: tuple[int, ...],
) -> list[EditedCall]:
    """Write a policy; return the calls of ``jax.checkpoint`` that were changed.

    Args:
        setting: the function with its sources.
        writer: gives a file's writer and imports.
        sites: the checkpoint sites that it is for; none: a new checkpoint around the whole function.
        policy: its text, for a writer, the indent of its line, and how long the line is already; None takes the
            checkpoint off.
        static: the numbers of the arguments that are no arrays, for a new checkpoint.

    Raises:
        RematError: the place is not in the user's source.
    """
    if sites:
        return [call for site in sites for call in _at_site(setting, writer, site, policy)]
    if policy is not None:
        _around(setting, writer, policy, static)
    return []


def _around(
    setting: Setting, writer: Callable[[str], tuple[Writer, Imports]], policy: PolicyText, static: tuple[int, ...]
) -> None:
    found = setting.function_node()
    if found is None:
        raise RematError(
            "the traced function is not defined in source text of yours: define a function that calls it, and trace "
            "that."
        )
    source, node = found
    write, imports = writer(source.file)
    numbers = f", static_argnums=({', '.join(map(str, static))},)" if static else ""
    indent = write.indent_of(node)
    checkpoint = f"{imports.jax()}.checkpoint"
    if isinstance(node, ast.Lambda):
        write.wrap(node, f"{checkpoint}(", f", policy={policy(write, imports, indent, 40)}{numbers})")
        return
    start = f"@{imports.partial()}({checkpoint}, policy="
    write.decorate(node, f"{start}{policy(write, imports, indent, len(start))}{numbers})")


def _at_site(
    setting: Setting, writer: Callable[[str], tuple[Writer, Imports]], site: Site, policy: PolicyText | None
) -> list[EditedCall]:
    done = False
    edited: list[EditedCall] = []
    for source, place in _decorators(setting, site):
        done = True
        write, imports = writer(source.file)
        if policy is None:
            _undecorate(write, place)
        elif isinstance(place, ast.Call):
            write.set_keyword(place, "policy", policy(write, imports, write.indent_of(place), 20))
        else:
            partial = imports.partial()
            text = policy(write, imports, write.indent_of(place), 30)
            write.wrap(place, f"{partial}(", f", policy={text})")
    for source, call in () if done else _calls(setting, site):
        done = True
        edited.append(
            EditedCall(source.file, checkpoint_calls(source.tree, setting.namespaces[source.file]).index(call), site)
        )
        write, imports = writer(source.file)
        if policy is None:
            write.replace(call, source.segment(call.args[0]))
        else:
            used = source.end(call)[1] - len(write.indent_of(call))
            write.set_keyword(call, "policy", policy(write, imports, write.indent_of(call), used))
    if not done:
        raise RematError(
            f"the jax.checkpoint of {site.function} cannot be found in source text of yours: it is applied by a "
            "library or under another name, so give it the policy by hand."
        )
    return edited


def _decorators(setting: Setting, site: Site) -> Iterator[tuple[Source, ast.expr]]:
    """The decorators that make a site: ``@jax.checkpoint`` itself, or the call of ``partial`` with it."""
    where = site.source
    source = setting.sources.get(where.file) if where is not None else None
    if where is None or source is None:
        return
    space = setting.namespaces[source.file]
    for node in source.functions:
        if isinstance(node, ast.Lambda) or node.name != site.function or first_line(node) != where.line:
            continue
        for decorator in node.decorator_list:
            if is_checkpoint(decorator, space) or (
                isinstance(decorator, ast.Call)
                and decorator.args
                and resolved(decorator.func, space) is functools.partial
                and is_checkpoint(decorator.args[0], space)
            ):
                yield source, decorator


def _calls(setting: Setting, site: Site) -> Iterator[tuple[Source, ast.Call]]:
    """The calls of ``jax.checkpoint`` on the function that is the site."""
    every = [
        (source, node)
        for source in setting.sources.values()
        for node in checkpoint_calls(source.tree, setting.namespaces[source.file])
        if node.args
    ]
    named = [(source, call) for source, call in every if _is_of(call.args[0], site, source)]
    if named:
        yield from named
        return
    where = site.source
    here = [
        (source, call)
        for source, call in every
        if where is not None and source.file == where.file and _is_called_at(source, call, where.line)
    ]
    if here:
        yield from here
    elif len(every) == 1 and not _is_known(every[0][1].args[0]):
        yield every[0]


def _is_of(argument: ast.expr, site: Site, source: Source) -> bool:
    where = site.source
    match argument:
        case ast.Name(name) | ast.Attribute(_, name) if name == site.function:
            return True
        case ast.Lambda():
            return where is not None and source.file == where.file and argument.lineno == where.line
        case ast.Name(name):  # a lambda that was given a name
            around: Function | None = source.enclosing(argument)
            body: Any = source.tree if around is None else around
            return site.function == "<lambda>" and any(
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Lambda)
                and where is not None
                and node.value.lineno == where.line
                and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
                for node in ast.walk(body)
            )
        case _:
            return False


def _is_called_at(source: Source, call: ast.Call, line: int) -> bool:
    above = source.parents.get(id(call))
    return isinstance(above, ast.Call) and above.func is call and above.lineno <= line <= (above.end_lineno or line)


def _is_known(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Lambda)


def _undecorate(write: Writer, decorator: ast.expr) -> None:
    source = write.source
    (first, column), (last, end) = source.start(decorator), source.end(decorator)
    before, after = source.lines[first - 1][:column], source.lines[last - 1][end:]
    if before.strip() != "@" or after.strip():
        raise RematError(
            f"line {first} of {source.place} holds more than the decorator: take jax.checkpoint off by hand."
        )
    write.delete_lines(first, last)
