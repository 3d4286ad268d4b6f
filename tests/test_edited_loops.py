"""Groups of steps of loops that jump: the text is what a person would write, and computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic.records import RematError
from tests.programs import f32
from tests.test_edit import answers, module
from tests.test_models import library
from tests.volume import usually

__all__ = ["module"]

BLOCK = """
    import itertools

    def block(x, w):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    def f(ws, x):
        {}
"""


def compared(module, text, at):
    """The edited text, which JAX saves and repeats the same with as with the place, with the values of the user's."""
    made = module(text)
    ws, x = [*jax.random.normal(jax.random.key(0), (7, 4, 4))], jnp.linspace(0, 1, 8).reshape(2, 4)
    trace = rm.trace(made.f, ws, x)
    edit = trace.edit("dots_saveable", at)
    assert edit.verified, edit.differences
    again = module(edit.apply_text().encode())
    assert answers(rm.trace(again.f, ws, x).report()) == answers(trace.report("dots_saveable", at))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        jax.value_and_grad(again.f, (0, 1))(ws, x),
        jax.value_and_grad(made.f, (0, 1))(ws, x),
    )
    return edit.apply_text()


# What is in f, and lines of the edited text.
JUMPS = {
    "steps that are chosen before": (
        """for i, (w, v) in enumerate(zip(ws, ws)):
            # not these
            if i in (1, 2): continue

            if i == 6:
                break
            x = block(x, w) * v.sum()  # a layer
        return x.sum() * i""",
        """        steps = []
        for i, (w, v) in enumerate(zip(ws, ws)):
            # not these
            if i in (1, 2): continue

            if i == 6:
                break
            steps.append((i, (w, v)))
        for first in range(0, len(steps), 3):

            @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
            def group(x):
                for i, (w, v) in steps[first : first + 3]:
                    x = block(x, w) * v.sum()  # a layer
                return x

            x = group(x)
        return x.sum() * i""",
    ),
    "a variable of a loop without end": (
        """for i in itertools.count():
            x = block(x, ws[i // 2])
            if i + 1 == 2 * x.shape[1]:
                break
        return (x + jnp.zeros((i, 4))[:2]).sum() * i""",
        """        i = None
        ended = False
        steps = iter(itertools.count())
        while few := list(itertools.islice(steps, 3)):

            @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
            def group(x):
                nonlocal ended, i
                for i in few:
                    x = block""",
    ),
    "a variable of a loop that has a value before": (
        """i = 0
        for i, w in enumerate(ws):
            x = block(x, w)
        return x.sum() * i""",
        "        i = 0\n        steps = list(enumerate(ws))\n",
    ),
    "a break by what the steps count": (
        """n, it = 0, itertools.cycle(ws)
        for w in it:
            x = block(x, w)
            n += 1
            if n == 8: break
        else:
            x = x + 1
        return x.sum() * n""",
        """        ended = False
        steps = iter(it)
        while few := list(itertools.islice(steps, 3)):

            @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
            def group(x):
                nonlocal ended, n
                for w in few:
                    x = block(x, w)
                    n += 1
                    if n == 8: ended = True; break
                return x

            x = group(x)
            if ended:
                break
        else:
            x = x + 1
        return x.sum() * n""",
    ),
    "what a loop goes through, over several lines": (
        """for i, w in (
            enumerate(
                ws,  # all
            )
        ):
            if i == 1:
                continue
            elif i == 5:
                break
            x = block(x, w)
        for w in [
            *ws[:4],
        ]:
            x = block(x, w)
        return x.sum()""",
        """        steps = []
        for i, w in (enumerate(
                ws,  # all
            )):
            if i == 1:
                continue
            elif i == 5:
                break
            steps.append((i, w))
        for first in range(0, len(steps), 3):

            @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
            def group(x):
                for i, w in (
                    steps[first : first + 3]
                ):
                    x = block(x, w)
                return x

            x = group(x)
        steps_ = list([
            *ws[:4],
        ])
        for first_""",
    ),
    "a break in a while loop": (
        """i = 0
        while True:
            if i >= len(ws):
                break
            x = block(x, ws[i])
            i += 1
        return x.sum()""",
        """        while True:

            @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
            def group(x):
                nonlocal ended, i
                for _ in range(3):
                    if i >= len(ws):
                        ended = True
                        break
                    x = block(x, ws[i])
                    i += 1
                return x

            x = group(x)
            if ended:
                break
        return""",
    ),
    "a break for what the loop does at its end": (
        """for i, w in enumerate(ws):
            if i == 20:
                break
            x = block(x, w)
        # all
        else:
            for w in ws[:2]:
                x = x @ w
        return x.sum()""",
        "            if ended:\n                break\n        # all\n        else:\n            for w in ws[:2]:",
    ),
    "a step that goes on in its middle": (
        """i, y = 0, x
        while i < len(ws):
            x = block(x, ws[i])
            i += 1
            if i % 2:
                continue
            y = x * 2
        else:
            x = x + y
        return x.sum() + y.sum()""",
        "            def group(x, y):\n                nonlocal i\n",
    ),
    "jumps of a loop in the steps": (
        """for i, w in enumerate(ws):
            x = block(x, w)
            for k in range(3):
                if k == i:
                    break
            else:
                if i == 4:
                    break
                continue
            x = x + k
        return x.sum()""",
        "                    if i == 4:\n                            ended = True\n                            break\n"
        "                        continue\n",
    ),
    "a condition that the steps have a part in": (
        """seen = []
        for i, w in enumerate(ws):
            with jax.named_scope("layer"):
                if len(seen) > 4:
                    break
            x = block(x, w)
            seen += [i]
        return x.sum()""",
        "                        if len(seen) > 4:\n                            ended = True\n",
    ),
}
USUAL = (
    "steps that are chosen before",
    "what a loop goes through, over several lines",
    "a break by what the steps count",
    "a break in a while loop",
)


@pytest.mark.parametrize("name", usually(JUMPS, *USUAL))
def test_groups_of_steps_that_jump(module, name):
    loop, lines = JUMPS[name]
    text = compared(module, BLOCK.format(loop), "block/3")
    assert dedented(lines) in text, text


# What is in f, and lines of the edited text.
MAPS = {
    "a map that is summed": (
        "return sum(map(lambda w: block(x, w).sum() * 2, ws))",
        '''        def map_in_groups(function, *iterables):
            """Like map, with one checkpoint around each 3 steps."""
            steps = zip(*iterables)
            while few := list(itertools.islice(steps, 3)):

                @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
                def group():
                    return [function(*step) for step in few]

                yield from group()

        return sum(map_in_groups(lambda w: block(x, w).sum() * 2, ws))''',
    ),
    "a map of several, of a dictionary": (
        "ys = dict(zip('abcdefg', map(block, [x] * 7, ws)))\n        return sum(y.sum() for y in ys.values())",
        "dict(zip('abcdefg', map_in_groups(block, [x] * 7, ws)))",
    ),
    "a map that is reduced": (
        "return functools.reduce(jnp.add, map(functools.partial(block, x), ws)).sum()",
        "functools.reduce(jnp.add, map_in_groups(functools.partial(block, x), ws))",
    ),
    "a reduction of a map": (
        "step = block\n        return functools.reduce(step, list(map(jnp.sin, ws)), x).sum()",
        "functools.reduce(function, few, value)",
    ),
    "a map in a loop": (
        "for _ in range(2):\n            x = sum(list(map(lambda w: block(x, w), ws[:3])))\n        return x.sum()",
        "            x = sum(list(map_in_groups(lambda w: block(x, w), ws[:3])))",
    ),
    "a map of a tree": (
        """t = {"a": ws[:3], "b": tuple(ws[3:])}
        pairs = jax.tree.map(lambda w: (x, x), t)
        t = jax.tree.map(lambda w, pair: block(pair[0], w) + pair[1], t, pairs, is_leaf=lambda t: hasattr(t, "ndim"))
        return sum(y.sum() for y in jax.tree.leaves(t))""",
        '''        def tree_map_in_groups(function, tree, *rest, is_leaf=None):
            """Like jax.tree.map, with one checkpoint around each 3 steps."""
            leaves, structure = jax.tree.flatten(tree, is_leaf)
            steps, values = zip(leaves, *map(structure.flatten_up_to, rest)), []
            while few := list(itertools.islice(steps, 3)):

                @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
                def group():
                    return [function(*step) for step in few]

                values += group()
            return jax.tree.unflatten(structure, values)''',
    ),
}


@pytest.mark.parametrize("name", usually(MAPS, "a map that is summed", "a map of a tree"))
def test_groups_of_what_a_map_calls(module, name):
    loop, lines = MAPS[name]
    text = compared(module, "    import functools\n" + BLOCK.format(loop), "block/3")
    assert dedented(lines).replace("@partial", "@functools.partial") in text, text


def test_a_group_that_would_go_from_one_run_of_a_loop_into_the_next_says_so(module):
    made = module(
        BLOCK.format(
            "for _ in range(3):\n            for w in ws:\n                x = block(x, w)\n        return x.sum()"
        )
    )
    edit = rm.trace(made.f, [f32(4, 4)] * 4, f32(2, 4)).edit("dots_saveable", "block/3")
    assert not edit.verified
    assert "no group goes from one run into the next: choose a number that divides a run's calls" in edit.differences[0]


def test_functions_after_a_generator_in_groups_are_what_they_were(module):
    loop = """x = sum(block(x, w) for w in ws)
        return last(x, lambda y: y + 1)

    def last(x, then):
        return then(x).sum()"""
    assert "lambda steps=steps: list(itertools.islice(steps, 3))" in compared(module, BLOCK.format(loop), "block/3")


def dedented(lines):
    """Lines of this file as they stand in the text, which is less far indented."""
    return "\n".join(line.removeprefix("    ") for line in lines.split("\n"))


OF_LINEN = """
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + jnp.tanh(nn.Dense(4)(jnp.sin(x)))

    class Net(nn.Module):
        def setup(self):
            self.blocks = [Block() for _ in range(6)]

        def __call__(self, x):
            for i, block in {}:
                if i == 1:
                    continue
                x = block(x)
                if i == 4:
                    break
            return x.sum()

    def made():
        return Net().init(jax.random.key(0), jnp.ones((2, 4)))

    def f(weights, x):
        return Net().apply(weights, x)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_loop_of_linen_that_breaks(module):
    library("flax.linen")
    made = module(OF_LINEN.format("enumerate(self.blocks)").replace("i == 1", "i == 8"))
    weights, x = made.made(), jnp.linspace(0, 1, 8).reshape(2, 4)
    edit = rm.trace(made.f, weights, x).edit("nothing_saveable", "Block.__call__/2")
    assert edit.verified, edit.differences
    again = module(edit.apply_text().encode())
    jax.tree.map(np.testing.assert_array_equal, again.made(), weights)
    np.testing.assert_allclose(jax.grad(again.f, 1)(weights, x), jax.grad(made.f, 1)(weights, x), rtol=1e-6)
    endless = module("    import itertools\n" + OF_LINEN.format("zip(itertools.count(), self.blocks)"))
    with pytest.raises(RematError, match="may only end by its `break`: let it go through a list or a range, and ask"):
        rm.trace(endless.f, weights, x).edit("nothing_saveable", "Block.__call__/2")
