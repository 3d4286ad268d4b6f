"""The table of checkpoint policies: what each is called, what it does, and the code that asks JAX for it.

A policy is written as a *key*, a small expression that says the same in Python, in ``%%remat --policy`` and in the
widget's dropdown:

========================================================  ============================================================
``as_written``                                            what the program says
``none``                                                  no checkpoint at the chosen place, inner ones as written
``dots_saveable``                                         a member of ``jax.checkpoint_policies``, or an alias of one
``save_only_these_names('h', 'attn_*', 're:mlp[0-9]')``   a factory with its arguments; globs and regular expressions
                                                          stand for the names of the function that they match
``names(save=['h'], offload=['z'])``                      by name: these saved, those offloaded, all others recomputed
``dots_saveable | save_only_these_names('h')``            saved if either saves it
``my_policy``                                             a policy callable in the user's namespace
========================================================  ============================================================
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from remat_magic.policies.keys import resolve
from remat_magic.policies.objects import describe
from remat_magic.policies.table import (
    AS_WRITTEN,
    DESTINATION,
    MEMORIES,
    NO_CHECKPOINT,
    OWN,
    ROWS,
    SOURCE,
    TABLE,
    Resolved,
    call,
    code_of_row,
)
from remat_magic.records import Choice

__all__ = ["AS_WRITTEN", "NO_CHECKPOINT", "OWN", "Resolved", "by_name", "choices", "describe", "resolve"]


def choices(names: Sequence[str] = ()) -> tuple[Choice, ...]:
    """The table of policies.

    Args:
        names: the checkpoint names of a function. Without any, factories stand in the table under their bare names,
            with the parameters they take; with some, every key is complete and can be used as it is.
    """
    if not names:
        return tuple(dataclasses.replace(row, code=code_of_row(row)) for row in TABLE)
    keys: list[str] = [row.key for row in TABLE if not row.parameters or row.parameters == MEMORIES]
    keys.append(call("save_only_these_names", names))
    if 1 < len(names) <= 8:
        keys += [call("save_only_these_names", (name,)) for name in names]
        keys += [call("save_any_names_but_these", (name,)) for name in names]
    keys.append(
        f"save_and_offload_only_these_names(names_which_can_be_saved=[], names_which_can_be_offloaded={list(names)!r}, "
        f"offload_src={SOURCE!r}, offload_dst={DESTINATION!r})"
    )
    rows = []
    for key in keys:
        found = resolve(key, names)
        rows.append(Choice(key, ROWS[key].label if key in ROWS else found.key, found.meaning, found.code))
    return tuple(rows)


def by_name(
    save: Iterable[str | re.Pattern[str]] = (), offload: Iterable[str | re.Pattern[str]] = (), **memories: str
) -> str:
    """The key of a choice by name: the names (or globs, or compiled regular expressions) to save and to offload.

    Args:
        save: values to keep on the device.
        offload: values to move to another memory.
        **memories: ``offload_src`` and ``offload_dst``, JAX's names of memories; "device" and "pinned_host" if absent.
    """

    def texts(patterns: Iterable[str | re.Pattern[str]]) -> list[str]:
        return [f"re:{item.pattern}" if isinstance(item, re.Pattern) else item for item in patterns]

    extra = "".join(f", {key}={value!r}" for key, value in memories.items())
    return f"names(save={texts(save)!r}, offload={texts(offload)!r}{extra})"
