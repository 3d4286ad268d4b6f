"""Scans nested under checkpoints. What is shown to the user for pasting is the source of these very functions."""

# Without annotations, as users write such functions: they are pasted into programs of theirs.
# ruff: noqa: ANN001, ANN201, ANN202
# pyright: reportMissingParameterType=false

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["scan_by_halves", "scan_in_segments"]


def scan_in_segments(f, init, xs, *, length, segment, reverse=False, inner=jax.lax.scan):
    """``jax.lax.scan``, with the carry saved once a segment, and each segment's steps computed again when needed."""
    whole = length // segment * segment  # what is left over is one shorter segment at the end

    def steps(carry, part, count=segment):
        return inner(f, carry, part, length=count, reverse=reverse)

    def segments(carry):
        parts = xs if whole == length else jax.tree.map(lambda x: x[:whole], xs)
        parts = jax.tree.map(lambda x: x.reshape(whole // segment, segment, *x.shape[1:]), parts)
        step = jax.checkpoint(steps, prevent_cse=False)
        carry, ys = jax.lax.scan(step, carry, parts, length=whole // segment, reverse=reverse)
        return carry, jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), ys)

    def rest(carry):
        part = jax.tree.map(lambda x: x[whole:], xs)
        return jax.checkpoint(lambda carry, part: steps(carry, part, length - whole))(carry, part)

    if whole == length:
        return segments(init)
    if reverse:
        carry, last = rest(init)
        carry, first = segments(carry)
    else:
        carry, first = segments(init)
        carry, last = rest(carry)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, last)


def scan_by_halves(f, init, xs, *, length, reverse=False):
    """``jax.lax.scan`` as two halves, each under ``jax.checkpoint`` and again two halves: a carry or two a level."""
    if length <= 3:
        return jax.lax.scan(f, init, xs, length=length, reverse=reverse)
    return scan_in_segments(f, init, xs, length=length, segment=length // 2, reverse=reverse, inner=scan_by_halves)
