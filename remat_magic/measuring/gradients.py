"""Whether a policy leaves values and gradients as they are, as it must."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_magic import _jax
from remat_magic.engine.engine import Engine
from remat_magic.facts.facts import Facts, Unknown, Variant
from remat_magic.measuring.measure import arrays_for, check_inputs, failure, shardings_for
from remat_magic.records import GradientDifference, RematError


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
