"""Estimated times: a roofline over the kernels of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from remat_magic import _jax
from remat_magic.devices import THIS_CPU, Device, get
from remat_magic.facts.kernels import shares
from remat_magic.jaxprs.walk import LiveEquations, TypeOf
from remat_magic.records import Kernel, Offloading, Report, Times


def seconds(kernels: Iterable[Kernel], device: Device) -> tuple[float, bool]:
    """What kernels take on a device if each is limited by arithmetic, memory or its links, whichever is slowest.

    The roofline model (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009):
    ``times * max(flops / peak, bytes / bandwidth, sent / interconnect)`` of each, added up. No kernel reaches its peak,
    so this is what the device would need at least if each runs alone: a compiler may hide communication behind
    arithmetic. The second is whether all costs, trip counts and links were known; what is not known counts its bytes,
    and one run.
    """
    total, complete = 0.0, True
    for kernel in kernels:
        peak = device.peak_flops(kernel.dtype, kernel.unit)
        arithmetic = kernel.flops / peak if kernel.flops and peak else 0.0
        # A matmul of a dtype that the device has no figure for is not limited by memory alone.
        complete = complete and kernel.known and not (peak is None and kernel.unit == "matmul" and kernel.flops)
        complete = complete and not (kernel.sent and device.interconnect is None)
        link = kernel.sent / device.interconnect if device.interconnect else 0.0
        total += kernel.runs * max(arithmetic, kernel.bytes / device.memory_bandwidth, link)
    return total, complete


def of_equations(
    equations: Sequence[Any], programs: Iterable[Any], type_of: TypeOf, device: Device
) -> tuple[float, ...]:
    """What each equation of some programs takes, as its share of its kernel; a loop all of its turns, None nothing.

    Of what a kernel reads and writes each of its operations has a part, and a branch counts that takes most. So their
    sum is about that of the kernels.
    """
    parts: dict[int, Kernel] = {}
    for jaxpr in programs:
        parts |= shares(jaxpr, LiveEquations(jaxpr), type_of)
    known: dict[int, float] = {}

    def takes(eqn: Any) -> float:
        if id(eqn) not in known:
            if id(eqn) in parts:
                known[id(eqn)] = seconds([parts[id(eqn)]], device)[0]
            else:
                inside = [(body.times or 1) * sum(map(takes, body.jaxpr.eqns)) for body in _jax.bodies(eqn)]
                known[id(eqn)] = max(inside, default=0.0) if _jax.is_cond(eqn) else sum(inside)
        return known[id(eqn)]

    return tuple(0.0 if eqn is None else takes(eqn) for eqn in equations)


def offloading(report: Report, device: Device | None) -> Offloading:
    """Whether XLA moves to the host what a report's policy offloads; empty where it offloads nothing.

    A CPU has one memory. Compiled for accelerators, a scan moved just what its policy said, while of unrolled code most
    stayed on the device; of other programs, and devices, nothing is known.
    """
    offloaded = [row for row in report.residuals if row.kind == "offloaded" and row.nbytes]
    in_loops = [any(label.startswith("scan") for label in row.path) for row in offloaded]
    if not in_loops:
        return ""
    if not any(in_loops) or (device is not None and device.name == THIS_CPU):
        return "kept"
    return "moved" if all(in_loops) and device is not None else "unknown"


def _offload(report: Report, device: Device) -> float | None:
    """The seconds to the host and back, of what a report's policy offloads; None where the link is not known."""
    if not report.offloaded_bytes:
        return 0.0
    return 2 * report.offloaded_bytes / device.host_bandwidth if device.host_bandwidth else None


def added(report: Report, device: Device) -> float | None:
    """The seconds that a report's policy adds, recomputation and offloading; None where the link is not known."""
    offload = _offload(report, device)
    return None if offload is None else seconds(report.recomputed_kernels, device)[0] + offload


def times(report: Report, device: Device | str) -> Times:
    """The estimated times of both halves under the policy of a complete report.

    What is offloaded goes to the host and comes back: twice its bytes over the host's bandwidth, as if nothing else ran
    meanwhile.
    """
    device = get(device)
    forward, backward, again = (
        seconds(kernels, device)
        for kernels in (report.forward_kernels, report.backward_kernels, report.recomputed_kernels)
    )
    offload = _offload(report, device)
    return Times(
        device.name,
        forward[0],
        backward[0],
        again[0],
        offload,
        forward[1] and backward[1] and offload is not None and not report.backward_error,
    )
