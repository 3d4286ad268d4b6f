"""Measuring on several devices that are named and here: it runs on them, and is not told that there are none.

No accelerator was at hand. The devices are a CPU's, eight that XLA simulates, of which JAX is made to say that they are
of an accelerator's kind: what is chosen, counted and refused is tested so, and no accelerator's own bytes or seconds.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from remat_magic import _jax, devices
from remat_magic.records import RematError
from tests.eight_devices import eight
from tests.programs import f32

H100, V5E = "NVIDIA H100 80GB HBM3", "TPU v5 lite"


@pytest.fixture
def kind(monkeypatch):
    """Makes JAX say that its devices are of a kind, of which there is no compiler here unless it is asked for."""

    def pretend(kind, compiles=False):
        monkeypatch.setattr(type(jax.devices()[0]), "device_kind", property(lambda _: kind))
        monkeypatch.setattr(devices.device, "_is_installed", lambda _: compiles)

    return pretend


def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).sum()


def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


def spread(size, kind=AxisType.Auto, abstract=False):
    """The arguments, each device with a part of the batch, on a mesh of so many devices or of their number alone."""
    if abstract:
        mesh = AbstractMesh((size,), ("data",), axis_types=(kind,))
    else:
        mesh = jax.make_mesh((size,), ("data",), devices=jax.devices()[:size], axis_types=(kind,))
    weights, batch = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in (((32, 32), P()), ((64, 32), P("data")))
    )
    return weights, batch


@eight
@pytest.mark.parametrize(
    ("name", "called", "function", "compiles"), [("H100 SXM x8", H100, loss, False), ("TPU v5e:2x4", V5E, step, True)]
)
def test_it_runs_on_those_that_are_named_and_here(kind, name, called, function, compiles):
    """The bytes are those of the same program that is given no name; each device has an eighth of the batch."""
    kind(called, compiles)
    args = spread(8)
    trace = rm.trace(function, *args)
    measured, unnamed = trace.measure("none", inputs="random", device=name, runs=1), trace.measure("none")
    assert measured.error == ""
    assert (measured.devices, measured.devices_there, measured.device) == (8, 8, f"cpu {called}")
    assert measured.run_seconds > 0
    assert measured.argument_bytes == unnamed.argument_bytes == 32 * 32 * 4 + 64 * 32 * 4 // 8
    assert measured.temp_bytes == unnamed.temp_bytes
    arrays = tuple(jax.device_put(jnp.ones(arg.shape), arg.sharding) for arg in args)
    assert trace.measure("none", inputs=(arrays, {}), device=name, runs=1).devices == 8


def test_what_is_compiled_for_a_gpu_that_is_here_fits_or_not_by_what_its_allocator_gives_out(monkeypatch):
    """JAX says that there is a GPU, and how much it can have: just as much as the program needs, and one byte less."""
    trace = rm.trace(loss, f32(8, 8), f32(8, 8))
    needed = trace.measure("none").total_bytes
    assert trace.measure("none").fits is None  # on a CPU nothing says how much there is
    monkeypatch.setattr(type(jax.devices()[0]), "platform", "gpu")
    for limit in (needed, needed - 1):
        monkeypatch.setattr(_jax, "memory_limit", lambda _, limit=limit: limit)
        measured = trace.measure("none", inputs="random", runs=1)
        assert (measured.error, measured.needed_bytes, measured.available_bytes) == ("", needed, limit)
        assert measured.fits == (limit == needed)


@eight
def test_without_its_compiler_what_is_here_is_compiled_where_it_would_run(kind):
    kind(H100)
    measured = rm.trace(loss, *spread(8)).measure("none", device="H100 SXM x8")
    assert (measured.error, measured.devices, measured.devices_there, measured.runs) == ("", 8, 8, 0)


@eight
def test_fewer_than_there_are_will_do(kind):
    kind(H100)
    assert rm.trace(loss, *spread(4)).measure("none", inputs="random", device="H100 SXM x4", runs=1).devices == 4
    on_one = rm.trace(loss, f32(32, 32), f32(64, 32)).measure("none", inputs="random", device="H100 SXM x8", runs=1)
    assert (on_one.error, on_one.devices, on_one.devices_there) == ("", 1, 8)  # the program is on no mesh
    assert rm.trace(loss, *spread(8)).measure("none", inputs="random", device="H100 SXM", runs=1).devices == 8


@eight
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_names_alone_is_put_on_those_that_are_here(kind, axes):
    kind(V5E)
    trace = rm.trace(loss, *spread(8, axes, abstract=True))
    measured = trace.measure("none", inputs="random", device="TPU v5e:2x4", runs=1)
    assert (measured.error, measured.devices, measured.runs) == ("", 8, 1)
    too_many = rm.trace(loss, *spread(16, axes, abstract=True)).measure("none", inputs="random", device="TPU v5e")
    assert too_many.error == (
        "the mesh of the arguments has 16 devices, and there are 8 here to run on: leave out inputs=, and compile for "
        "a device by name (device=)."
    )


@eight
@pytest.mark.parametrize("compiles", [False, True])
def test_where_there_are_fewer_it_is_said_how_many(kind, compiles):
    kind(H100, compiles)
    trace = rm.trace(loss, *spread(8))
    with pytest.raises(RematError) as raised:
        trace.measure(inputs="random", device="H100 SXM x16")
    assert str(raised.value) == (
        "H100 SXM x16 to run on is 16 devices, and there are 8 here: make a mesh of no more than 8 and name "
        "'H100 SXM', or leave out inputs= to compile only."
    )


@eight
def test_a_mesh_of_another_number_than_is_named_is_refused_as_it_is_where_it_is_compiled_only(kind):
    kind(H100)
    error = rm.trace(loss, *spread(4)).measure("none", inputs="random", device="H100 SXM x8").error
    assert error == (
        "the program is for a mesh of 4 devices, and H100 SXM x8 has 8: name as many, such as 'H100 SXM x4'."
    )


@eight
def test_others_that_are_here_are_none_of_those_that_are_named(kind):
    kind(V5E, compiles=True)
    with pytest.raises(RematError, match="there is no H100 SXM x8 here to run on: leave out inputs="):
        rm.trace(loss, *spread(8)).measure(inputs="random", device="H100 SXM x8")
    kind(V5E)
    with pytest.raises(RematError, match="The compiler for H100 SXM x8 is not installed"):
        rm.trace(loss, *spread(8)).measure(inputs="random", device="H100 SXM x8")


def test_where_jax_finds_no_device_there_is_none_to_count(monkeypatch):
    """JAX_PLATFORMS=tpu on a machine without: what is to be done is said, and not that a backend failed."""

    def fail():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr("jax.devices", fail)
    assert devices.how_many_here(devices.get("TPU v5e:2x4")) == 0
