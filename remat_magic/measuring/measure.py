"""What XLA makes of a policy: bytes, seconds of the compiled value and gradients; where it departs from the report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from remat_magic import _jax, devices, errors, units
from remat_magic.devices import Device
from remat_magic.engine.engine import Engine
from remat_magic.engine.signature import sharding_of
from remat_magic.facts.facts import Facts, Unknown, Variant
from remat_magic.jaxprs.walk import walk
from remat_magic.measuring.elsewhere import compile_for
from remat_magic.measuring.xla_memory import sizes_of, with_texts
from remat_magic.records import Collective, Effort, GradientDifference, Measurement, Note, RematError, XlaMemory


def failure(doing: str, error: BaseException) -> str:
    """One sentence on what failed."""
    if isinstance(error, RematError):
        return str(error)
    text = errors.one_line(errors.text_of(error), 4000)
    if "RESOURCE_EXHAUSTED" in text or "ut of memory" in text or isinstance(error, MemoryError):
        return f"out of memory: the device could not {doing}; choose a policy that saves less, or smaller inputs."
    first = text.split(". ")[0].rstrip(".")
    return f"JAX could not {doing}: {type(error).__name__}: {first[:400]}."


# --------------------------------------------------------------------------------------------------------------- inputs


def check_inputs(inputs: Any) -> None:
    """Raise RematError unless inputs are of one of the forms that :func:`arrays_for` takes."""
    if inputs is None or (isinstance(inputs, str) and inputs == "random"):
        return
    pair = isinstance(inputs, tuple) and len(inputs) == 2
    if not (pair and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], dict)):
        raise RematError(
            "inputs is None (compile only), 'random', or the pair (args, kwargs) of a call like the traced one, "
            "such as ((params, batch), {})."
        )


def arrays_for(engine: Engine, inputs: Any, *, alone: bool = False) -> list[Any] | None:
    """One array for each array leaf of the traced arguments, made up for ``"random"``; None where ``inputs`` is None.

    With ``alone`` for the gradient without the training step around it. RematError where structure or types differ.
    """
    if inputs is None:
        return None
    wanted = engine.inputs(alone=alone)
    if isinstance(inputs, str):
        generator = np.random.default_rng(0)
        return [_random(leaf.value, leaf.sharding, generator) for leaf in wanted.arrays]
    given = wanted.arrays_of(*inputs)
    for leaf, value in zip(wanted.arrays, given, strict=True):
        if isinstance(value, jax.ShapeDtypeStruct):
            raise RematError(f"the input {leaf.name} is a ShapeDtypeStruct, which has no values: pass inputs='random'.")
    return given


def shardings_for(arrays: Sequence[Any] | None) -> list[Any] | None:
    """Where each array is to stay; None for as it was when traced."""
    if arrays is None:
        return None
    return [sharding_of(array) for array in arrays]


def _random(aval: Any, sharding: Any, generator: np.random.Generator) -> Any:
    """Normal numbers; for integers zeros, which are safe as indices; False; keys made of zeros.

    The numbers are scaled down by the root of the largest dimension, so that a chain of matrix products neither
    overflows nor dies away.
    """
    if _jax.is_key(aval):
        array = _jax.zero_keys(aval)
    elif jnp.issubdtype(aval.dtype, jnp.inexact):
        values = generator.standard_normal(aval.shape, np.float32)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            values = values + 1j * generator.standard_normal(aval.shape, np.float32)
        array = (np.asarray(values) / max(1, *aval.shape, 1) ** 0.5).astype(aval.dtype)
    else:
        array = np.zeros(aval.shape, aval.dtype)
    return jax.device_put(array, _jax.on_devices_here(sharding))


# ----------------------------------------------------------------------------------- for a device that need not be here


_UNCHECKED = (
    "Compiled without the checks of equinox.error_if, as with EQX_ON_ERROR=off: they call Python, which no device that "
    "is not here can."
)


def _compile_elsewhere(
    variant: Variant, device: Device, request: MeasureRequest, stop: Callable[[], bool]
) -> Measurement:
    """What XLA says of a choice for a device that need not be here. Nothing is run."""
    assert device.target is not None
    name = variant.engine.primal.name

    def failed(doing: str, error: Exception) -> Measurement:
        return replace(measured, error=failure(f"{doing} {name} under {measured.policy} for {device.name}", error))

    measured = Measurement(
        variant.selection.policy,
        variant.selection.at,
        device=device.name,
        devices_there=device.count,
        memory_bytes=device.memory_bytes,
        effort=request.effort,
    )
    doing = "lower"
    try:
        gradient = variant.retrace.gradient(platform=device.target.platform, donate=variant.selection.donate)
        checked = any(_jax.is_check(eqn) for _, eqn in walk(gradient.jaxpr, once=True))
        findings = (Note("checks-left-out", _UNCHECKED),) if checked else ()
        measured = replace(measured, findings=findings)
        doing = "compile"
        answer = compile_for(device, gradient.lowered, effort=request.effort, seconds=request.seconds, stop=stop)
    except RematError as error:
        if _jax.calls_back(error):
            error = RematError(
                f"{name} calls back into Python, as jax.debug.print does, which cannot be compiled for {device.name} "
                "where there is none: take the callbacks out."
            )
        return replace(measured, error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a policy or the system raises is the answer to the question
        return failed(doing, error)
    timeline = answer.get("timeline")
    measured = replace(
        measured,
        compile_seconds=answer["seconds"],
        compiled_before=answer["cached"],
        devices=answer["devices"],
        timeline=None if timeline is None else _with_names(variant.engine, with_texts(XlaMemory.from_dict(timeline))),
    )
    if "memory" not in answer:
        if "needed" not in answer:
            return failed("compile", RuntimeError(answer["error"]))
        return replace(measured, fits=False, needed_bytes=answer["needed"], available_bytes=answer["available"])
    memory = answer["memory"]
    host_bytes = sum(size for name, size in memory.items() if name.startswith("host_") and "alias" not in name)
    measured = replace(
        _counted(measured, memory, answer), host_bytes=host_bytes, rematerialized=answer["rematerialized"]
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


def _with_names(engine: Engine, memory: XlaMemory) -> XlaMemory:
    """The arguments under their names: the compiled program, of a function or a step, takes all arrays in a row."""
    leaves = engine.inputs().arrays
    names = {f"{row}[{number}]": leaf.name for row in ("arrays", "args") for number, leaf in enumerate(leaves)}
    alive = (replace(buffer, op_name=names.get(buffer.op_name, buffer.op_name)) for buffer in memory.alive)
    return replace(memory, alive=tuple(alive))


# ------------------------------------------------------------------------------------------------------- where JAX runs


# A scheduler that orders for parallelism lets temporary memory ignore checkpointing. On two cores neither jax 0.10.2
# nor 0.12.0.1 takes it, whatever this option says: both then compile what they compile without it.
_ON_CPU: dict[str, str | bool] = {"xla_cpu_enable_concurrency_optimized_scheduler": False}


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """How to measure, as for ``Trace.measure``; ``named`` is the device that is given, if one is.

    ``elsewhere`` is that device where it is compiled for as if there were none here. RematError as ``Trace.measure``.
    """

    inputs: Any = None
    runs: int = 5
    device: str | Device | None = None
    effort: Effort = "full"
    seconds: float = 600.0
    named: Device | None = field(init=False)
    elsewhere: Device | None = field(init=False)

    def __post_init__(self) -> None:
        """Check them."""
        check_inputs(self.inputs)
        if self.effort not in get_args(Effort):
            raise RematError(f"effort={self.effort!r} is not known: give 'full' or 'quick'.")
        if self.runs < 1:
            raise RematError(f"runs={self.runs} is too few: give 1 or more, or inputs=None.")
        object.__setattr__(self, "elsewhere", elsewhere(self.device, self.inputs))
        object.__setattr__(self, "named", None if self.device is None else devices.get(self.device))


def measure(
    choice: Variant | Unknown, request: MeasureRequest, stop: Callable[[], bool] = lambda: False
) -> Measurement:
    """``Trace.measure``: what was measured; where a step failed, ``error`` says so and what came before it stays.

    Where ``stop`` returns True, the compiler of a device that need not be here is ended. The trace's lock is held while
    lowering only.
    """
    if isinstance(choice, Unknown):
        return Measurement(choice.policy, choice.at, error=choice.error)
    if request.elsewhere is not None:
        return _compile_elsewhere(choice, request.elsewhere, request, stop)
    try:
        arrays = arrays_for(choice.engine, request.inputs)
    except Exception as error:  # noqa: BLE001 - the user's arrays, or memory for ours: said, not raised
        return Measurement(choice.selection.policy, choice.selection.at, error=failure("make the inputs", error))
    return _measure_here(choice, arrays, request)


def compiler_of(facts: Facts, device: str | Device | None) -> Callable[[Any, str], Measurement] | None:
    """What compiles a policy at a place for a device, None for where JAX runs; None where no compiler can tell.

    XLA for CPUs follows a policy on the newest JAX, and in scans. On anything else JAX is not made to look for devices.
    """
    named = None if device is None else devices.get(device)
    if named is not None and not named.measured:
        if not named.compiles_here:
            return None
    elif not (_jax.runs_on_cpu() and (_jax.FOLLOWS_POLICIES or _saves_in_scans(facts))):
        return None
    request = MeasureRequest(device=named)
    return lambda policy, at: measure(facts.choose(policy, at), request)


def _saves_in_scans(facts: Facts) -> bool:
    """Whether almost all that is saved without a checkpoint is stacked by scans."""
    try:
        saved = [row for row in facts.under("none").preview.residuals if row.kind == "intermediate"]
    except RematError:
        return False
    stacked = (row.nbytes for row in saved if any(part.startswith("scan") for part in row.path))
    return sum(stacked) >= 0.9 * sum(row.nbytes for row in saved)


def _measure_here(variant: Variant, arrays: Sequence[Any] | None, request: MeasureRequest) -> Measurement:
    """:func:`measure` where JAX runs, on the array leaves themselves, or on none."""
    engine, selection, named = variant.engine, variant.selection, request.named
    measured = Measurement(selection.policy, selection.at, devices_there=named.count if named else 1)
    doing = "lower"
    try:
        if named is not None:
            named.check_mesh(max(map(_jax.devices_of, _shardings(engine, arrays)), default=1))
        gradient = variant.retrace.gradient(shardings_for(arrays), donate=variant.selection.donate)
        doing = "compile"
        start = time.perf_counter()
        compiled: Any = compile_for_memory(gradient.lowered, _platform(engine, arrays))
        seconds = time.perf_counter() - start
        modules = _or_none(lambda: _jax.modules_of(compiled.runtime_executable().hlo_modules()))
        measured = replace(_numbers(measured, compiled, modules), compile_seconds=seconds)
        measured = replace(measured, findings=offload_note(gradient.forward.residual_types, modules))
        if arrays is not None:
            doing = "run"
            first = _first(_devices(compiled))
            before = _jax.most_allocated(first)
            times = _timed(compiled, arrays, gradient.donated, request.runs)
            measured = replace(measured, run_seconds=statistics.median(times), runs=request.runs)
            if (most := _jax.most_allocated(first)) is not None and most > (before or 0):
                measured = replace(measured, allocated_bytes=most)
    except Exception as error:  # noqa: BLE001 - whatever XLA or a policy raises is the answer to the question
        return replace(measured, error=failure(f"{doing} {engine.primal.name} under {measured.policy}", error))
    return measured


def elsewhere(device: str | Device | None, inputs: Any) -> Device | None:
    """The device to compile for as if there were none; None to compile, and perhaps run, where JAX runs.

    Also for one that is here, unless it is to be run: only so is it known whether the program fits, and what is live.
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


def _platform(engine: Engine, arrays: Sequence[Any] | None) -> str:
    """Where it will run: where an argument stays, else where JAX puts what stays nowhere."""
    for sharding in _shardings(engine, arrays):
        for device in getattr(sharding, "device_set", ()):
            return device.platform
    return _jax.default_device().platform


def _shardings(engine: Engine, arrays: Sequence[Any] | None) -> list[Any]:
    """Where the arguments stay: the given ones, else the traced ones."""
    return shardings_for(arrays) or [leaf.sharding for leaf in engine.inputs().arrays]


def _numbers(
    measured: Measurement, compiled: jax.stages.Compiled, modules: Sequence[_jax.Module] | None
) -> Measurement:
    """What the executable says of itself."""
    counted = _counted(measured, sizes_of(_or_none(compiled.memory_analysis)), _jax.xla_counts(modules)._asdict())
    devices = _devices(compiled)
    first = _first(devices)
    kind = first.device_kind
    measured = replace(
        counted,
        device=first.platform if kind.lower() == first.platform else f"{first.platform} {kind}",
        devices=max(1, len(devices)),
        simulated=_are_simulated(devices),
    )
    # Whether it fits in a GPU that is here, by what JAX's allocator gives out.
    limit, total = _jax.memory_limit(first), measured.total_bytes
    if first.platform != "gpu" or limit is None or total is None:
        return measured
    return replace(measured, fits=total <= limit, needed_bytes=total, available_bytes=limit)


def _counted(measured: Measurement, sizes: Mapping[str, int], counts: Mapping[str, Any]) -> Measurement:
    """With the bytes of a compiled program by their names, and with what XLA counts in it."""
    by_kind: Mapping[str, tuple[int, int]] | None = counts.get("collectives")
    collectives = None if by_kind is None else tuple(Collective(kind, *many) for kind, many in sorted(by_kind.items()))
    return replace(
        measured,
        temp_bytes=sizes.get("temp"),
        argument_bytes=sizes.get("argument"),
        output_bytes=sizes.get("output"),
        alias_bytes=sizes.get("alias"),
        peak_bytes=sizes.get("peak_memory"),
        flops=counts.get("flops"),
        bytes_accessed=counts.get("bytes_accessed"),
        collectives=collectives,
    )


def _or_none(analysis: Callable[[], Any]) -> Any:
    try:
        return analysis()
    except Exception:  # noqa: BLE001 - backends without this analysis raise errors of their own: unknown
        return None


def _devices(compiled: jax.stages.Compiled) -> set[Any]:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return {device for sharding in shardings for device in getattr(sharding, "device_set", ())}


def _first(devices: Collection[Any]) -> Any:
    return min(devices, key=lambda device: device.id, default=None) or _jax.default_device()


def _are_simulated(devices: Collection[Any]) -> bool:
    """Whether several devices are one machine's processors, as CPU devices of one process are."""
    processes = {device.process_index for device in devices}
    return len(devices) > len(processes) and all(device.platform == "cpu" for device in devices)


def _timed(compiled: jax.stages.Compiled, arrays: Sequence[Any], donated: Sequence[int], runs: int) -> list[float]:
    """Seconds of each run, after one that is not timed; results are dropped at once, so that one set is live.

    What a step writes over are copies, so that the user's arrays stay.
    """
    times = []
    for _ in range(1 + runs):
        given = list(arrays)
        for position in donated:
            given[position] = jnp.copy(given[position])
        jax.block_until_ready(given)
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        times.append(time.perf_counter() - start)
    return times[1:]


# ------------------------------------------------------------------ where the compiled program departs from the report


def offload_note(residual_types: Sequence[Any], modules: Sequence[_jax.Module] | None) -> tuple[Note, ...]:
    """Whether nothing of the residuals that a policy offloads is in the host's memory in the compiled program."""
    moved = sum(_jax.nbytes(aval) for aval in residual_types if _jax.memory_space(aval))
    if not moved or not modules or any(row.on_host for module in modules for row in module.instructions):
        return ()
    sentence = (
        f"XLA keeps on the device what the policy offloads: nothing of its {units.nbytes(moved)} is in the host's "
        "memory in the compiled program, so that they take as much as if they were saved."
    )
    return (Note("offload-kept", sentence),)


# ------------------------------------------------------------- whether a policy leaves values and gradients as they are


def check_gradients(
    facts: Facts, policies: Iterable[Any], inputs: Any, at: Any, namespace: Mapping[str, Any] | None
) -> tuple[GradientDifference, ...]:
    """``Trace.check_gradients``."""
    check_inputs(inputs)
    if inputs is None:
        raise RematError("gradients are compared on values: pass inputs='random' or the pair (args, kwargs).")
    engine, alone = facts.engine, isinstance(inputs, str)
    arrays, reference, sentence = list[Any](), list[np.ndarray[Any, Any]](), ""
    try:
        arrays = arrays_for(engine, inputs, alone=alone) or []
        without = facts.under("none", dict.fromkeys(at, "none") if isinstance(at, Mapping) else at)
        reference = _run(without, arrays, alone)
    except Exception as error:  # noqa: BLE001 - said for each policy
        sentence = failure(f"run {engine.primal.name} without the checkpoint", error)

    def difference(variant: Variant | Unknown) -> GradientDifference:
        if isinstance(variant, Unknown):
            return GradientDifference(variant.policy, variant.at, error=sentence or variant.error)
        policy, at = variant.selection.policy, variant.selection.at
        if sentence:
            return GradientDifference(policy, at, error=sentence)
        try:
            values = _run(variant, arrays, alone)
            return _difference(policy, at, _names(engine, len(values), alone), values, reference)
        except Exception as error:  # noqa: BLE001 - whatever the policy or XLA raises is the answer
            return GradientDifference(policy, at, error=failure(f"run {engine.primal.name} under {policy}", error))

    return tuple(difference(facts.choose(policy, at, namespace)) for policy in policies)


def _run(variant: Variant, arrays: Sequence[Any], alone: bool) -> list[np.ndarray[Any, Any]]:
    """All that the program returns, on the host."""
    gradient = variant.retrace.gradient(shardings_for(arrays), alone=alone)
    given = [jnp.copy(array) if number in gradient.donated else array for number, array in enumerate(arrays)]
    return list(map(_on_host, gradient.lowered.compile()(*given)))


def _on_host(result: Any) -> np.ndarray[Any, Any]:
    if _jax.is_key(result):
        result = jax.random.key_data(result)
    array = np.asarray(result)
    # bfloat16 and its like subtract in their own precision.
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _names(engine: Engine, count: int, alone: bool) -> list[str]:
    inputs = engine.inputs(alone=alone).arrays
    of_gradient = alone or engine.step is None
    gradients = [f"the gradient of {leaf.name}" for leaf in inputs if leaf.differentiated and of_gradient]
    outputs = count - len(gradients)
    return [*("the output" if outputs == 1 else f"output {number}" for number in range(outputs)), *gradients]


_Arrays = Sequence[np.ndarray[Any, Any]]


def _difference(policy: str, at: str, names: Sequence[str], values: _Arrays, reference: _Arrays) -> GradientDifference:
    absolute, where, index = 0.0, "", ()
    relative, relative_where = 0.0, ""
    for name, array, without in zip(names, values, reference, strict=True):
        if not array.size:
            continue
        apart = _apart(array, without)
        worst = np.unravel_index(int(np.argmax(apart)), apart.shape)
        largest = float(apart[worst])
        if largest > absolute:
            absolute, where, index = largest, name, tuple(int(i) for i in worst)
        finite = np.abs(without[np.isfinite(without)])
        scale = float(finite.max()) if finite.size else 0.0
        scaled = 0.0 if largest == 0 else largest / scale if scale else float("inf")
        if scaled > relative:
            relative, relative_where = scaled, name
    return GradientDifference(policy, at, absolute, where, index, relative, relative_where)


def _apart(array: np.ndarray[Any, Any], without: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Distances of the elements; what is equal or NaN on both sides is none, NaN on one side is infinitely far."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(array - without)
    same = (array == without) | (np.isnan(array) & np.isnan(without))
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
