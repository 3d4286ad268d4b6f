"""Comparisons and timelines made by hand: what the pictures and tables are tested on, without the engine."""

from typing import NamedTuple

from remat_magic.records import (
    ComparisonRow,
    Life,
    LiveValue,
    Measurement,
    Moment,
    Timeline,
    Times,
    XlaBuffer,
    XlaMemory,
)
from tests.views_records import DOT, SIN, span


class Sheet(NamedTuple):
    """The device of a comparison."""

    name: str
    source: str


def row(policy, peak, recomputed, *, pareto=False, **changes):
    """A policy with a peak in MB and a recomputation in ms."""
    fields = {
        "at": "function",
        "saved_bytes": 20_000_000,
        "argument_bytes": 5_000_000,
        "offloaded_bytes": 0,
        "forward_flops": 10**12,
        "repeated_flops": recomputed * 10**9,
        "deferred_flops": 2,
        "recomputed_flops": recomputed * 10**9 + 2,
        "peak_bytes": peak * 10**6,
        "times": Times("A100", 0.010, 0.020 + recomputed / 1e3, recomputed / 1e3),
        "pareto": pareto,
    }
    return ComparisonRow(policy, **{**fields, **changes})


def rows():
    """Three on the front, one that is beaten, one that failed."""
    return (
        row("none", 90, 0, pareto=True, same_as=("as_written",)),
        row("dots_saveable", 50, 5, pareto=True),
        row("nothing_saveable", 20, 18, pareto=True),
        row("save_only_these_names('h')", 60, 9),
        ComparisonRow("my_policy", "function", error="my_policy raised KeyError when asked about dot_general."),
    )


def timeline(forward=20, backward=30, peak=22):
    """Residuals that pile up and go, a spike at the peak."""
    moments = []
    for number in range(forward + backward):
        half = "forward" if number < forward else "backward"
        residuals = 100 * min(number, (forward + backward - number) * forward // backward)
        moments.append(Moment(half, number, 300, residuals, 5000 if number == peak else 150, "sin", SIN))
    alive = (
        LiveValue("f32[6,200]", 4800, "temporary", "dot_general", None, DOT),
        *(LiveValue("f32[25]", 100, "residual", "cos", None, SIN) for _ in range(9)),
        LiveValue("f32[75]", 300, "argument", argument="params['w']"),
        LiveValue("", 64, "temporary", "scan", None, span(9, "lax.scan(body, x)")),
        LiveValue("f32[9]", 36, "temporary"),
        LiveValue("f32[2]", 8, "constant"),
    )
    lives = tuple(Life(peak, peak + 1, value) for value in alive)
    return Timeline("dots_saveable", "function", "loss", tuple(moments), peak, lives)


def xla_memory(forward=40, backward=60, peak=45):
    """What XLA would hold: less than the estimate, with a peak of its own; the rows add up to it."""
    held = [600 + 20 * min(step, forward) if step < peak else 600 + 12 * (forward + backward - step)
            for step in range(forward + backward)]  # fmt: skip
    alive = (
        XlaBuffer("dot.1", 3000, 40, 50, "fusion", "f32[6,125]", "temporary", "device", "jit(f)/dot_general", DOT),
        XlaBuffer("sin.1", 250, 3, 80, "fusion", "f32[25]", "saved", "device", "jit(f)/sin", SIN, span(4, "cos(x)")),
        XlaBuffer("sin.2", 250, 5, 78, "fusion", "f32[25]", "saved", "device", "jit(f)/sin", SIN, span(4, "cos(x)")),
        XlaBuffer("arrays_0_", 600, 0, 99, "parameter", "f32[150]", "argument", "device", "params['w']"),
        XlaBuffer("slot", 64, 45, 46, "copy", "f32[16]", "temporary", "VMEM"),
    )
    held[peak] = sum(buffer.nbytes for buffer in alive if buffer.space == "device")
    steps = tuple(f"step.{number}" for number in range(forward + backward))
    return XlaMemory(steps, tuple(held), peak, alive, forward)


def compiled(**changes):
    """A compilation for a device that is not here."""
    fields = {"device": "H100 SXM", "needed_bytes": 5000, "fits": True, "temp_bytes": 4500, "timeline": xla_memory()}
    return Measurement("dots_saveable", "function", **{**fields, **changes})
