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

TABLE = (
    Choice("as_written", "as written", "The checkpoints and policies that the program itself has."),
    Choice("none", "none", "No checkpoint here: autodiff saves whatever its rules ask for."),
    Choice(
        "nothing_saveable",
        "nothing_saveable",
        "Save no intermediate, recompute all (JAX's default when policy is None).",
    ),
    Choice("everything_saveable", "everything_saveable", "Save every intermediate that the derivatives read."),
    Choice(
        "dots_saveable",
        "dots_saveable",
        "Save the outputs of matrix multiplications and convolutions, recompute the rest.",
        aliases=("checkpoint_dots",),
    ),
    Choice(
        "dots_with_no_batch_dims_saveable",
        "dots_with_no_batch_dims_saveable",
        "Save the outputs of matrix multiplications without batch dimensions (weights times activations).",
        aliases=("checkpoint_dots_with_no_batch_dims",),
    ),
    Choice(
        "offload_dot_with_no_batch_dims",
        "offload_dot_with_no_batch_dims",
        "As dots_with_no_batch_dims_saveable, but move what is saved to another memory.",
        parameters=MEMORIES,
    ),
    Choice(
        "save_only_these_names",
        "save_only_these_names",
        "Save the values with these checkpoint names, recompute the rest.",
        parameters=(_NAMES,),
    ),
    Choice(
        "save_any_names_but_these",
        "save_any_names_but_these",
        "Save every named value except these, recompute the rest.",
        parameters=(_NAMES,),
    ),
    Choice(
        "save_anything_except_these_names",
        "save_anything_except_these_names",
        "Saves everything: in JAX today this factory ignores the names it is given.",
        parameters=(_NAMES,),
    ),
    Choice(
        "save_and_offload_only_these_names",
        "save_and_offload_only_these_names",
        "Save some named values, move others to another memory, recompute the rest.",
        parameters=(
            Parameter("names_which_can_be_saved", "names", ""),
            Parameter("names_which_can_be_offloaded", "names", ""),
            *MEMORIES,
        ),
    ),
    Choice(
        "save_from_both_policies",
        "save_from_both_policies",
        "Save what either of two policies saves.",
        parameters=(Parameter("policy_1", "policy"), Parameter("policy_2", "policy")),
    ),
    Choice(
        "names",
        "by name",
        "Save, offload or recompute each named value.",
        parameters=(Parameter("save", "names", ""), Parameter("offload", "names", ""), *MEMORIES),
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
