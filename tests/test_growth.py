"""What can be asked of a trace grows no faster than its program, counted in lines that run: no busy machine changes it.

A program is taken in three sizes, each twice the one before. What the second doubling adds is divided by what the first
added: 2 is linear, 4 quadratic. Each function of this package is looked at by itself as well, since a small one that
grows with the square is the first to be felt in a large program. Depth is another matter: JAX's own programs of nested
loops grow with its square, as each residual inside is handed on by all loops around it.
"""

import os
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.views import html
from remat_magic.widget import RematWidget
from tests.programs import f32

pytestmark = pytest.mark.slow  # of how much is worked out

_PACKAGE = os.path.dirname(rm.__file__) + os.sep

# ------------------------------------------------------------------------------------------------------------- programs


def straight(size):
    """One line of operations, which all read one argument."""

    def chain(w, x):
        for _ in range(size):
            x = jnp.sin(x) * w
        return jnp.sum(x)

    return chain, (f32(8), f32(8))


def layers(size, wrap=lambda layer: layer):
    """Checkpointed layers, each with a weight of its own."""
    layer = wrap(jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w)))

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return jnp.sum(x**2)

    return loss, ([f32(8, 8)] * size, f32(4, 8))


def jitted(size):
    """The same as one jitted function."""
    return layers(size, jax.jit)


def gradient_inside(size):
    """The gradient of checkpointed layers, differentiated once more."""
    loss, args = layers(size)
    return lambda ws, x: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss)(ws, x)), args


def stacked(size):
    """A scan that carries many values and reads as many stacked weights."""

    def loss(ws, x):
        def step(carry, ws):
            return [jnp.tanh(c @ w) for c, w in zip(carry[1:] + carry[:1], ws, strict=True)], None

        return sum(map(jnp.sum, jax.lax.scan(step, [x * 1.0] * size, ws)[0]))

    return loss, ([f32(3, 8, 8)] * size, f32(4, 8))


def functions(size, folder):
    """As many decorated functions as layers, in a file."""
    lines = ["import jax, jax.numpy as jnp"]
    for number in range(size):
        lines += ["@jax.checkpoint", f"def layer{number}(x, w):", "    return jnp.sin(x @ w)"]
    lines += ["def loss(w, x):", *(f"    x = layer{number}(x, w)" for number in range(size)), "    return jnp.sum(x)"]
    file = folder / f"layers{size}.py"
    file.write_text("\n".join(lines) + "\n")
    names = {}
    exec(compile(file.read_text(), file, "exec"), names)
    return names["loss"], (f32(8, 8), f32(4, 8))


def everything(size, folder):
    """All of these but the gradient, one after another."""
    parts = [straight(size), jitted(size), stacked(size), functions(size, folder)]

    def loss(*args):
        return sum(part(*of_part) for (part, _), of_part in zip(parts, args, strict=True))

    return loss, tuple(args for _, args in parts)


def scans(depth):
    """A scan in a scan in a scan."""

    def around(body):
        return lambda x: jax.lax.scan(lambda c, _: (body(jnp.tanh(c)), None), x, None, length=2)[0]

    def loss(w, x):
        body = lambda x: jnp.sin(x @ w)  # noqa: E731
        for _ in range(depth):
            body = around(body)
        return jnp.sum(body(x))

    return loss, (f32(8, 8), f32(4, 8))


# ------------------------------------------------------------------------------------------------------------- counting


def questions(program):
    """All that is asked of a program, in this order; JAX's own retraces, slow where they are watched, are before."""
    policies = "none", "nothing_saveable", "everything_saveable"
    answers = {}
    yield "trace", lambda: answers.setdefault("trace", rm.trace(program[0], *program[1]))
    trace = answers["trace"]
    for key in policies:
        trace.forward(key, "function"), trace.backward(key, "function")
        yield f"report {key}", lambda key=key: answers.setdefault(key, trace.report(key, "function"))
    none, nothing, everything = (answers[key] for key in policies)
    yield "advice", lambda: trace.advice("none", "function")
    yield "advice, recomputing", lambda: trace.advice("nothing_saveable", "function")
    yield "text", lambda: [(report.forward.lines, report.backward.lines) for report in (none, nothing, everything)]
    yield "timeline", lambda: trace.timeline("nothing_saveable", "function")
    yield "compare", lambda: trace.compare(policies, "function")
    yield "plan", lambda: trace.plan("50%", "function")
    yield "what if", lambda: trace.what_if("nothing_saveable", "function")
    yield "page", lambda: html.page_html(none, [nothing])
    yield "widget", lambda: RematWidget(trace, "nothing_saveable", "function").close()


# What is shown of few values and of many differs: groups, folds, numbers with more digits. Some of it is cached.
_SHOWN = ("page", "widget", "text", "compare")


def steps(work):
    """How many lines of each function of this package run, in this thread."""
    codes, counts = {}, Counter()  # by id: a code object hashes all its instructions every time that it is asked

    def in_function(frame, event, _):
        if event == "line":
            counts[id(frame.f_code)] += 1
        return in_function

    def anywhere(frame, _, __):
        code = frame.f_code
        if id(code) not in codes:
            if not code.co_filename.startswith(_PACKAGE):
                return None
            codes[id(code)] = code
        return in_function

    before = sys.gettrace()
    sys.settrace(anywhere)
    try:
        work()
    finally:
        sys.settrace(before)
    return Counter({codes[key]: count for key, count in counts.items()})


def growth(first, second, third):
    """What the second doubling adds, in multiples of what the first added (or of half, where the first began more)."""
    return (third - second) / max(second - first, second / 2, 1)


def counted(make, smallest):
    """For each question its name, the steps in the three sizes together, and of each function."""
    in_sizes = [{name: steps(work) for name, work in questions(make(smallest * times))} for times in (1, 2, 4)]
    for question in in_sizes[0]:
        sizes = [of_size[question] for of_size in in_sizes]
        yield question, [of_size.total() for of_size in sizes], sizes


def fastest(sizes):
    """The function that grows fastest, and how fast; the few steps of a doubling are left out."""
    codes = [code for code, count in sizes[2].items() if count - sizes[1][code] > 200]
    rates = [(growth(*(of_size[code] for of_size in sizes)), str(code)) for code in codes]
    return max(rates, default=(0.0, ""))


# Everything one after another is more than that; what is jitted has the calls, the checkpoints and the products.
@pytest.mark.parametrize(("program", "smallest"), [(jitted, 3), (everything, 4)])
def test_work_grows_with_the_length_of_a_program(program, smallest, tmp_path):
    folder = (tmp_path,) if program is everything else ()
    for question, totals, sizes in counted(lambda size: program(size, *folder), smallest):
        assert totals[2] < 3 * max(totals[:2]), question
        if question not in _SHOWN:
            assert growth(*totals) < 2.5, question
            rate, function = fastest(sizes)
            assert rate < 3, f"{question}: {function}"


@pytest.mark.parametrize("smallest", [1, 3])
def test_work_grows_with_the_depth_of_a_program_as_its_jaxprs_do(smallest):
    """These grow with the square of the depth, of which the second doubling adds four times what the first did."""
    for question, totals, _ in counted(scans, smallest):
        if question not in _SHOWN or question == "text":
            assert growth(*totals) < 4.5, question


def test_layers_that_add_to_one_stream_are_not_each_compared_with_all_before():
    """They stand on one line, where only the operands tell an operation from its derivative."""
    counts = []
    for size in (6, 12, 24):
        fun, args = gradient_inside(size)
        trace = rm.trace(fun, *args)
        counts.append(steps(lambda trace=trace: trace.report("nothing_saveable", "function")))
    rate, function = fastest(counts)
    assert rate < 3, function
