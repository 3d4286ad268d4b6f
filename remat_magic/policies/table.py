"""The rows of the table of checkpoint policies.

A new kind of policy is a row here, how its arguments are read and written in ``keys.Alternative``, and the object that
JAX takes for it (and how that is recognised) in ``objects``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from remat_magic.records import Choice, Parameter

OWN = "A policy of your own."
AS_WRITTEN = object()  # keep the checkpoint's own policy
NO_CHECKPOINT = object()  # take the checkpoint away
MIXED = "mixed"  # what goes for a key where places have policies of their own

JAX = jax.checkpoint_policies
MODULE = "jax.checkpoint_policies"
SOURCE, DESTINATION = "device", "pinned_host"  # the memories of JAX's own offloading examples

_NAMES = Parameter("names", "names")
MEMORIES = (Parameter("offload_src", "memory", SOURCE), Parameter("offload_dst", "memory", DESTINATION))


def _row(key: str, meaning: str, *parameters: Parameter, label: str = "", aliases: tuple[str, ...] = ()) -> Choice:
    return Choice(key, label or key, meaning, parameters=parameters, aliases=aliases)


TABLE = (
    _row("as_written", "The checkpoints and policies that the program itself has.", label="as written"),
    _row("none", "No checkpoint here: autodiff saves whatever its rules ask for."),
    _row("nothing_saveable", "Save no intermediate, recompute all (JAX's default when policy is None)."),
    _row("everything_saveable", "Save every intermediate that the derivatives read."),
    _row(
        "dots_saveable",
        "Save the outputs of matrix multiplications and convolutions, recompute the rest.",
        aliases=("checkpoint_dots",),
    ),
    _row(
        "dots_with_no_batch_dims_saveable",
        "Save the outputs of matrix multiplications without batch dimensions (weights times activations).",
        aliases=("checkpoint_dots_with_no_batch_dims",),
    ),
    _row(
        "offload_dot_with_no_batch_dims",
        "As dots_with_no_batch_dims_saveable, but move what is saved to another memory.",
        *MEMORIES,
    ),
    _row("save_only_these_names", "Save the values with these checkpoint names, recompute the rest.", _NAMES),
    _row("save_any_names_but_these", "Save every named value except these, recompute the rest.", _NAMES),
    _row(
        "save_anything_except_these_names",
        "Saves everything: in JAX today this factory ignores the names it is given.",
        _NAMES,
    ),
    _row(
        "save_and_offload_only_these_names",
        "Save some named values, move others to another memory, recompute the rest.",
        Parameter("names_which_can_be_saved", "names", ""),
        Parameter("names_which_can_be_offloaded", "names", ""),
        *MEMORIES,
    ),
    _row(
        "save_from_both_policies",
        "Save what either of two policies saves.",
        Parameter("policy_1", "policy"),
        Parameter("policy_2", "policy"),
    ),
    _row(
        "names",
        "Save, offload or recompute each named value.",
        Parameter("save", "names", ""),
        Parameter("offload", "names", ""),
        *MEMORIES,
        label="by name",
    ),
)
ROWS: dict[str, Choice] = {row.key: row for row in TABLE}
CANONICAL: dict[str, str] = {alias: row.key for row in TABLE for alias in (row.key, *row.aliases)}
PLAIN = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


def call(factory: str, names: Iterable[str]) -> str:
    """The key of a factory with names: ``save_only_these_names('h')``."""
    return f"{factory}({', '.join(map(repr, names))})"


def example(factory: str, names: Sequence[str]) -> str:
    """A call of a factory as a user could write it, with some of these names."""
    some = ", ".join(map(repr, names[:2])) or "'h'"
    if factory == "save_and_offload_only_these_names":
        return f"{factory}(names_which_can_be_saved=[], names_which_can_be_offloaded=[{some}])"
    if factory == "offload_dot_with_no_batch_dims":
        return f"{factory}(offload_src={SOURCE!r}, offload_dst={DESTINATION!r})"
    if factory == "names":
        return f"names(save=[{some}], offload=[])"
    if factory == "save_from_both_policies":
        return f"{factory}(dots_saveable, save_only_these_names({some}))"
    return f"{factory}({some})"
