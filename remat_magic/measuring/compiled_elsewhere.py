"""What XLA's compiler for a device that need not be here says of a policy, as a measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from remat_magic import _jax, devices
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.measuring.answers import Stopped, collectives_of, failure, place_of, text_of
from remat_magic.measuring.elsewhere import compile_for
from remat_magic.measuring.xla_memory import with_texts
from remat_magic.records import Effort, Measurement, RematError, XlaMemory

__all__ = ["compile_elsewhere"]


def compile_elsewhere(
    facts: Facts,
    policy: Any,
    at: Any,
    device: Device,
    *,
    namespace: Mapping[str, Any] | None = None,
    effort: Effort = "full",
    seconds: float = 600.0,
    stop: Callable[[], bool] = lambda: False,
) -> Measurement:
    """What XLA says of a policy for a device that need not be here. Nothing is run.

    Raises:
        Stopped: ``stop`` said so.
    """
    assert device.target is not None
    measured = Measurement(
        text_of(policy),
        place_of(facts, at),
        device=device.name,
        devices_there=device.count,
        memory_bytes=device.memory_bytes,
        effort=effort,
    )
    if stop():
        raise Stopped
    doing = "lower"
    try:
        gradient = facts.engine.gradient(policy, at, namespace, platform=device.target.platform)
        measured = replace(measured, policy=gradient.policy, at=gradient.at)
        doing = "compile"
        answer = compile_for(device, gradient.lowered, effort=effort, seconds=seconds, stop=stop)
    except InterruptedError:
        raise Stopped from None
    except RematError as error:
        if _jax.calls_back(error):
            name = facts.engine.function_name
            error = RematError(
                f"{name} calls back into Python, as jax.debug.print does, which cannot be compiled for {device.name} "
                "where there is none: take the callbacks out."
            )
        return replace(measured, error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a policy or the system raises is the answer to the question
        task = f"{doing} {facts.engine.function_name} under {measured.policy} for {device.name}"
        return replace(measured, error=failure(task, error))
    timeline = answer.get("timeline")
    measured = replace(
        measured,
        compile_seconds=answer["seconds"],
        compiled_before=answer["kept"],
        devices=answer["devices"],
        timeline=None if timeline is None else _with_names(facts, with_texts(XlaMemory.from_dict(timeline))),
    )
    if "memory" not in answer:
        needed, available = answer.get("needed"), answer.get("available")
        if needed is None:
            task = f"compile {facts.engine.function_name} under {measured.policy} for {device.name}"
            return replace(measured, error=failure(task, RuntimeError(answer["error"])))
        return replace(measured, fits=False, needed_bytes=needed, available_bytes=available)
    memory = answer["memory"]
    measured = replace(
        measured,
        temp_bytes=memory["temp"],
        argument_bytes=memory["argument"],
        output_bytes=memory["output"],
        alias_bytes=memory["alias"],
        peak_bytes=memory.get("peak_memory"),
        host_bytes=sum(size for name, size in memory.items() if name.startswith("host_") and "alias" not in name),
        flops=answer.get("flops"),
        bytes_accessed=answer.get("bytes_accessed"),
        cycles=answer.get("cycles"),
        collectives=collectives_of(answer.get("collectives")),
        rematerialized=answer["rematerialized"],
    )
    # A compiler for TPUs refuses what is too big, one for GPUs compiles it.
    available = devices.usable_bytes(device) if device.target.platform == "cuda" else None
    total = measured.total_bytes
    if available is None or total is None:
        # For a TPU ``temp`` is more than what must fit: programs that grow are refused on the line of their peaks (on
        # both JAX lines within 5%, while the sum of sizes is 6 to 13% above). But a peak is of what is in VMEM as well,
        # which in small programs is most.
        sizes = [size for size in (total, measured.peak_bytes) if size]
        return replace(measured, fits=True, needed_bytes=min(sizes, default=None))
    largest = _jax.LARGEST_SHARE_OF_GPU
    more = largest if available < total <= available * largest / _jax.share_of_gpu() else None
    return replace(
        measured, fits=total <= available, needed_bytes=total, available_bytes=available, fits_with_share=more
    )


def _with_names(facts: Facts, memory: XlaMemory) -> XlaMemory:
    """The arguments under their names: the compiled program, of a function or a step, takes all arrays in a row."""
    leaves = facts.engine.inputs().arrays
    names = {f"{row}[{number}]": leaf.name for row in ("arrays", "args") for number, leaf in enumerate(leaves)}
    alive = (replace(buffer, op_name=names.get(buffer.op_name, buffer.op_name)) for buffer in memory.alive)
    return replace(memory, alive=tuple(alive))
