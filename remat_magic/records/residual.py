"""A value that is saved for the backward pass: where it is made, and what reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remat_magic.records.source import SourceSpan

Kind = Literal["argument", "constant", "literal", "intermediate", "offloaded"]


@dataclass(frozen=True, slots=True)
class Origin:
    """One place where a residual's value is made.

    ``path`` names the enclosing loops and calls, outermost first, e.g. ``("scan x12", "block")``; ``times`` is how
    often the equation runs (the product of the enclosing trip counts), or None in a ``while`` loop, whose count is
    not known before it runs. ``argument`` is set where the value is (also) an argument of the function. ``library`` is
    the innermost frame in an installed package (JAX itself aside) where ``source`` called one, else None.
    """

    primitive: str
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    times: int | None = 1
    name: str | None = None
    argument: str | None = None
    library: SourceSpan | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """One operation of the backward pass that reads a residual.

    ``primitive`` is the reading operation itself ("mul"); ``derivative_of`` the forward operation that is being
    differentiated there ("sin"), empty where JAX keeps no trace of it. ``recomputation`` tells a reader that computes
    a forward value again from one that does the gradient's own work; ``gradient_of`` names the arguments whose
    gradient what it makes is, or is summed up to.
    """

    primitive: str
    derivative_of: str = ""
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    recomputation: bool = False
    gradient_of: str = ""

    def __str__(self) -> str:
        """One sentence fragment: "backward of sin, line 6"."""
        return self.text(f"line {self.source.line}" if self.source else "")

    def text(self, place: str) -> str:
        """The same with ``place`` for the line, such as "In[3]:6"; empty names none."""
        at = f", {place}" if place else ""
        if self.gradient_of:
            return f"gradient of `{self.gradient_of}`{at}"
        called = self.source.called if self.source else ""  # by the user, who may not know the operation
        what = called or self.derivative_of or self.primitive
        if self.recomputation and self.derivative_of in ("", self.primitive):
            return f"computing {what} again{at}"
        return f"backward of {what}{at}"


@dataclass(frozen=True, slots=True)
class Residual:
    """A value saved for the backward pass.

    ``dtype`` is JAX's short form ("f32", "bf16", "key<fry>"), ``shape`` the residual's own shape, so that a value
    stacked by a scan has its leading length; ``nbytes`` is what one device holds of it. On a mesh ``sharding`` is the
    type as JAX writes it, ``f32[1024@data,64]`` (empty where it is not known), ``shard_shape`` the shape of what one
    device holds, and ``replicated`` tells that every device holds all of it. ``primitive``, ``source``, ``library``,
    ``path`` and ``times`` are those of the first origin.
    ``memory_space`` is "" for the device's own memory, else JAX's name for it ("host"). ``unread``: JAX lists it, and
    no gradient depends on it (the zeros of a relu), so that a compiled program drops it.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: Kind
    primitive: str = ""
    name: str | None = None
    argument: str | None = None
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    times: int | None = 1
    needed_by: tuple[Reader, ...] = ()
    origins: tuple[Origin, ...] = ()
    memory_space: str = ""
    library: SourceSpan | None = None
    unread: bool = False
    sharding: str = ""
    shard_shape: tuple[int, ...] | None = None
    replicated: bool = False

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of what one device holds: ``shard_shape`` where there is one, else ``shape``."""
        return self.shape if self.shard_shape is None else self.shard_shape

    @property
    def kept(self) -> bool:
        """Whether it is an intermediate that takes memory for the backward pass, the device's or another."""
        return self.kind in ("intermediate", "offloaded") and not self.unread

    @property
    def dropped(self) -> bool:
        """Whether it is an intermediate that nothing reads."""
        return self.kind in ("intermediate", "offloaded") and self.unread

    @property
    def type(self) -> str:
        """The type as JAX writes it, ``f32[5,4]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
