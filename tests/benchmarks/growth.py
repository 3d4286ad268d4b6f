"""How all that can be asked of a trace grows with the program, in steps of this package's Python: counted, not timed.

    python -m tests.benchmarks.growth [program ...]

A program is taken in three sizes, each twice the one before. Of every question the lines of this package are counted
that ran for it, and what the second doubling adds is divided by what the first added: 2 is linear, 4 quadratic. Each
function is looked at by itself as well, since a small one that grows with the square is the first to be felt in a large
program. Depth is another matter: JAX's own programs of nested loops grow with its square, as each residual inside is
handed on by all loops around it. What stays in C (sorting, copying lists) is not counted; run with --seconds for that.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp

import remat_magic as rm
from remat_magic.views import html
from remat_magic.widget import RematWidget

Program = tuple[Callable[..., Any], tuple[Any, ...]]
_PACKAGE = os.path.dirname(rm.__file__) + os.sep


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def straight(size: int) -> Program:
    """One line of operations, which all read one argument."""

    def chain(w: Any, x: Any) -> Any:
        for _ in range(size):
            x = jnp.sin(x) * w
        return jnp.sum(x)

    return chain, (_shape(8), _shape(8))


def layers(size: int, jitted: bool = False) -> Program:
    """Checkpointed layers, each with a weight of its own; as one jitted function if ``jitted``."""
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))
    call = jax.jit(layer) if jitted else layer

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = call(x, w)
        return jnp.sum(x**2)

    return loss, ([_shape(8, 8)] * size, _shape(4, 8))


def gradient_inside(size: int) -> Program:
    """The gradient of checkpointed layers, differentiated once more."""
    loss, args = layers(size)
    return lambda ws, x: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss)(ws, x)), args


def stacked(size: int) -> Program:
    """A scan that carries many values and reads as many stacked weights."""

    def loss(ws: Any, x: Any) -> Any:
        def step(carry: Any, ws: Any) -> Any:
            return [jnp.tanh(c @ w) for c, w in zip(carry[1:] + carry[:1], ws, strict=True)], None

        return sum(map(jnp.sum, jax.lax.scan(step, [x * 1.0] * size, ws)[0]))

    return loss, ([_shape(3, 8, 8)] * size, _shape(4, 8))


def functions(size: int) -> Program:
    """As many decorated functions as layers, in a file."""
    lines = ["import jax, jax.numpy as jnp"]
    for number in range(size):
        lines += ["@jax.checkpoint", f"def layer{number}(x, w):", "    return jnp.sin(x @ w)"]
    lines += ["def loss(w, x):", *(f"    x = layer{number}(x, w)" for number in range(size)), "    return jnp.sum(x)"]
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    names: dict[str, Any] = {}
    exec(compile("\n".join(lines), file.name, "exec"), names)
    return names["loss"], (_shape(8, 8), _shape(4, 8))


def everything(size: int) -> Program:
    """All of these but the gradient, one after another, each shorter."""
    parts = [make(size) for make in (straight, lambda n: layers(n, jitted=True), stacked, functions)]

    def loss(*args: Any) -> Any:
        return sum(part(*of_part) for (part, _), of_part in zip(parts, args, strict=True))

    return loss, tuple(args for _, args in parts)


def _nested(depth: int, around: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Program:
    def loss(w: Any, x: Any) -> Any:
        body: Callable[[Any], Any] = lambda x: jnp.sin(x @ w)  # noqa: E731
        for _ in range(depth):
            body = around(lambda x, inner=body: inner(jnp.tanh(x)))
        return jnp.sum(body(x))

    return loss, (_shape(8, 8), _shape(4, 8))


def scans(depth: int) -> Program:
    """A scan in a scan in a scan."""
    return _nested(depth, lambda body: lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0])


def scans_in_gradient(depth: int) -> Program:
    """The same under a checkpoint whose gradient is taken inside."""
    loss, args = scans(depth)

    def outer(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jax.grad(lambda w: jax.checkpoint(loss)(w, x * w[0, 0]))(w)))

    return outer, args


def jits(depth: int) -> Program:
    """A jitted function in a jitted function."""
    return _nested(depth, jax.jit)


def checkpoints(depth: int) -> Program:
    """A checkpoint in a checkpoint."""
    return _nested(depth, jax.checkpoint)


LONG: dict[str, tuple[Callable[[int], Program], int]] = {
    "everything": (everything, 4),
    "straight": (straight, 12),
    "layers": (layers, 8),
    "layers, jitted": (lambda size: layers(size, jitted=True), 12),
    "gradient inside": (gradient_inside, 6),
    "stacked": (stacked, 8),
    "functions": (functions, 12),
}
"""Programs whose size is their length, with the smallest that is measured."""

DEEP: dict[str, tuple[Callable[[int], Program], int]] = {
    "scans": (scans, 3),
    "scans in a gradient": (scans_in_gradient, 2),
    "jits": (jits, 6),
    "checkpoints": (checkpoints, 5),
}
"""Those whose size is their depth."""


JAX = "JAX's own retraces"


def questions(program: Program) -> dict[str, Callable[[], Any]]:
    """All that is asked of a program, to be called in this order."""
    answers: dict[str, Any] = {}

    def keep(name: str, answer: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: answers.setdefault(name, answer())

    def trace() -> Any:
        return answers["trace"]

    policies = ("none", "nothing_saveable", "everything_saveable")
    asked: dict[str, Callable[[], Any]] = {
        "trace": lambda: rm.trace(program[0], *program[1]),
        JAX: lambda: [half(key, "function") for key in policies for half in (trace().forward, trace().backward)],
        **{f"report {key}": lambda key=key: trace().report(key, "function") for key in policies},
        "advice": lambda: trace().advice("none", "function"),
        "advice, recomputing": lambda: trace().advice("nothing_saveable", "function"),
        "text": lambda: [
            (answers[f"report {key}"].forward.lines, answers[f"report {key}"].backward.lines) for key in policies
        ],
        "timeline": lambda: trace().timeline("nothing_saveable", "function"),
        "compare": lambda: trace().compare(policies, "function"),
        "plan": lambda: trace().plan("50%", "function"),
        "what if": lambda: trace().what_if("nothing_saveable", "function"),
        "page": lambda: html.page_html(answers["report none"], [answers["report nothing_saveable"]]),
        "widget": lambda: RematWidget(trace(), "nothing_saveable", "function").close(),
    }
    return {name: keep(name, answer) for name, answer in asked.items()}


def steps(work: Callable[[], Any]) -> Counter[CodeType]:
    """How many lines of each function of this package run, in this thread."""
    codes: dict[int, CodeType] = {}
    counts: Counter[int] = Counter()  # by id: a code object hashes all its instructions every time that it is asked

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            counts[id(frame.f_code)] += 1
        return in_function

    def anywhere(frame: FrameType, _: str, __: Any) -> Any:
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


def growth(first: float, second: float, third: float) -> float:
    """What the second doubling adds, in multiples of what the first added (or of half, where the first began more)."""
    return (third - second) / max(second - first, second / 2, 1)


Steps = dict[str, tuple[Counter[CodeType], ...]]


def counted(make: Callable[[int], Program], smallest: int) -> Steps:
    """For each question the steps in the three sizes."""
    sizes: list[dict[str, Counter[CodeType]]] = [{}, {}, {}]
    for times, of_size in zip((1, 2, 4), sizes, strict=True):
        for name, work in questions(make(smallest * times)).items():
            if name == JAX:  # which takes as long again where its steps are looked at
                work()
            else:
                of_size[name] = steps(work)
    return {name: tuple(of_size[name] for of_size in sizes) for name in sizes[0]}


def fastest(sizes: tuple[Counter[CodeType], ...]) -> tuple[float, str]:
    """The function that grows fastest, and how fast; the few steps of a doubling are left out."""
    rates = {
        code: growth(*(of_size[code] for of_size in sizes))
        for code, count in sizes[2].items()
        if count - sizes[1][code] > 200
    }
    worst = max(rates, key=rates.__getitem__, default=None)
    return (0.0, "") if worst is None else (rates[worst], f"{worst.co_filename[len(_PACKAGE) :]}:{worst.co_qualname}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("programs", nargs="*", default=[*LONG, *DEEP])
    parser.add_argument("--seconds", type=int, metavar="TIMES", help="processor time, of programs so many times larger")
    options = parser.parse_args()
    for name in options.programs:
        make, smallest = (LONG | DEEP)[name]
        if options.seconds:
            print(name, *(smallest * options.seconds * times for times in (1, 2, 4)))
            rows: dict[str, list[float]] = {}
            for times in (1, 2, 4):
                for question, work in questions(make(smallest * options.seconds * times)).items():
                    start = time.process_time()
                    work()
                    rows.setdefault(question, []).append(time.process_time() - start)
            for question, seconds in rows.items():
                print(f"  {question:28}" + "".join(f"{s:9.3f} s" for s in seconds) + f"{growth(*seconds):8.1f}")
            continue
        print(name, smallest, 2 * smallest, 4 * smallest)
        for question, sizes in counted(make, smallest).items():
            totals = [of_size.total() for of_size in sizes]
            rate, function = fastest(sizes)
            print(f"  {question:28}" + "".join(f"{t:10,}" for t in totals) + f"{growth(*totals):8.1f}", end="")
            print(f"   {function} {rate:.1f}" if rate > 2.6 else "", flush=True)


if __name__ == "__main__":
    main()
