"""What XLA counts of programs that are compiled for a device: bytes of loops, and what it does not count."""

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from tests.programs import f32
from tests.test_elsewhere import H100, V5E, compiler


def counted(steps, device):
    """Of a recurrent cell, which saves a stack of what each step makes."""

    def cell(w, hidden, x):
        gate, new = jnp.split(jnp.concatenate([x, hidden], -1) @ w, 2, -1)
        hidden = jax.nn.sigmoid(gate) * hidden + jnp.tanh(new)
        return hidden, hidden

    def loss(w, x):
        return (jax.lax.scan(lambda hidden, x: cell(w, hidden, x), jnp.zeros_like(x[0]), x)[1] ** 2).mean()

    return rm.trace(loss, f32(256, 256), f32(steps, 256, 128)).measure("none", device=device)


def test_a_loop_of_twice_as_many_steps_moves_twice_as_many_bytes(cache):
    compiler(H100)
    few, many = (counted(steps, H100) for steps in (1024, 2048))
    assert not few.error
    assert many.bytes_accessed == pytest.approx(2 * few.bytes_accessed, rel=0.05)
    assert many.flops == pytest.approx(2 * few.flops, rel=0.01)


def test_what_xla_does_not_count_is_unknown(cache):
    """Convolutions on a GPU are cuDNN's, for which XLA counts nothing; on a TPU they are its own."""
    compiler(H100)
    compiler(V5E)

    def loss(w, x):
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (jnp.sin(x) ** 2).mean()

    trace = rm.trace(loss, f32(3, 3, 32, 32), f32(4, 32, 32, 32))
    there, tpu = (trace.measure("none", device=device) for device in (H100, V5E))
    assert not there.error
    assert (there.flops, there.bytes_accessed) == (None, None)
    assert tpu.flops > 2 * 2 * 3 * 3 * 32 * 32 * 4 * 30 * 30  # two convolutions at least, without their edges
