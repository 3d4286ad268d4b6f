"""Tab completion of the magic's options and of their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from remat_magic.notebook.line import NAME_KINDS, option_actions
from remat_magic.notebook.session import Session

_LINE = re.compile(r"\s*%{1,2}remat\s(?P<written>.*)")
_AFTER_OPTION = re.compile(
    r"""(?:|.*\s)(?P<option>--?[A-Za-z][\w-]*)[ =]+(?P<value>"[^"]*|'[^']*|[^\s"'(]*(?:\(.*)?)"""
)
_CHECKPOINT_NAME = re.compile(r"""checkpoint_name\(.*?["']([\w./-]+)["']\s*\)""")


def matcher_for(
    parser: argparse.ArgumentParser, session: Session
) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """A matcher for ``ip.Completer.custom_matchers``."""

    @context_matcher(identifier="remat_magic")
    def remat_matcher(context: CompletionContext) -> SimpleMatcherResult:
        line = _LINE.fullmatch(context.text_until_cursor)
        if line is None:
            return {"completions": [], "suppress": False}
        candidates = set(_candidates(parser, session, line["written"], context))
        matching = sorted(candidate for candidate in candidates if candidate.startswith(context.token))
        return {"completions": [SimpleCompletion(text) for text in matching], "suppress": bool(matching)}

    return remat_matcher


def _open_option(parser: argparse.ArgumentParser, before: str) -> re.Match[str] | None:
    """The option whose value the cursor stands in."""
    after = _AFTER_OPTION.fullmatch(before)
    action = option_actions(parser).get(after["option"]) if after else None
    if after is None or action is None or action.nargs == 0:
        return None
    return after if action.nargs != "?" or before[after.end("option")] == "=" else None


def _candidates(
    parser: argparse.ArgumentParser, session: Session, written: str, context: CompletionContext
) -> Iterable[str]:
    """What may stand at the cursor where the line is not yet Python."""
    options = option_actions(parser)
    after = _open_option(parser, written.removesuffix(context.token))
    if after is None:
        return options if context.token.startswith("-") else ()
    value = after["value"].lstrip("\"'")
    names = {*session.offered["names"], *_CHECKPOINT_NAME.findall(context.full_text)}
    match options[after["option"]].dest:
        case "policy" if "(" not in value:
            from remat_magic import policies

            keys = (key for choice in policies.choices() for key in (choice.key, *choice.aliases))
            return (*keys, *session.offered["policy"])
        case "policy":
            return names
        case "names":
            return names if re.search(r"[=,]$", value) else {*names, *(f"{kind}=" for kind in NAME_KINDS)}
        case "at" | "gradient" | "text" as option:
            own = {"at": ("function", "sites"), "gradient": ("none",), "text": ("full",)}
            return (*own[option], *session.offered.get(option, ()))
        case _:
            return ()
