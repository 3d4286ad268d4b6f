"""What XLA says where memory is exhausted: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from remat_magic.records.base import Displayed
from remat_magic.records.source import SourceSpan


@dataclass(frozen=True, slots=True)
class ExhaustedBuffer:
    """One of the largest buffers that XLA lists.

    ``nbytes`` is with padding, ``type`` as XLA writes it without the layout: ``f32[32,4096,4096]``. ``op_name`` is the
    path of JAX's names to the operation that makes it, ``source`` its line of Python, ``label`` XLA's name for it.
    ``kind`` is "argument", "temporary" or "output" where XLA says so.
    """

    nbytes: int
    type: str
    op_name: str = ""
    source: SourceSpan | None = None
    label: str = ""
    kind: str = ""

    @property
    def line(self) -> int | None:
        """The number of the line of Python in the file of ``source``."""
        return None if self.source is None else self.source.line

    @property
    def what(self) -> str:
        """The operation, or XLA's name for it."""
        return self.op_name.partition("[")[0].rpartition("/")[2] or self.label


@dataclass(frozen=True, slots=True, repr=False)
class Exhausted(Displayed):
    """A message of XLA's that memory is exhausted, read by ``remat_magic.explain``.

    ``message`` is its first line. ``wanted_bytes`` could not be had: all that a program needs where it was compiled,
    else what was asked for at once. ``available_bytes`` is what there was: all of the memory where it was compiled,
    else what was free. ``memory`` is "device", "host", or "vmem" (the fast memory that a TPU's kernels compute in),
    ``when`` is "compiling", "loading" or "running". ``parts`` are what the program needs, by XLA's names, in bytes;
    ``buffers`` are the largest, the biggest first. None, or empty, is what the message does not say.
    """

    message: str
    wanted_bytes: int | None = None
    available_bytes: int | None = None
    memory: str = "device"
    when: str = "running"
    parts: tuple[tuple[str, int], ...] = ()
    buffers: tuple[ExhaustedBuffer, ...] = ()
