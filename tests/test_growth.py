"""What can be asked of a trace grows no faster than its program, counted in steps, which no busy machine changes."""

import pytest

import remat_magic as rm
from tests.benchmarks import growth

pytestmark = pytest.mark.slow  # of how much is worked out

# What is shown of few values and of many differs: groups, folds, numbers with more digits. Some of it is cached.
_SHOWN = ("page", "widget", "text", "compare")


# Everything one after another is more than that; what is jitted has the calls, the checkpoints and the products.
@pytest.mark.parametrize(
    ("program", "smallest"),
    [("layers, jitted", 3), ("everything", 3), ("everything", 4)],
)
def test_work_grows_with_the_length_of_a_program(program, smallest):
    make, _ = growth.LONG[program]  # the others are counted by the benchmark
    for question, sizes in growth.counted(make, smallest).items():
        first, second, third = (of_size.total() for of_size in sizes)
        assert third < 3 * max(first, second), question
        if question not in _SHOWN:
            assert growth.growth(first, second, third) < 2.5, question
            rate, function = growth.fastest(sizes)
            assert rate < 3, f"{question}: {function}"


@pytest.mark.parametrize(
    ("program", "smallest"),
    [("scans", 1), ("scans", 2), ("scans", 3)],
)
def test_work_grows_with_the_depth_of_a_program_as_its_jaxprs_do(program, smallest):
    """These grow with the square of the depth, of which the second doubling adds four times what the first did."""
    make, _ = growth.DEEP[program]
    for question, sizes in growth.counted(make, smallest).items():
        if question not in _SHOWN or question == "text":
            assert growth.growth(*(of_size.total() for of_size in sizes)) < 4.5, question


def test_layers_that_add_to_one_stream_are_not_each_compared_with_all_before():
    """They stand on one line, where only the operands tell an operation from its derivative."""
    counts = []
    for size in (6, 12, 24):
        trace = rm.trace(*_call(growth.gradient_inside(size)))
        counts.append(growth.steps(lambda trace=trace: trace.report("nothing_saveable", "function")))
    rate, function = growth.fastest(tuple(counts))
    assert rate < 3, function


def _call(program):
    function, args = program
    return function, *args
