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

# pyright: reportUnusedImport=false

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_magic.policies.keys import AS_WRITTEN, MIXED, NO_CHECKPOINT, OWN, ROWS, TABLE, Alternative, Key
from remat_magic.policies.objects import Resolved, describe, resolve
from remat_magic.records import Choice


def choices(names: Sequence[str] = ()) -> tuple[Choice, ...]:
    """The table of policies.

    Args:
        names: the checkpoint names of a function. Without any, factories stand in the table under their bare names,
            with the parameters they take; with some, every key is complete and can be used as it is.
    """
    complete = [row.key for row in TABLE if not row.parameters]
    if not names:
        return tuple(
            dataclasses.replace(row, code=Alternative(row.key).code if row.key in complete else "") for row in TABLE
        )
    keys = [Key((Alternative(row),)) for row in complete]
    keys.append(Key.by_name(names))
    if 1 < len(names) <= 8:
        keys += [Key.by_name((name,)) for name in names]
        keys += [Key((Alternative("save_any_names_but_these", (name,)),)) for name in names]
    keys.append(Key.by_name((), names))
    rows = []
    for key in keys:
        resolved = resolve(key, names)
        label = ROWS[resolved.key].label if resolved.key in ROWS else resolved.key
        rows.append(Choice(resolved.key, label, resolved.meaning, resolved.code))
    return tuple(rows)
