"""Hold estimated peaks against what XLA needs, compiled for devices that need not be here.

``python -m tests.benchmarks.estimates ["TPU v5e" "H100 SXM" ...]`` prints a row for each choice, and then a table;
``--write README.md`` puts that table between the marks in a text. It needs the extras ``tpu`` and ``cuda`` and compiles
some seventy programs for each device, which takes long; what was compiled before is not compiled again, and what takes
longer than ``--seconds`` is left out (0: all that was not compiled before).
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import remat_magic as rm
from remat_magic.records import ComparisonRow, Measurement
from tests.benchmarks import other_models
from tests.benchmarks.named_models import resnet, shape, transformer

MARKS = ("<!-- estimates: begin -->\n", "<!-- estimates: end -->\n")
_MIXED = "mixed"


def recurrent(layers: int = 2, steps: int = 64, width: int = 256) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Layers of an LSTM, each a scan over the sequence."""

    def cell(p: Any, carry: Any, x: Any) -> Any:
        hidden, state = carry
        i, f, g, o = jnp.split(x @ p["w"] + hidden @ p["u"], 4, -1)
        state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(state)
        return (hidden, state), hidden

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = jax.lax.scan(functools.partial(cell, p), (jnp.zeros_like(x[0]), jnp.zeros_like(x[0])), x)[1]
        return (x**2).mean()

    weights = {"w": shape(width, 4 * width), "u": shape(width, 4 * width)}
    return loss, ([weights] * layers, shape(steps, width, width))


def language_model(layers: int = 6, width: int = 256, words: int = 4096) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Scanned attention layers without any checkpoint, between shared embeddings, with a softmax over the words."""

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def attend(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[name]).reshape(*x.shape[:2], 8, -1) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
        return jnp.einsum("bhst,bthd->bshd", weights, v).reshape(x.shape) @ p["o"]

    def layer(x: Any, p: Any) -> Any:
        x = x + attend(p, norm(x))
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], None

    def loss(params: Any, embedding: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(layer, embedding[tokens], params)
        logits = jax.nn.log_softmax(x @ embedding.T)
        return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

    square = {name: shape(layers, width, width) for name in "qkvo"}
    wide = {"up": shape(layers, width, 4 * width), "down": shape(layers, 4 * width, width)}
    return loss, ({**square, **wide}, shape(words, width), shape(8, 256, dtype=jnp.int32))


MODELS = {
    "12 blocks, unrolled": lambda: transformer(scanned=False),
    "12 blocks, scanned": lambda: transformer(scanned=True),
    "ResNet": resnet,
    "LSTM": recurrent,
    "language model": language_model,
    "GRU": other_models.gated,
    "U-net": other_models.unet,
    "mixture of experts": other_models.experts,
    "tied embeddings": other_models.tied,
    "vision transformer": other_models.vision,
}
OTHERS = {
    "decoder": other_models.decoder,
    "depthwise convolutions": other_models.depthwise,
    "graph": other_models.messages,
    "state space": other_models.state_space,
    "translator": other_models.translator,
}
"""Those that no rule was made on."""
LARGE = {
    "language model of several GB": lambda: language_model(layers=12, width=1024, words=32768),
    "decoder of several GB": lambda: other_models.decoder(layers=12, width=1024, words=32768, length=1024),
    "GRU of several GB": lambda: other_models.gated(steps=512, width=1024),
}
"""Those that take many times a TPU's VMEM, which the others fit into in part; no rule was made on them."""
ALL = MODELS | OTHERS | LARGE


def compiled(trace: rm.Trace, device: str, seconds: float) -> Iterator[tuple[ComparisonRow, Measurement]]:
    """Every place and policy that is tried, plans left out, with what XLA says, for which it may take so long."""
    rows = [row for row in trace.places(device=device, most=100) if not row.error and row.policy != _MIXED]
    rows = [row for row in rows if row.peak_bytes and "plan" not in row.label]
    job = trace.measuring([(row.policy, row.at) for row in rows], device=device, seconds=seconds)
    job.wait()
    yield from zip(rows, job.results, strict=True)


class Estimated(NamedTuple):
    """What was estimated for a choice, in parts of what XLA needs."""

    model: str
    checkpointed: bool
    ratio: float


def ratios(names: Iterable[str], device: str, seconds: float) -> list[Estimated]:
    """Of every place and policy that is tried of some models; printed on the way."""
    found: list[Estimated] = []
    for name in names:
        fun, args = ALL[name]()
        for row, measured in compiled(rm.trace(fun, *args), device, seconds):
            if measured.needed_bytes is None:
                print(f"| {name} | {row.policy} | {row.at} | {measured.error} |", flush=True)
                continue
            ratio = (row.peak_bytes or 0) / measured.needed_bytes
            found.append(Estimated(name, bool(row.recomputed_flops), ratio))
            sizes = f"{row.peak_bytes:,} | {measured.needed_bytes:,} | {ratio:.2f}"
            print(f"| {name} | {row.policy} | {row.at} | {sizes} |", flush=True)
    return found


def rows_of(by_device: dict[str, Any], groups: dict[str, Any], figures: Callable[[Any], str]) -> str:
    """The rows of a Markdown table: of each device and group of models, with a checkpoint and without."""
    lines = list[str]()
    for device, found in by_device.items():
        for models, which in groups.items():
            for what, checkpointed in (("with a checkpoint", True), ("without", False)):
                part = [each for each in found if each.checkpointed == checkpointed and each.model in which]
                if part:
                    lines.append(f"| {device} | {models} | {what} | {len(part)} | {figures(part)} |\n")
    return "".join(lines)


def table(by_device: dict[str, list[Estimated]]) -> str:
    """A Markdown table: by how much the estimates are off."""

    def figures(part: list[Estimated]) -> str:
        off = [each.ratio - 1 for each in part]
        return f"{statistics.median(map(abs, off)):.0%} | {min(off):+.0%} | {max(off):+.0%}"

    head = "| compiled for | models | | choices | off by, in the median | lowest | highest |\n"
    head += "|---|---|---|---:|---:|---:|---:|\n"
    return head + rows_of(by_device, {"made on": MODELS, "others": OTHERS, "of several GB": LARGE}, figures)


def run(doc: str | None, of_device: Any, table: Any, models: Iterable[str], marks: tuple[str, str]) -> dict[str, Any]:
    """Print the table of what is asked for, or put it between its marks in a file; what was found of each device."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("devices", nargs="*", default=["TPU v5e", "H100 SXM"])
    parser.add_argument("--models", nargs="*", default=[*models])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    by_device = {device: of_device(options.models, device, options.seconds) for device in options.devices}
    print(f"\n{table(by_device)}")
    if options.write:
        before, rest = options.write.read_text(encoding="utf-8").split(marks[0])
        text = f"{before}{marks[0]}{table(by_device)}{marks[1]}{rest.split(marks[1])[1]}"
        options.write.write_text(text, encoding="utf-8")
    return by_device


if __name__ == "__main__":
    run(__doc__, ratios, table, ALL, MARKS)
