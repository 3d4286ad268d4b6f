"""Sentences about an inspected function that a reader of any report of it must know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def function_notes(function: str, stale: Sequence[str], takes_gradient: bool, hidden: Sequence[str]) -> Iterator[str]:
    """The notes of a function.

    Args:
        function: its name.
        stale: the functions of which JAX still holds an older trace.
        takes_gradient: whether it differentiates inside.
        hidden: the checkpoint names that only the rules of custom derivatives hold.
    """
    if stale:
        yield (
            f"JAX still holds an older trace of {', '.join(stale)}, from before it or what it calls was redefined: "
            "this report shows the new definition, but your next jit or grad may run the old one until "
            "jax.clear_caches()."
        )
    if takes_gradient:
        yield (
            f"{function} takes a gradient inside, and this report is of differentiating it once more: to see what that "
            "gradient itself saves, inspect the function that it is the gradient of."
        )
    if hidden:
        yield (
            f"{', '.join(map(repr, hidden))} {'is' if len(hidden) == 1 else 'are'} named inside a custom derivative "
            "rule, which is Python: checkpoint sites in there are out of reach."
        )


def remat3_asks_little(policy: str) -> str:
    """The note of a policy callable of the user's under jax_remat3."""
    return (
        f"jax_remat3 asks a policy about matmuls, convolutions and named values only: what {policy} says of other "
        "operations has no effect."
    )
