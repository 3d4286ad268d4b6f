"""What XLA makes of a policy: bytes and seconds of the compiled value and gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp

from remat_magic import _jax, devices
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.measuring.answers import Stopped, collectives_of, failure, place_of, text_of
from remat_magic.measuring.compiled_elsewhere import compile_elsewhere
from remat_magic.measuring.departures import departures
from remat_magic.measuring.inputs import arrays_for, check_inputs, shardings_for
from remat_magic.records import Effort, Measurement, RematError

__all__ = ["check_effort", "compile_for_memory", "elsewhere", "measure", "measure_on"]

# A scheduler that orders for parallelism lets temporary memory ignore checkpointing. On two cores neither jax 0.10.2
# nor 0.12.0.1 takes it, whatever this option says: both then compile what they compile without it.
_ON_CPU: dict[str, str | bool] = {"xla_cpu_enable_concurrency_optimized_scheduler": False}


def measure(
    facts: Facts,
    policy: Any = "as_written",
    at: Any = None,
    *,
    inputs: Any = None,
    runs: int = 5,
    namespace: Mapping[str, Any] | None = None,
    device: str | Device | None = None,
    effort: Effort = "full",
    seconds: float = 600.0,
) -> Measurement:
    """``Trace.measure``: what was measured; where a step failed, ``error`` says so and what came before it stays."""
    check_inputs(inputs)
    check_effort(effort)
    if runs < 1:
        raise RematError(f"runs={runs} times nothing: ask for one run at least, or for inputs=None.")
    if (target := elsewhere(device, inputs)) is not None:
        return compile_elsewhere(facts, policy, at, target, namespace=namespace, effort=effort, seconds=seconds)
    try:
        arrays = arrays_for(facts, inputs)
    except Exception as error:  # noqa: BLE001 - the user's arrays, or memory for ours: told, not raised
        return Measurement(text_of(policy), place_of(facts, at), error=failure("make the inputs", error))
    named = None if device is None else devices.get(device)
    return measure_on(facts, policy, at, arrays=arrays, runs=runs, namespace=namespace, named=named)


def measure_on(
    facts: Facts,
    policy: Any,
    at: Any,
    *,
    arrays: Sequence[Any] | None,
    runs: int,
    namespace: Mapping[str, Any] | None = None,
    named: Device | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Measurement:
    """:func:`measure` on the array leaves themselves, or on none.

    ``named`` is the device that was asked for, if any, as many as are here. ``stop`` is asked between the steps:
    lowering, compiling, each run. The trace's lock is held while lowering only.

    Raises:
        Stopped: ``stop`` said so.
    """

    def unless_stopped() -> None:
        if stop():
            raise Stopped

    measured = Measurement(text_of(policy), place_of(facts, at), devices_there=named.count if named else 1)
    doing = "lower"
    try:
        if named is not None:
            named.check_mesh(max(map(_jax.devices_of, _shardings(facts, arrays)), default=1))
        gradient = facts.engine.gradient(policy, at, namespace, shardings_for(arrays))
        measured = replace(measured, policy=gradient.policy, at=gradient.at)
        unless_stopped()
        doing = "compile"
        start = time.perf_counter()
        compiled = compile_for_memory(gradient.lowered, _platform(facts, arrays))
        seconds = time.perf_counter() - start
        unless_stopped()
        modules = _modules(compiled)
        measured = replace(_numbers(measured, compiled, modules), compile_seconds=seconds)
        saved_bytes = facts.report(policy, at, namespace).saved_bytes
        measured = replace(measured, findings=departures(gradient, modules, measured, saved_bytes))
        if arrays is not None:
            doing = "run"
            times = _timed(compiled, arrays, gradient.donated, runs, unless_stopped)
            measured = replace(measured, run_seconds=statistics.median(times), runs=runs)
    except Stopped:
        raise
    except RematError as error:
        return replace(measured, error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever XLA or a policy raises is the answer to the question
        return replace(measured, error=failure(f"{doing} {facts.engine.function_name} under {measured.policy}", error))
    return measured


def elsewhere(device: str | Device | None, inputs: Any) -> Device | None:
    """The device to compile for as if there were none; None to compile, and perhaps run, where JAX runs.

    Also for one that is here, unless it is to be run: only so is it told whether the program fits, and what it holds.

    Raises:
        RematError: no such device; it cannot be compiled for here, or there are inputs to run it on.
    """
    if device is None:
        return None
    wanted = devices.get(device)
    if wanted.measured:
        return None
    if inputs is None and wanted.compiles_here:
        return wanted
    here = devices.how_many_here(wanted)
    if here >= wanted.count:
        return None
    if inputs is not None and here:
        raise RematError(
            f"{wanted.name} to run on is {wanted.count} devices, and there {'is' if here == 1 else 'are'} {here} here: "
            f"make a mesh of no more than {here} and name {wanted.one!r}, or leave out inputs= to compile only."
        )
    if not wanted.compiles_here:
        raise RematError(wanted.why_not)
    raise RematError(f"there is no {wanted.name} here to run on: leave out inputs=, and it is compiled only.")


def compile_for_memory(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compile with the scheduler that heeds memory."""
    return lowered.compile(compiler_options=_ON_CPU) if platform == "cpu" else lowered.compile()


def _platform(facts: Facts, arrays: Sequence[Any] | None) -> str:
    """Where it will run: where an argument stays, else where JAX puts what stays nowhere."""
    for sharding in _shardings(facts, arrays):
        for device in getattr(sharding, "device_set", ()):
            return device.platform
    return _jax.default_device().platform


def _shardings(facts: Facts, arrays: Sequence[Any] | None) -> list[Any]:
    """Where the arguments stay: the given ones, else the traced ones."""
    return shardings_for(arrays) or [leaf.sharding for leaf in facts.engine.inputs().arrays]


def _modules(compiled: jax.stages.Compiled) -> tuple[_jax.Module, ...] | None:
    """The optimized modules of an executable; None where the backend does not give them."""
    executable: Any = compiled
    optimized = _or_none(lambda: executable.runtime_executable().hlo_modules())
    return None if optimized is None else _jax.modules_of(optimized)


def _numbers(
    measured: Measurement, compiled: jax.stages.Compiled, modules: Sequence[_jax.Module] | None
) -> Measurement:
    """What the executable says of itself."""
    memory = _or_none(compiled.memory_analysis)
    counted = _jax.xla_counts(modules)
    devices = _devices(compiled)
    first = min(devices, key=lambda device: device.id, default=None) or _jax.default_device()
    kind = first.device_kind
    measured = replace(
        measured,
        device=first.platform if kind.lower() == first.platform else f"{first.platform} {kind}",
        devices=max(1, len(devices)),
        simulated=_are_simulated(devices),
        temp_bytes=getattr(memory, "temp_size_in_bytes", None),
        argument_bytes=getattr(memory, "argument_size_in_bytes", None),
        output_bytes=getattr(memory, "output_size_in_bytes", None),
        alias_bytes=getattr(memory, "alias_size_in_bytes", None),
        peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
        flops=counted.flops,
        bytes_accessed=counted.bytes_accessed,
        collectives=collectives_of(counted.collectives),
    )
    return _with_limit(measured, first)


def _with_limit(measured: Measurement, first: Any) -> Measurement:
    """Whether it fits in a GPU that is here, by what JAX's allocator gives out."""
    limit, total = _jax.memory_limit(first), measured.total_bytes
    if first.platform != "gpu" or limit is None or total is None:
        return measured
    return replace(measured, fits=total <= limit, needed_bytes=total, available_bytes=limit)


def _or_none(analysis: Callable[[], Any]) -> Any:
    try:
        return analysis()
    except Exception:  # noqa: BLE001 - backends without this analysis raise errors of their own: unknown
        return None


def _devices(compiled: jax.stages.Compiled) -> set[Any]:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return {device for sharding in shardings for device in getattr(sharding, "device_set", ())}


def _are_simulated(devices: Collection[Any]) -> bool:
    """Whether several devices are one machine's processors, as CPU devices of one process are."""
    processes = {device.process_index for device in devices}
    return len(devices) > len(processes) and all(device.platform == "cpu" for device in devices)


def _timed(
    compiled: jax.stages.Compiled,
    arrays: Sequence[Any],
    donated: Sequence[int],
    runs: int,
    unless_stopped: Callable[[], None],
) -> list[float]:
    """Seconds of each run, after one that is not timed; results are dropped at once, so that one set is held.

    What a step writes over are copies, so that the user's arrays stay.
    """
    times = []
    for _ in range(1 + runs):
        given = list(arrays)
        for position in donated:
            given[position] = jnp.copy(given[position])
        jax.block_until_ready(given)
        unless_stopped()
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        times.append(time.perf_counter() - start)
    return times[1:]


def check_effort(effort: str) -> None:
    """See that it is a known one.

    Raises:
        RematError: it is not.
    """
    if effort not in get_args(Effort):
        raise RematError(f"effort={effort!r} is no effort of a compiler: give 'full' or 'quick'.")
