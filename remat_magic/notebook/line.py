"""The magic's own line: options first, then Python, to the letter.

``IPython.core.magic_arguments.parse_argstring`` splits a whole line as a shell would, which spoils the quotes, spaces
and negative numbers of a call. So the options are taken off the front of the raw line, as the parser declares them,
and only they go through the parser; what is left is one Python expression.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from IPython.core.error import UsageError

from remat_magic.errors import printable
from remat_magic.parsing import parse_python
from remat_magic.records import RematError

NAME_KINDS = ("save", "offload")

_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Options:
    """What a line says.

    ``policy`` is also what ``--names`` stands for. ``expression`` is the Python that follows the options, without a
    semicolon that ends it, or None where the line has none.
    """

    policy: str | None = None
    at: str | None = None
    wrt: tuple[int | str, ...] | None = None
    gradient: str | None = None
    step: str | None = None
    device: str | None = None
    mesh: str | None = None
    args: str | None = None
    output: str | None = None
    text: Literal["", "short", "full"] = ""
    apply: bool = False
    expression: str | None = None

    @property
    def tree(self) -> ast.expr | None:
        """The expression, parsed."""
        return None if self.expression is None else parse_python(self.expression, "eval").body


def parse(parser: argparse.ArgumentParser, line: str) -> Options:
    """Read a line; UsageError of one sentence where it is wrong in itself."""
    values, rest = split_options(parser, line)
    if values.policy is not None and values.names:
        raise UsageError(
            "--policy and --names exclude each other: write their union as one policy, such as "
            "--policy \"dots_saveable | save_only_these_names('a')\"."
        )
    if values.output is not None and (not values.output.isidentifier() or keyword.iskeyword(values.output)):
        raise UsageError(f"-o takes the name of a variable, and `{values.output}` is not one.")
    given: dict[str, Any] = {field.name: getattr(values, field.name, None) for field in fields(Options)}
    given.update(wrt=_wrt(values.wrt), expression=rest.removesuffix(";").rstrip() or None)
    if values.names:
        given["policy"] = _by_name(values.names)
    options = Options(**given)
    _check_expression(parser, options)
    return options


def split_options(parser: argparse.ArgumentParser, line: str) -> tuple[argparse.Namespace, str]:
    """The options at the front of ``line``, and the rest of it verbatim."""
    actions = option_actions(parser)
    argv: list[str] = []
    position = _skip_spaces(line, 0)
    while option := _OPTION.match(line, position):
        name = option[0]
        if name not in actions:
            raise UsageError(f"%remat has no option {name}{_nearest(name, actions)}; `%remat?` lists them.")
        position = option.end()
        action, follows = actions[name], line[position : position + 1]
        if action.nargs == 0 or (action.nargs == "?" and follows != "="):
            if follows.strip():
                raise UsageError(f"{name} takes no value: put a space after it.")
            argv.append(name)
        else:
            if follows == "=":
                position += 1
            elif follows.strip():
                raise UsageError(f"put a space or = between {name} and its value.")
            value, position = _word(line, _skip_spaces(line, position), name)
            if action.choices is not None and value not in action.choices:
                raise UsageError(f"{name} takes {' or '.join(action.choices)}, not `{value}`.")
            argv.append(f"{name}={value}")
        position = _skip_spaces(line, position)
    return parser.parse_args(argv), line[position:].strip()


def option_actions(parser: argparse.ArgumentParser) -> Mapping[str, argparse.Action]:
    """The parser's actions by option string. argparse has had this attribute since 2.7, and no public way to it."""
    return parser._option_string_actions  # noqa: SLF001


def _skip_spaces(line: str, position: int) -> int:
    return position + len(line[position:]) - len(line[position:].lstrip())


def _word(line: str, start: int, option: str) -> tuple[str, int]:
    """One value: up to the first space outside quotes and brackets, without the quotes around all of it."""
    closing: list[str] = []  # what is open, innermost last
    quoted_until = start
    position = start
    while position < len(line):
        character = line[position]
        if closing and closing[-1] in "'\"":
            if character == "\\":
                position += 1
            elif character == closing[-1]:
                closing.pop()
                if line[start] == character and quoted_until == start:
                    quoted_until = position
        elif character in "'\"":
            closing.append(character)
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character.isspace() and not closing:
            break
        position += 1
    if closing:
        raise UsageError(f"the value of {option} lacks its closing {closing[-1]}.")
    word = line[start:position]
    if not word:
        raise UsageError(f"{option} needs a value; `%remat?` shows which.")
    if word[0] in "'\"" and quoted_until == position - 1:
        word = word[1:-1]
    return word, position


def _wrt(text: str | None) -> tuple[int | str, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrt = tuple(int(part) if re.fullmatch(r"-?\d+", part) else part for part in parts)
    if not wrt or not all(isinstance(part, int) or re.fullmatch(r"[^\W\d]\w*([\[.].*)?", part) for part in wrt):
        raise UsageError(f"--wrt takes numbers or names of arguments, such as 0,2 or params, not `{text}`.")
    return wrt


def _by_name(values: list[str]) -> str:
    """The policy that ``a,b``, which is ``save=a,b``, asks for; several groups stand in one value or in several."""
    patterns = dict[str, list[str]]()
    for group in " ".join(values).split():
        kind, equals, written = group.partition("=")
        if not equals or not kind.isidentifier():  # in a pattern too a = may stand
            kind, written = "save", group
        if kind not in NAME_KINDS:
            raise UsageError(f"--names knows save= and offload=, not `{group}`: all other values are recomputed.")
        patterns.setdefault(kind, []).extend(pattern for pattern in written.split(",") if pattern)
    empty = [kind for kind in patterns if not patterns[kind]]
    if empty or not patterns:
        raise UsageError(f"--names {empty[0] + '=' if empty else ''} needs at least one name, such as save=a,b.")
    return f"names(save={patterns.get('save', [])!r}, offload={patterns.get('offload', [])!r})"


def _check_expression(parser: argparse.ArgumentParser, options: Options) -> None:
    if options.args is not None and not _is_argument_list(options.args):
        raise UsageError(
            f'--args takes what would stand in the call\'s brackets, such as "W1, W2, n=3", not `{options.args}`.'
        )
    if options.expression is None:
        return
    late = _late_option(parser, options.expression)
    try:
        tree = options.tree
    except SyntaxError:
        if late:
            raise UsageError(f"options go before the call: put {late} in front of it.") from None
        raise UsageError(f"`{options.expression}` is not a Python expression: write a call, such as f(x, y).") from None
    if isinstance(tree, ast.BinOp) and late:  # `f(x) --text` is valid Python: f(x) minus minus text
        raise UsageError(f"options go before the call: put {late} in front of it.")
    if options.args is not None and isinstance(tree, ast.Call):
        raise UsageError("--args is for a function without a call: leave out either --args or the call's brackets.")


def _is_argument_list(text: str) -> bool:
    try:
        tree = parse_python(f"f(\n{text}\n)", "eval").body
    except SyntaxError:
        return False
    return isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)  # `a)(b` would be two calls


def _late_option(parser: argparse.ArgumentParser, expression: str) -> str | None:
    words = (word.partition("=")[0] for word in expression.split())
    return next((word for word in words if word in option_actions(parser)), None)


def _nearest(name: str, actions: Mapping[str, argparse.Action]) -> str:
    near = difflib.get_close_matches(name, actions, n=1)
    return f": did you mean {near[0]}?" if near else ""


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Let IPython say what the user can mend in one sentence, without a traceback."""
    try:
        yield
    except RematError as error:
        raise UsageError(printable(_in_options(str(error)))) from None


# Parameters of rm.trace in a sentence: with a value, as a word of their own, or in code's quotes.
_PARAMETER = re.compile(r"(?<![-\w])(wrt|at|gradient)=('[^']*'|[\w-]+)|(?<![-\w`])(wrt)(?!\w)|`(wrt|at|gradient)`")
_AUX = "set has_aux=True and return it as auxiliary data"


def _in_options(sentence: str) -> str:
    """What ``rm.trace`` says of its parameters, in the words of the line."""

    def option(match: re.Match[str]) -> str:
        name, value = match[1] or match[3] or match[4], match[2] or ""
        return f"--{name} {value if ' ' in value else value.strip(chr(39))}".rstrip()

    auxiliary = "return it as auxiliary data and write the call as jax.grad(f, has_aux=True)(...)"
    return _PARAMETER.sub(option, sentence.replace(_AUX, auxiliary))
