"""Writing a donation into the ``jit`` of a step, wherever the user's source has it."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Callable
from typing import Any

from remat_magic.editing.applications import PARTIAL
from remat_magic.editing.edited_texts import EditedTexts
from remat_magic.editing.source import ParsedText, parsed_text
from remat_magic.editing.user_code import UserCode
from remat_magic.engine.donation import Donation, is_jit, jits
from remat_magic.engine.engine import Engine
from remat_magic.engine.signature import function_name
from remat_magic.jaxprs.spans import cell_number
from remat_magic.parsing import parse_expression, parse_source
from remat_magic.records import RematError
from remat_magic.user_files import is_user_file


def write_donation(texts: EditedTexts, code: UserCode, engine: Engine, donation: Donation) -> Callable[[Any], Any]:
    """Write it; what is given back jits a step as the edited text does.

    Raises:
        RematError: the source has no ``jit`` of the step, or several.
    """
    name = function_name(engine.given.fun)
    own, line = donation.where
    texts_of_step = sorted(code.texts.values(), key=lambda text: text.file != own)
    in_each = ([(text, jit) for jit in jits(text.tree, name, line * (text.file == own))] for text in texts_of_step)
    found = next(filter(None, in_each), None) or _elsewhere(code, name)
    if len(found) != 1:
        lines = ", ".join(f"line {jit.lineno} of {text.place}" for text, jit in found)
        several = f"applied more than once ({lines})" if found else "in no source text of yours"
        raise RematError(f"the jit of {name} is {several}: write `{donation.code}` by hand.")
    ((text, jit),) = found
    option, value = donation.written(jit)
    changes, _ = texts.of(text)
    jitted, options = jit, [ast.keyword(option, parse_expression(value))]
    if isinstance(jit, ast.Call):
        changes.set_keyword(jit, option, value)
        options += [keyword for keyword in jit.keywords if keyword.arg != option]
        jitted = jit.args[0] if jit.args and is_jit(jit.args[0]) else jit.func  # of functools.partial
    else:
        changes.wrap(jit, "", f"({option}={value})")
    maker = ast.Call(ast.Name(PARTIAL, ast.Load()), [jitted], options)

    def as_edited(step: Any) -> Any:
        expression = ast.fix_missing_locations(ast.Expression(ast.copy_location(maker, jit)))
        compiled = compile(expression, text.file, "eval", dont_inherit=True)
        return eval(compiled, {**code.scope(text.file), PARTIAL: functools.partial})(step)  # noqa: S307 - the user's jit

    return as_edited


def _elsewhere(code: UserCode, name: str) -> list[tuple[ParsedText, ast.expr]]:
    """Where other modules and cells than those that ran jit a function; the latest such cell."""
    modules = {file: vars(it) for it in [*sys.modules.values()] if (file := getattr(it, "__file__", None) or "")}
    cells = {file: number for file in [*linecache.cache] if (number := cell_number(file)) is not None}
    around = next(iter(code.namespaces.values()), {})
    for file in (*sorted(cells, key=lambda file: -cells[file]), *filter(is_user_file, modules)):
        tree = parse_source("".join(linecache.getlines(file)))
        if file not in code.texts and tree is not None and jits(tree, name):
            text = code.texts[file] = parsed_text(file, set())
            code.namespaces[file] = modules.get(file, around)
            return [(text, jit) for jit in jits(text.tree, name)]
    return []
