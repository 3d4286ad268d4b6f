"""XLA's memory over time, read from what it writes while compiling: against XLA's own figures."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from remat_magic.measuring.xla_memory import dump_options, read_dump, with_texts
from remat_magic.records import XlaMemory

LAYERS, ROWS, WIDTH = 3, 512, 64


@jax.checkpoint
def block(x, p):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def scanned(ps, x):
    return (jax.lax.scan(lambda x, p: (block(x, p), None), x, ps)[0] ** 2).mean()


def step(ps, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, ps, jax.grad(scanned)(ps, x)), x.sum()


def shapes(sharding=None):
    def shape(*size):
        return jax.ShapeDtypeStruct(size, jnp.float32, sharding=sharding)

    return {"up": shape(LAYERS, WIDTH, 4 * WIDTH), "down": shape(LAYERS, 4 * WIDTH, WIDTH)}, shape(ROWS, WIDTH)


def compiled(folder, fun=step, sharding=None, **options):
    executable = jax.jit(fun, **options).lower(*shapes(sharding)).compile(compiler_options=dump_options(folder))
    memory = read_dump(folder)
    assert memory is not None
    return executable.memory_analysis(), memory


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return *compiled(folder := tmp_path_factory.mktemp("dump"), donate_argnums=0), folder


def total(analysis):
    return (
        analysis.temp_size_in_bytes
        + analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def test_the_peak_is_what_xla_allocates_but_for_gaps(on_cpu):
    analysis, memory, _ = on_cpu
    assert memory.unknown == 0
    assert 0.99 * total(analysis) < memory.peak_bytes <= total(analysis) + 100  # constants are no part of XLA's sum
    assert memory.peak_bytes == max(memory.held) == memory.held[memory.peak]
    assert len(memory.held) == len(memory.steps)
    assert sum(buffer.nbytes for buffer in memory.alive if buffer.space == "device") == memory.peak_bytes
    assert all(buffer.first <= memory.peak <= buffer.last for buffer in memory.alive)


def test_ranges_and_sizes_are_joined_as_xla_joins_them(on_cpu):
    """At the step of XLA's own note the sizes of what lives then are what it says, one by one."""
    _, memory, folder = on_cpu
    ranges = next(Path(folder).glob("*live-range.txt")).read_text()
    noted = dict(re.findall(r"^    (\S+?)(?:\{\})?: (\d+) bytes \(cumulative", ranges, re.M))
    assert memory.noted_bytes == sum(map(int, noted.values()))
    assert f"Live ranges at {memory.noted_peak} (peak)" in ranges
    ours = {buffer.name: buffer.nbytes for buffer in memory.alive if buffer.first <= memory.noted_peak <= buffer.last}
    assert len(ours) > 5
    assert all(int(noted[name]) == nbytes for name, nbytes in ours.items())


def test_each_buffer_has_its_role_and_its_line(on_cpu):
    _, memory, _ = on_cpu
    memory = with_texts(memory)
    alive = {buffer.op_name: buffer for buffer in memory.alive}
    for name in ("ps['up']", "ps['down']", "x"):
        assert alive[name].role == "argument"
        assert alive[name].nbytes == (4 * ROWS * WIDTH if name == "x" else 4 * LAYERS * WIDTH * 4 * WIDTH)
    saved = [buffer for buffer in memory.alive if buffer.role == "saved"]
    assert [buffer.nbytes for buffer in saved] == [4 * LAYERS * ROWS * WIDTH]  # what the scan stacks, once
    wide = [buffer for buffer in memory.alive if buffer.nbytes == 4 * ROWS * 4 * WIDTH]
    assert wide
    assert {buffer.role for buffer in wide} == {"temporary"}
    assert {buffer.source.place.partition(":")[0] for buffer in wide} == {Path(__file__).name}
    assert {buffer.source.function for buffer in wide} == {"block"}
    assert all(buffer.source.expression in "jax.nn.gelu(x @ p['up']) @ p['down']".replace("'", '"') for buffer in wide)


def test_the_backward_pass_begins_after_the_forward_one(on_cpu):
    _, memory, _ = on_cpu
    whiles = [number for number, name in enumerate(memory.steps) if name.startswith("while")]
    assert whiles[0] < memory.backward < whiles[-1]
    assert memory.backward < memory.peak


def test_donated_memory_counts_once(on_cpu, tmp_path):
    analysis, memory, _ = on_cpu
    kept, larger = compiled(tmp_path)
    assert analysis.alias_size_in_bytes > 0 == kept.alias_size_in_bytes
    assert larger.held[-1] - memory.held[-1] == analysis.alias_size_in_bytes


def test_a_record_goes_through_json(on_cpu):
    _, memory, _ = on_cpu
    assert XlaMemory.from_dict(json.loads(json.dumps(memory.to_dict()))) == memory


def test_a_value_without_a_size_is_counted(on_cpu, tmp_path):
    _, _, folder = on_cpu
    for path in Path(folder).glob("*after_optimizations*"):
        data = path.read_bytes()
        if path.name.endswith("buffer-assignment.txt"):
            data = re.sub(rb"^ value: .* while\.\d+\{2\} .*\n", b"", data, flags=re.M)
        (tmp_path / path.name).write_bytes(data)
    assert read_dump(tmp_path).unknown > 0


def test_no_dump_is_no_memory(tmp_path):
    assert read_dump(tmp_path) is None
