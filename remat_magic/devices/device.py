"""A device: what it can do at most, and how XLA compiles for it."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from remat_magic.devices.targets import Target, split_name
from remat_magic.errors import RematError

# Who has a platform's compiler: any of these modules; the extra that installs it.
_COMPILERS = {"tpu": (("libtpu",), "tpu"), "cuda": (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "cuda")}


@dataclass(frozen=True, slots=True)
class Device:
    """What a device can do at most; of several that are connected, what each of them can.

    Attributes:
        name: what ``get`` knows it by.
        matmul_flops: FLOP/s of the matrix units, dense, by what JAX calls the dtype ("bf16", "f32"). A float32 matmul
            is at JAX's default precision: TF32 on these GPUs, bfloat16 on TPUs.
        vector_flops: FLOP/s in float32 of everything else; None where the maker does not say, and then such
            operations are limited by memory alone.
        memory_bandwidth: bytes/s to and from the device's memory.
        memory_bytes: its memory as a GPU's driver or a TPU's compiler has it, which is not the round number of its
            name; ``remat_magic.devices.usable_bytes`` is what a program can have of it. None where the system does not
            say.
        host_bandwidth: bytes/s to the host's memory in one direction; None where it is not known.
        interconnect: bytes/s that it sends to others of its kind, over all its links together, and receives as fast
            meanwhile: NVLink or ICI, not the network between hosts. None where it is not known.
        source: where the figures are published.
        measured: whether they were measured here instead.
        kinds: what JAX calls it (``jax.devices()[0].device_kind``).
        target: how to compile for it where it is not; None where that is not known.
        count: how many devices it is, as JAX counts them: 8 for "TPU v5e:2x4".
        topology: how several are connected, by the name that XLA's compilers have for it; empty for one by itself.
    """

    name: str
    matmul_flops: Mapping[str, float]
    vector_flops: float | None
    memory_bandwidth: float
    memory_bytes: int | None
    host_bandwidth: float | None
    source: str
    measured: bool = False
    kinds: tuple[str, ...] = field(default=())
    target: Target | None = None
    count: int = 1
    topology: str = ""
    interconnect: float | None = None

    @property
    def one(self) -> str:
        """The name of one of them."""
        return split_name(self.name)[0]

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU, also one that XLA cannot compile for here."""
        return self.target.platform == "tpu" if self.target else any(kind.startswith("TPU") for kind in self.kinds)

    @property
    def holds_otherwise(self) -> bool:
        """Whether values lie in its memory otherwise than in this machine's, so that estimated peaks are others there.

        What XLA's compiler does with them is known of TPUs and of what it compiles for.
        """
        return self.target is not None or self.is_tpu

    @property
    def compiles_here(self) -> bool:
        """Whether XLA can compile for it in this environment, also where there is none."""
        if self.target is None:
            return self.measured
        return any(map(_is_installed, _COMPILERS[self.target.platform][0]))

    @property
    def extra(self) -> str:
        """The extra of remat_magic that brings the compiler for it; empty where there is none."""
        return _COMPILERS[self.target.platform][1] if self.target else ""

    @property
    def install(self) -> str:
        """The command that installs the compiler for it; empty where it is there or where there is none."""
        return f"pip install 'remat_magic[{self.extra}]'" if self.extra and not self.compiles_here else ""

    @property
    def why_not(self) -> str:
        """Why it cannot be compiled for here, in one sentence that names the mend; empty where it can."""
        if self.compiles_here:
            return ""
        if self.target is None:
            return f"XLA has no way to compile for {self.name} where there is none: choose another device."
        if sys.platform != "linux" or (self.target.platform == "tpu" and platform.machine() != "x86_64"):
            return f"The compiler for {self.name} is made for Linux only, on x86-64 for a TPU: compile there."
        return f"The compiler for {self.name} is not installed: {self.install}"

    def connected(self, devices: int) -> str:
        """How the devices of a program are connected: as the name of several says, or as so many are offered.

        What is for one device runs on one, also where there are several.

        Raises:
            RematError: so many are not offered, or several others are named.
        """
        assert self.target is not None
        self.check_mesh(devices)
        return self.target.connected(devices) if 1 in (self.count, devices) else self.topology

    def check_mesh(self, devices: int) -> None:
        """See that several that are named are as many as a program is for, or that it is for one.

        Raises:
            RematError: they are others.
        """
        if devices not in (1, self.count) and self.count > 1:
            shape = self.target.shape_of(devices) if self.target else ()
            other = f", such as {self.target.several(self.one, shape)[0]!r}" if self.target and shape else ""
            raise RematError(
                f"the program is for a mesh of {devices} devices, and {self.name} has {self.count}: "
                f"name as many{other}."
            )

    def peak_flops(self, dtype: str, unit: str) -> float | None:
        """FLOP/s for a dtype on one of its units; what has no matrix units is left to the vector units."""
        return self.matmul_flops.get(dtype, self.vector_flops) if unit == "matmul" else self.vector_flops


def _is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False
