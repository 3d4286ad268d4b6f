"""The devices' figures, looked up and registered, and the machine's own, measured."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from remat_magic import _jax, devices
from remat_magic.devices import Device
from remat_magic.records import RematError


@pytest.fixture
def known(monkeypatch):
    """Registering leaves the table as it was."""
    monkeypatch.setattr(devices, "_KNOWN", dict(devices._KNOWN))


PUBLISHED = [name for name in devices.names() if name != devices.THIS_CPU]


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_fit_together(name):
    """What holds for every accelerator: units of FLOP/s and bytes/s, not of TFLOP/s; matrices before vectors."""
    device = devices.get(name)
    assert device.name == name
    assert 1e14 < device.matmul_flops["bf16"] < 1e16
    eight_bits = device.matmul_flops.get("i8") or device.matmul_flops["f8_e4m3fn"]
    assert device.matmul_flops["f32"] <= device.matmul_flops["bf16"] <= eight_bits
    assert device.vector_flops is None or 1e13 < device.vector_flops < device.matmul_flops["f32"]
    assert 5e11 < device.memory_bandwidth < 1e13
    assert 10e9 <= device.memory_bytes <= 300e9
    if name != "TPU 7x":  # of which its maker does not say it
        assert 1e10 < device.host_bandwidth < device.memory_bandwidth / 10
    assert 1e11 < device.interconnect <= device.memory_bandwidth / 4
    # What a plan must fit, and what decides whether the compiled program fits, are one size.
    facts = device.target.facts if device.target else {}
    assert facts.get("device_memory_size", device.memory_bytes) == device.memory_bytes
    assert device.is_tpu == name.startswith("TPU")
    assert device.source
    assert not device.measured


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.75),
        ({"XLA_CLIENT_MEM_FRACTION": ".9"}, 0.9),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, 0.5),  # by its old name
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.75),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_CLIENT_MEM_FRACTION": ".5"}, 1),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, 1),
        ({"XLA_CLIENT_MEM_FRACTION": "much"}, 0.75),
    ],
)
def test_a_program_can_have_what_jax_takes_of_a_gpu(monkeypatch, settings, share):
    """By the environment variables of JAX's page on GPU memory allocation; of a TPU it takes all."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("H100 SXM", "H100 SXM x8"):
        device = devices.get(name)
        assert devices.usable_bytes(device) == int(share * device.memory_bytes)
    v5e = devices.get("TPU v5e")
    assert devices.usable_bytes(v5e) == v5e.memory_bytes


def test_of_a_gpu_that_is_here_a_program_can_have_what_the_allocator_says(monkeypatch):
    here = SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": 112583507968})
    monkeypatch.setattr(jax, "devices", lambda: [here])
    monkeypatch.setattr(_jax, "has_begun", lambda: True)
    assert devices.usable_bytes(devices.get("H200")) == 112583507968
    assert devices.usable_bytes(devices.get("H100 SXM")) == devices.get("H100 SXM").memory_bytes * 3 // 4
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")  # which names a limit, and goes beyond it
    assert devices.usable_bytes(devices.get("H200")) == devices.get("H200").memory_bytes
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR")
    monkeypatch.setattr(_jax, "has_begun", lambda: False)  # looking for devices takes the memory of a GPU
    assert devices.usable_bytes(devices.get("H200")) == int(0.75 * devices.get("H200").memory_bytes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("TPU v5", "did you mean 'TPU v5e'?"),
        ("A100 40GB SMX", "did you mean 'A100 40GB SXM'?"),
        ("v6e", "did you mean 'TPU v6e'?"),
        *((name, "and remat_magic.devices.register adds one.") for name in ("RTX 4090", "A10", "H20", "TPU v3")),
        ("", "known are A100 40GB SXM"),
        ("???", "known are A100 40GB SXM"),
        (3, "not int: 3."),
    ],
)
def test_unknown_names_say_which_comes_nearest(name, expected):
    with pytest.raises(RematError) as raised:
        devices.get(name)
    assert expected in str(raised.value)


def test_a_registered_device_goes_by_its_name(known):
    mine = Device("mine", {"bf16": 2e14}, 1e13, 1e12, 10**10, None, "my own data sheet")
    devices.register(mine)
    assert devices.get("Mine") is mine
    assert "mine" in devices.names()
    assert devices.names()[-1] == devices.THIS_CPU
    with pytest.raises(RematError, match="is the name of the machine itself"):
        devices.register(Device(devices.THIS_CPU, {}, None, 1.0, 1, None, ""))
    with pytest.raises(RematError, match="needs a remat_magic.devices.Device, not dict"):
        devices.register({"name": "mine"})


@pytest.mark.parametrize(
    ("name", "count", "called"),
    [
        ("TPU v5e:2x4", 8, "v5e:2x4"),
        ("tpu V6E : 16x16", 256, "v6e:16x16"),
        ("TPU v5e:1x1", 1, ""),
        ("H100 SXM x1", 1, ""),
        ("TPU v5p:2x2x1", 4, "v5p:2x2x1"),
        ("TPU v5p:4x4x12", 192, "v5p:4x4x12"),
        ("TPU 7x:2x2x1", 8, "tpu7x:2x2x1"),  # JAX takes each half of a chip for a device
        ("H100 SXM x8", 8, "1x1x8"),
        ("h200 X32", 32, "1x4x8"),
    ],
)
def test_several_that_are_connected(name, count, called):
    """All else that is known of them is one's."""
    several, one = devices.get(name), devices.get(name.lower().split(":")[0].split(" x")[0])
    assert (several.count, several.topology) == (count, called)
    if count > 1:
        assert several.name.casefold() == name.replace(" : ", ":").casefold()
    assert dataclasses.replace(several, name=one.name, count=1, topology="") == one
    assert devices.get(several.name) == several


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "TPU v5e:3x3",
            "TPU v5e are offered in slices of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16, such as 'TPU v5e:2x4'.",
        ),
        ("TPU v6e:4x2", "such as 'TPU v6e:2x4'."),
        (
            "TPU v5p:3x3x3",
            "TPU v5p are offered in slices of 1x1x1, 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x8x8, 8x8x8, 8x8x16, "
            "8x16x16, 16x16x16, such as 'TPU v5p:2x2x2'.",
        ),
        (
            "H100 SXM x12",
            "H100 SXM are offered by number, up to 8 or in whole hosts of 8: 'H100 SXM x8' or 'H100 SXM x16', and not "
            "12.",
        ),
        ("H100 SXM:2x4", "or 'H100 SXM x16', and not 2x4."),
        ("H100 x8", "No device is called 'H100': did you mean 'H100 SXM'?"),
        ("TPU v4:2x2x1", "XLA has no way to compile for several TPU v4"),
        ("this CPU x8", "XLA has no way to compile for several this CPU"),
    ],
)
def test_what_is_not_offered_together_names_what_is(name, sentence):
    with pytest.raises(RematError) as raised:
        devices.get(name)
    assert sentence in str(raised.value)


def test_as_many_as_a_program_needs():
    assert devices.meshes(1) == devices.meshes(12) == ()
    assert {"TPU v5e:2x4", "TPU v5p:2x2x2", "TPU 7x:2x2x1", "H100 SXM x8"} < {*devices.meshes(8)}
    assert all(devices.get(name).count == 64 for name in devices.meshes(64))
    assert not any(name.startswith("TPU v5e") for name in devices.meshes(512))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("NVIDIA H100 PCIe", None),  # another device of the same name
        ("TPU v2", None),
    ],
)
def test_jaxs_kinds_of_devices_are_known(kind, name):
    found = devices.of_kind(kind)
    assert (found and found.name) == name


def test_this_machine_is_measured_once(monkeypatch):
    found = devices.default()  # tests run on the CPU
    assert found.measured
    assert found.interconnect is None
    assert "measured on this machine" in found.source
    assert found.name == devices.THIS_CPU
    # Any machine that runs the tests: more than a microcontroller, less than an accelerator.
    assert 1e8 < found.vector_flops < 1e14
    assert 1e8 < found.matmul_flops["f32"] < 1e15
    assert 1e8 < found.memory_bandwidth < 1e13
    monkeypatch.setattr(jax, "jit", None)  # measuring anew would need it
    assert devices.get("this cpu") is found


def test_a_matmul_without_figures_is_left_to_the_vector_units():
    cpu = devices.get(devices.THIS_CPU)
    assert cpu.peak_flops("f64", "matmul") == cpu.vector_flops
    tpu = devices.get("TPU v5e")
    assert tpu.peak_flops("f64", "matmul") is None
    assert tpu.peak_flops("bf16", "vector") is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H100 80GB HBM3", "H100 SXM"), ("TPU v5 lite", "TPU v5e"), ("cpu", None), ("Other", None)],
)
def test_the_accelerator_that_is_here(monkeypatch, kind, name):
    jax.devices()  # JAX has looked for them
    monkeypatch.setattr("jax.devices", lambda: [SimpleNamespace(device_kind=kind)])
    found = devices.accelerator()
    assert (found and found.name) == name


@pytest.mark.slow
def test_jax_is_not_made_to_look_for_devices():
    """It would take most of a GPU's memory, of a user who only looks at shapes."""
    program = (
        "import jax, remat_magic as rm; from remat_magic.widget import RematWidget;"
        "RematWidget(rm.trace(lambda x: x.sum(), jax.ShapeDtypeStruct((2,), 'float32')));"
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=True)
    assert ran.stdout.split() == ["False"]


def test_no_accelerator_is_here_where_jax_finds_no_device(monkeypatch):
    """Tracing needs none, so that JAX_PLATFORMS=tpu on a machine without is no reason to fail."""

    def fail():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(_jax, "has_begun", lambda: True)
    monkeypatch.setattr("jax.devices", fail)
    assert devices.accelerator() is None
