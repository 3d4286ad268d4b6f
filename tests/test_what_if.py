"""What one value alone changes: what is reckoned in bulk is what JAX does when it is tried."""

import random
from collections import Counter

import pytest
from hypothesis import assume, given

import remat_magic as rm
from remat_magic.engine.retrace import Retrace
from remat_magic.records import Plan, RematError
from tests.generated import programs
from tests.plan_helpers import EACH_PLACE, as_reckoned, traced, transformer
from tests.test_generated import examples, outcome
from tests.test_generated import traced as traced_by_chance

POLICIES = ("as_written", "none", "dots_saveable", "nothing_saveable", "everything_saveable")


def told(trace, policy, at):
    report = trace.report(policy, None if isinstance(policy, Plan) else at)
    return report.saved_bytes, report.recomputed_flops


def is_what_jax_does(trace, at, row):
    """Trace both sides: the differences must be the ones told."""
    saved, flops = told(trace, row.against, at)
    after = told(trace, row.plan if row.plan.names else row.plan.policy, at)
    return (after[0] - saved, after[1] - flops) == (row.saved_bytes, row.recomputed_flops)


@pytest.mark.parametrize(("name", "at"), EACH_PLACE)
def test_differences_are_what_jax_does(name, at):
    trace = traced(name)
    if not as_reckoned(trace, at) or name == "complex_numbers":
        return
    dice = random.Random(name + at)
    for policy in dice.sample(POLICIES, 2):
        rows = trace.what_if(policy, at, device="H100 SXM")
        for row in dice.sample(rows, min(2, len(rows))):
            assert is_what_jax_does(trace, at, row), (policy, row)


@pytest.mark.slow
@examples(4)
@given(program=programs(depth=3))  # JAX takes minutes for branches in branches
def test_by_chance(remat3, program):
    trace = outcome(lambda: traced_by_chance(program))
    assume(isinstance(trace, rm.Trace))
    at = trace.default_at
    rows = outcome(lambda: trace.what_if("dots_saveable", at, device="H100 SXM"))
    if isinstance(rows, Exception):
        assert isinstance(rows, RematError), rows
        return
    for row in random.Random(0).sample(rows, min(2, len(rows))):
        assert is_what_jax_does(trace, at, row), row


def test_policies_of_ones_own_can_be_asked_what_if():
    def products(prim, *_, **params):
        return prim.name == "dot_general"

    trace = traced("named_tanh")
    rows = trace.what_if(products, "function", device="H100 SXM")
    by_name = trace.what_if("mine", "function", device="H100 SXM", namespace={"mine": products})
    theirs = trace.what_if("dots_saveable", "function", device="H100 SXM")
    for mine in (rows, by_name):
        assert [(row.change, row.value, row.saved_bytes, row.recomputed_flops) for row in mine] == [
            (row.change, row.value, row.saved_bytes, row.recomputed_flops) for row in theirs
        ]


def test_sites_keep_what_they_are_written_to_keep():
    trace = traced("scanned_checkpoint")  # dots_saveable in a scan of six
    rows = trace.what_if("as_written", "sites", device="H100 SXM")
    assert [(row.value.primitive, row.value.times) for row in rows if row.change == "recompute"] == [("dot_general", 6)]
    assert {row.against for row in rows} == {"as_written"}
    written = trace.report("as_written", "sites")
    assert sum(row.value.nbytes for row in rows if row.change == "recompute") + 96 == written.saved_bytes  # the carries


SHOWN = {
    "named_tanh": ("none", "dots_saveable", "save_only_these_names('h')", "50%"),
    "attention": ("none", "everything_saveable", "nothing_saveable"),
    "scanned_checkpoint": ("as_written", "none", "80%"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_row_promises_what_its_click_does_to_what_is_shown(name):
    """From the report that is shown, also where no choice of names does what its policy does (the cosine of a sine)."""
    trace = traced(name)
    at = trace.default_at
    for policy in SHOWN[name]:
        policy = trace.plan(policy, at) if policy.endswith("%") else policy
        shown = told(trace, policy, at)
        rows = trace.what_if(policy, at, device="H100 SXM")
        assert rows
        for row in random.Random(name).sample(rows, min(len(rows), 5)):
            after = told(trace, row.plan if row.plan.names else row.plan.policy, at)
            assert (after[0] - shown[0], after[1] - shown[1]) == (row.saved_bytes, row.recomputed_flops)
            assert min(row.saved_bytes, row.recomputed_flops, row.seconds) < 0 or not any(
                (row.saved_bytes, row.recomputed_flops, row.seconds)
            )  # what only loses is no trade


@pytest.mark.parametrize(
    ("options", "mend"),
    [
        ({"device": "abacus"}, "known are"),
        ({"at": "layer"}, "no checkpoint site"),
        ({"policy": "everything"}, "is not a policy"),
        ({"at": {"function": "none"}}, "one place"),
    ],
)
def test_what_cannot_be_said(options, mend):
    with pytest.raises(RematError, match=mend):
        traced("three_layers").what_if(**options)


def test_a_plan_can_be_asked_what_if():
    trace = traced("transformer")
    plan = trace.plan("50%", "sites")
    rows = trace.what_if(plan, device="H100 SXM")
    assert {row.value.key for row in rows if row.change == "recompute"} == {value.key for value in plan.names}
    assert all(row.against is plan for row in rows)
    for row in random.Random(0).sample(rows, 3):
        assert is_what_jax_does(trace, "sites", row)


@pytest.mark.slow
def test_rows_take_no_traces_of_their_own(monkeypatch):
    """JAX is asked as often for a few values as for many."""
    asked = Counter()

    def counted(own):
        return lambda *args, **kwargs: (asked.update([blocks]), own(*args, **kwargs))[1]

    for name in ("forward", "backward", "dissection"):
        monkeypatch.setattr(vars(Retrace)[name], "_make", counted(vars(Retrace)[name]._make))
    rows = {}
    for blocks in (2, 6):
        fun, args = transformer(blocks)
        rows[blocks] = len(rm.trace(fun, *args).what_if("nothing_saveable", device="H100 SXM"))
    assert rows[6] > 2 * rows[2] > 40
    assert asked[2] == asked[6] > 0
