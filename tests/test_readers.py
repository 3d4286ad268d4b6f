"""What a saved value is needed for, in the words of whoever wrote the program."""

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.records import SourceSpan
from remat_magic.views.values import residual_rows
from tests.programs import f32


def layers(W1, W2, x):
    return jnp.sum(jnp.sin(W2 @ jnp.sin(W1 @ x)))


def scanned(Ws, g, x):
    def block(x, W):
        return x + jnp.sin(x * g) @ W, None

    return jnp.sum(jax.lax.scan(block, x, Ws)[0] ** 2)


def twice(W, x):
    return jnp.sum(jnp.sin(x @ W) @ W)


def mixed(W, x):
    return jnp.sum((x.astype("bfloat16") @ W.astype("bfloat16")).astype("float32") ** 2)


def embedded(table, tokens):
    return jnp.sum(jnp.exp(table[tokens]))


W, x = f32(4, 4), f32(4, 4)
CASES = [
    # A product's factor is for the gradient of the other one, if that is an argument.
    (layers, (W, W, x), {}, "sin", {"gradient of `W2`"}),
    (layers, (W, W, x), {}, "cos", {"backward of sin"}),
    (layers, (W, W, x), {}, "W2", {"backward of matmul"}),
    (layers, (W, W, x), {}, "x", {"gradient of `W1`"}),
    (layers, (W, W, x), {"wrt": "W1"}, "W2", {"backward of matmul"}),
    # What only some turn of a loop sums up to it, or an element of it, is that too.
    (scanned, (f32(3, 4, 4), f32(4), x), {}, "sin", {"gradient of `Ws`"}),
    (scanned, (f32(3, 4, 4), f32(4), x), {}, "add", {"gradient of `g`"}),
    (scanned, (f32(3, 4, 4), f32(4), x), {}, "Ws", {"backward of matmul"}),
    (twice, (W, x), {}, "sin", {"gradient of `W`"}),
    (mixed, (W, x), {}, "convert_element_type", {"gradient of `W`", "gradient of `x`"}),
    (embedded, (W, jax.ShapeDtypeStruct((3,), "int32")), {}, "exp", {"backward of exp"}),
    (embedded, (W, jax.ShapeDtypeStruct((3,), "int32")), {}, "broadcast_in_dim", {"gradient of `table`"}),
]


@pytest.mark.parametrize(("fun", "arguments", "options", "made_by", "words"), CASES)
def test_a_value_is_needed_for_a_gradient_or_for_the_backward_of_what_was_called(
    fun, arguments, options, made_by, words
):
    report = rm.trace(fun, *arguments, **options).report("none")
    rows = [row for row in report.residuals if made_by in (row.argument if row.kind == "argument" else row.primitive,)]
    assert rows
    assert {reader.text("") for row in rows for reader in row.needed_by} == words


def test_what_is_computed_again_is_told_from_what_a_derivative_takes():
    report = rm.trace(layers, W, W, x).report("dots_saveable")
    (first, second) = sorted((row for row in report.residuals if row.kind == "intermediate"), key=lambda row: row.path)
    texts = [sorted({reader.text("") for reader in row.needed_by}) for row in (first, second)]
    assert sorted(texts) == [["backward of sin"], ["backward of sin", "computing sin again"]]


def test_lines_are_told_where_they_are_others():
    rows = {row.label: row for row in residual_rows(rm.trace(scanned, f32(3, 4, 4), f32(4), x).report("none"))}
    (place, *_) = (reader for reader in rows["pow" if "pow" in rows else "mul"].needed_by)
    assert "line" not in place
    assert all("line" in reader for reader in rows["Ws"].needed_by)  # an argument has no line of its own


@pytest.mark.parametrize(
    ("expression", "called"),
    [
        ("jax.nn.softmax(s)", "softmax"),
        ("f(x)", "f"),
        ("nn.Dense(8)(x)", "Dense"),
        ("self.layers[0](x)", ""),
        ("x.reshape(2, 3)", "reshape"),
        ("x + f(x) @ W", "add"),
        ("-x.sum()", "neg"),
        ("x[tokens]", ""),
        ("for x in (", ""),
    ],
)
def test_what_an_expression_calls_is_read_from_its_text(expression, called):
    assert SourceSpan("a.py", "f", 1, 0, 1, len(expression), text=expression).called == called
