"""Groups of a loop's steps leave what the user's loop does, also beside what was traced: at other depths, in Python."""

import tokenize
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic.records import RematError
from tests.programs import f32
from tests.test_edit import module
from tests.test_edited_loops import BLOCK, compared
from tests.volume import usually

__all__ = ["module"]

# What is in f: its results are those of the user's text with each number of layers.
AS_WRITTEN = {
    "a list that the steps take from and a jump asks": """todo = list(ws)
        for i in range(6):
            if not todo:
                break
            x = block(x, todo.pop())
        return x.sum()""",
    "a function before the loop": """h = x
        def last():
            return h
        both = lambda y, ws=ws: y + g
        for w in ws:
            x = block(x, w)
            y = h = x
            g = y * 2
        return x.sum() + (last() + both(x) if len(ws) > 7 else x).sum()""",
    "numbers and texts": """depth, name, kind = 0, "", "flat"
        for i, w in enumerate(ws):
            x = block(x, w) * (2 if kind == "flat" else 1)
            depth = i + 1
            name = f"layer{i}"
            kind = "deep" if kind == "flat" else "flat"
        for j, w in zip(itertools.count(), ws):
            x, number = block(x, w), j
            width = w.shape[-1]
        return x.sum(), {"depth": depth, name: number * width if ws else 0, kind: 1}""",
    "a variable of outside": """def through():
            nonlocal x, steps
            for i, w in enumerate(ws):
                x = block(x, w)
                steps += 1
        steps = 0
        through()
        return x.sum(), steps""",
    "a variable that others have, too": """add, many = (lambda i: i + 1), [i for i in range(3)]
        for i, w in enumerate(ws):
            x = block(x, w) * add(i)
        return (x.sum() * i if ws else x.sum()) * len(many)""",
    "what try and match assign": """for i, w in enumerate(ws):
            try:
                y = block(x, w)
            finally:
                pass
            match i % 3:
                case 0:
                    z = y
                case n if n > 1:
                    z = y * n
                case _:
                    z = y * 2
            x = z
        return x.sum()""",
    "an exception that another is raised for": """try:
            for i, w in enumerate(ws):
                x = block(x, w)
                y = x * 2
        except TypeError as error:
            raise ValueError(f"layer {i}") from error
        finally:
            z = y if "y" in locals() and y is not None else x
        return x.sum() + z.sum()""",
    "what only some steps assign": """for i, w in enumerate(ws):
            y = block(x, w)
            if i == 7:
                last = y
                break
            x = x + y
        else:
            last = x * 2
        return last.sum()""",
}


@pytest.mark.parametrize("name", usually(AS_WRITTEN, "a function before the loop", "numbers and texts"))
def test_a_group_leaves_what_the_loop_does_with_each_number_of_layers(module, name):
    text = BLOCK.format(AS_WRITTEN[name])
    made, again = module(text), module(edited(module, text).encode())
    weights, x = [*jax.random.normal(jax.random.key(0), (9, 4, 4))], jnp.ones((2, 4))
    for depth in (0, 1, 2, 3, 8, 9):
        expected, values = made.f(weights[:depth], x), again.f(weights[:depth], x)
        assert [*map(type, jax.tree.leaves(values))] == [*map(type, jax.tree.leaves(expected))]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), values, expected)


def edited(module, text):
    edit = rm.trace(module(text).f, [f32(4, 4)] * 7, f32(2, 4)).edit("dots_saveable", "block/3")
    assert edit.verified, edit.differences
    return edit.apply_text()


def test_a_loop_counts_in_a_variable_of_the_module(module):
    text = (
        BLOCK.format(
            "global CALLS, LAST, I\n        for I, w in enumerate(ws):\n            x = block(x, w)\n"
            "            CALLS += 1\n            LAST = x * 2\n        return x.sum()"
        )
        + "\n    CALLS = I = 0\n    LAST = None\n"
    )
    again = module(edited(module, text).encode())
    again.f([], jnp.ones((2, 4)))
    assert (again.CALLS, again.I, again.LAST) == (0, 0, None)
    again.f([jnp.ones((4, 4))] * 5, jnp.ones((2, 4)))
    assert (again.CALLS, again.I) == (5, 4)
    assert again.LAST.shape == (2, 4)


# What is in f, and what is said of it.
REFUSED = {
    "an exception ends it": (
        """try:
            for i in itertools.count():
                x = block(x, ws[i])
        except IndexError:
            pass""",
        "may end by an exception that is handled at line 11, by which the steps of its last group would be lost",
    ),
    "an exception that is suppressed ends it": (
        """it = iter(ws)
        with contextlib.suppress(StopIteration):
            while True:
                x = block(x, next(it))""",
        "may end by an exception that is handled at line 12",
    ),
    "it adds to an argument": (
        "for i, w in enumerate(ws):\n            x = block(x, w)\n            log += [i]",
        r"assigns `log \+= \[i\]`, which a checkpoint around its steps would hide",
    ),
    "it asks for its function": (
        "for w in ws:\n            x = block(x, w) * len(locals())",
        r"calls `locals\(\)`, which would not do the same in a function around its steps",
    ),
    "it imports": (
        "for w in ws:\n            import math\n            x = block(x, w) * math.pi",
        "defines a function in its steps, or imports",
    ),
    "a function assigns what it changes": (
        """def step(w):
            nonlocal x
            x = block(x, w)
        for w in ws:
            step(w)""",
        "assigns no variable that is read after its steps: write the checkpoint around them by hand",
    ),
    "both it and a loop in it call the function": (
        "for w in ws:\n            x = block(x, w)\n            for _ in range(2):\n                x = block(x, w)",
        "where 'block/3' is called cannot be told",
    ),
}


@pytest.mark.parametrize("name", usually(REFUSED, "an exception ends it", "it adds to an argument"))
def test_loops_that_no_group_does_the_same_as(module, name):
    loop, sentence = REFUSED[name]
    text = BLOCK.format(f"{loop}\n        return x.sum()").replace("f(ws, x)", "f(ws, x, log=[])")
    trace = rm.trace(module(f"    import contextlib\n{text}").f, [f32(4, 4)] * 6, f32(2, 4))
    with pytest.raises(RematError, match=sentence):
        trace.edit("dots_saveable", "block/3")


def test_an_edit_by_which_steps_are_chosen_otherwise_is_not_verified(module):
    """What a condition reads is changed by what a step calls: that is seen in the trace, not in the text."""
    made = module(
        BLOCK.format(
            """seen = []
        see = lambda: seen.append(1) or 1
        for w in ws:
            if len(seen) == 4:
                break
            x = block(x, w) * see()
        return x.sum()"""
        )
    )
    edit = rm.trace(made.f, [f32(4, 4)] * 7, f32(2, 4)).edit("dots_saveable", "block/3")
    assert not edit.verified
    assert edit.differences


# What is in f.
COMMENTED = {
    "list": "x = [\n            # each\n            block(x, w)  # a layer\n            for w in ws  # all\n"
    "            if w.ndim  # but no biases\n        ][-1]",
    "generator": "x = sum(  # in order\n            block(x, w)\n            # all\n            for w in ws\n        )",
    "dictionary": "x = {\n            i: block(x, w)  # a layer\n            for i, w in enumerate(\n"
    "                ws,  # all\n            )\n        }[0]",
}


@pytest.mark.parametrize("name", usually(COMMENTED, "list"))
def test_comments_of_a_comprehension_stay(module, name):
    text = BLOCK.format(f"{COMMENTED[name]}\n        return x.sum()")
    assert comments(edited(module, text)) == comments(text.replace("\n    ", "\n"))


def comments(text):
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return sorted(token.string for token in tokens if token.type == tokenize.COMMENT)


@pytest.mark.slow
def test_variables_over_several_lines_are_taken_on_one(module):
    loop = """for (
            i,  # the number
            w,
        ) in enumerate(ws):
            if i == 1:
                continue
            x = block(x, w)
        return x.sum() * i"""
    assert "\n        steps.append((i, w))\n" in compared(module, BLOCK.format(loop), "block/3")
