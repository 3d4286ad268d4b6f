"""The Plan panel's answers: what is shown is what the trace itself says of plans, single values and edits."""

import dataclasses
import itertools
import re
import threading

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import units
from remat_magic.records import Equation, FrontierPoint, Plan, Report, Residual
from remat_magic.views.edit import edit_html
from remat_magic.views.plan import frontier_svg, known_points, plan_html, plan_meaning, point_text
from remat_magic.views.what_if import flip_key, what_if_html
from remat_magic.widget import RematWidget
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.panel import Request
from remat_magic.widget.panels.plan import Plan as Planning


def loss(Ws, x):
    def step(x, W):
        y = jnp.tanh(x @ W)
        return jnp.sin(y) * y, None

    return jax.lax.scan(step, x, Ws)[0].sum()


ARGUMENTS = (jax.ShapeDtypeStruct((8, 16, 16), "float32"), jax.ShapeDtypeStruct((4, 16), "float32"))


class Browser:
    """Keeps what is sent, and what is chosen."""

    def __init__(self):
        self.messages, self.chosen, self._news = [], [], threading.Condition()

    def __call__(self, message):
        with self._news:
            self.messages.append(message)
            self._news.notify_all()

    def choose(self, plan, serial):
        self.chosen.append((plan, serial))

    def of(self, kind, seconds=60):
        """The first message of a kind."""

        def found():
            return next((message for message in self.messages if message["type"] == kind), None)

        with self._news:
            assert self._news.wait_for(found, seconds), (kind, self.messages)
            return found()


@pytest.fixture
def trace():
    return rm.trace(loss, *ARGUMENTS)


@pytest.fixture
def browser():
    return Browser()


@pytest.fixture
def planning(trace, browser):
    live = LiveTrace(trace)
    panel = Planning(live, browser, browser.choose)
    yield panel
    live.close()
    panel.close()


def ask(planning, kind, **more):
    planning.handle(Request({"type": kind, "policy": "nothing_saveable", "at": "function", **more}))


def test_the_slider_has_the_frontier(planning, browser, trace):
    trace.report("dots_saveable")  # known, and so drawn
    ask(planning, "frontier")
    answer = browser.of("frontier")
    points = trace.frontier(at="function")
    assert [stop["budget"] for stop in answer["stops"]] == [point.budget_bytes for point in points]
    assert answer["html"].count('class="remat-stop"') == len(points)
    assert "dots_saveable:" in answer["html"]
    assert "nothing_saveable:" not in answer["html"]  # it was not asked for


def test_between_two_stops_both_bound_what_can_be_had(planning, browser, trace):
    """While the slider moves nothing is solved: what is said of a budget must hold of the plan that is then made."""
    ask(planning, "frontier")
    stops = browser.of("frontier")["stops"]
    points = trace.frontier(at="function")
    assert len(stops) == len(points)
    for stop, below, above in [*zip(stops, points, points[1:], strict=False)][::3]:
        plan = trace.plan((below.budget_bytes + above.budget_bytes) // 2, "function")
        # A policy of JAX's may keep what no name reaches.
        assert plan.recomputed_flops >= above.bound or plan.policy in ("none", "everything_saveable")
        assert plan.recomputed_flops <= below.recomputed_flops
        assert units.flops(below.recomputed_flops) in stop["beyond"]
        assert units.flops(above.bound) in stop["beyond"]


def test_a_plan_is_chosen_and_told(planning, browser, trace):
    most = trace.report("none", "function").saved_bytes
    ask(planning, "plan", budget="50%", serial=7)
    html = browser.of("plan")["html"]
    ((plan, serial),) = browser.chosen
    assert serial == 7
    assert plan.budget_bytes == most // 2
    report = trace.report(plan)
    assert f"Saves {units.nbytes(report.saved_bytes)} of {units.nbytes(most // 2)}" in html
    assert units.flops(report.recomputed_flops) in html
    assert html.count('class="remat-row"') == len(plan.names)


def test_a_plan_is_shown_by_its_budget(trace):
    widget = RematWidget(trace, at="function")
    plan = trace.plan(0.5, "function")
    widget._choose_plan(plan, 1)
    widget._worker.join()
    view = widget._render(trace.report(plan))
    # The key is for programs; its label, and what stands in place of code, are for readers.
    assert view["policy"] == plan.policy == f"plan({plan.budget_bytes} at {plan.at})".replace(" at function", "")
    assert view["label"] == f"plan within {units.nbytes(plan.budget_bytes)}"
    assert "widget.plan.save(path)" in view["unpasted"]
    assert view["planned"]  # for which a button leads to the edit
    assert not widget._render(trace.report("none", "function"))["planned"]
    assert view["label"] in view["parts"]["totals"] or plan.policy not in view["parts"]["totals"]
    assert widget._render(trace.report("none", "function"))["unpasted"] == "your source as it is"
    # Another choice for the same words is another policy: its own figures, and a label that tells it apart.
    other = dataclasses.replace(plan, names=plan.names[:1])
    widget._choose_plan(other, 2)
    widget._choose_plan(plan, 3)
    assert [*widget._live.plans("function")] == [plan.policy, f"{plan.policy} #2"]
    widget.policy = f"{plan.policy} #2"
    assert widget.report.saved_bytes == trace.report(other).saved_bytes != trace.report(plan).saved_bytes
    assert widget._render(widget.report)["label"] == f"{plan.label} #2"
    widget.close()


def test_a_budget_that_is_none_is_a_sentence(planning, browser):
    ask(planning, "plan", budget="much")
    assert "much" in browser.of("plan")["error"]
    assert browser.chosen == []


def test_a_click_does_what_it_says(planning, browser, trace):
    ask(planning, "what-if")
    html = browser.of("what-if")["html"]
    rows = trace.what_if("nothing_saveable", "function")
    assert len(re.findall("data-flip=", html)) == sum(any((r.saved_bytes, r.recomputed_flops, r.seconds)) for r in rows)
    ask(planning, "flip", flip=flip_key(rows[0]), serial=3)
    planning._workers["flip"].join()
    ((plan, serial),) = browser.chosen
    assert serial == 3
    before = trace.report(rows[0].against, None if isinstance(rows[0].against, Plan) else "function")
    after = trace.report(plan)
    # The figures of the row are those of JAX.
    assert after.saved_bytes - before.saved_bytes == rows[0].saved_bytes
    assert after.recomputed_flops - before.recomputed_flops == rows[0].recomputed_flops


def test_a_click_on_an_older_list_chooses_nothing_else(planning, browser, trace):
    """The list that the browser shows may be older than the newest: a row's place in it says nothing."""
    ask(planning, "what-if")
    browser.of("what-if")
    ask(planning, "what-if", policy="everything_saveable")
    planning._workers["what-if"].join()
    clicked = trace.what_if("nothing_saveable", "function")[0]
    ask(planning, "flip", flip=flip_key(clicked), serial=3)
    planning._workers["flip"].join()
    assert browser.chosen == []
    assert browser.of("flip")["error"] == (
        "That row is of a list that is no longer here: press What if again, and choose from the new list"
    )
    again = trace.what_if("everything_saveable", "function")[0]
    ask(planning, "flip", flip=flip_key(again), serial=4)
    planning._workers["flip"].join()
    assert [plan for plan, _ in browser.chosen] == [again.plan]


def test_the_edit_is_a_diff_that_was_verified(planning, browser, trace):
    ask(planning, "edit", policy="dots_saveable")
    html = browser.of("edit")["html"]
    assert trace.edit("dots_saveable", "function").verified
    assert "Verified: the edited source" in html
    assert "+@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)" in html


def test_closed_it_answers_nothing(planning, browser):
    planning._live.close()
    planning.close()
    for kind in ("frontier", "plan", "what-if", "edit"):
        ask(planning, kind, budget=1)
        planning._workers[kind].join()
    assert browser.messages == browser.chosen == []


# ------------------------------------------------------------------------------------------------------------ the views


def test_nothing_between_two_budgets_is_said_to_be_impossible_that_is_not():
    """The bound of the larger budget holds from the smaller one on: the shade is in steps, below the bounds."""
    points = [FrontierPoint(0, 0, 100, 100), FrontierPoint(100, 100, 20, 10), FrontierPoint(200, 200, 0, 0)]
    page = frontier_svg(points)
    shade = re.search(r'<path d="([^"]*)" class="remat-bound"', page)[1]
    heights = [float(height) for height in re.findall(r"V([\d.]+)H", shade)]
    stops = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', page)]
    assert len(heights) == len(points) - 1
    assert all(height >= stop for height, stop in zip(heights, stops[1:], strict=True))  # downwards in a picture
    assert "Nothing to show" in frontier_svg([])


def drawn(page, name):
    """The corners of a path, in pixels."""
    (path,) = re.findall(rf'<path d="([^"]*)" class="{name}"', page)
    x, y, corners = 0.0, 0.0, []
    for command, first, second in re.findall(r"([MHV])([\d.]+)(?:,([\d.]+))?", path):
        x = float(first) if command in "MH" else x
        y = float(second) if command == "M" else float(first) if command == "V" else y
        corners.append((x, y))
    return corners


def test_what_is_known_is_on_the_staircase_and_nothing_in_the_shade():
    """A policy of JAX's that does better than was sampled, one beyond all names, and one that offloads."""
    points = [FrontierPoint(1000 * i, 1000 * i, 900 - 100 * i, 800 - 100 * i) for i in range(9)]

    def report(key, saved, flops, offloaded=0):
        kinds = ("intermediate", saved), ("offloaded", offloaded)
        return Report(
            key,
            "function",
            residuals=tuple(Residual("f32", (size // 4,), size, kind) for kind, size in kinds if size),
            recomputed=(Equation("dot_general", ("f32[1]",), flops, 0, 1, None),),
        )

    better, beyond = report("better", 2400, 620), report("beyond", 4400, 100)
    offloads, worse = report("offloads", 1000, 90, 5000), report("worse", 5200, 800)
    known = [better, beyond, offloads, worse]
    improved = known_points(points, known)
    assert [point.recomputed_flops for point in improved[:6]] == [900, 800, 700, 600, 500, 100]
    assert all(point.bound <= point.recomputed_flops for point in improved)
    page = frontier_svg(points, known)
    stairs, shade = drawn(page, "remat-plans"), drawn(page, "remat-bound")
    right, bottom = max(x for x, _ in shade), max(y for _, y in shade)
    scale_x, scale_y = (right - shade[0][0]) / 8000, (bottom - stairs[0][1]) / 900

    def at(saved, flops):
        return shade[0][0] + saved * scale_x, bottom - flops * scale_y

    for what in (better, beyond):
        assert any(
            abs(x - at(what.saved_bytes, 0)[0]) < 0.2 and abs(y - at(0, what.recomputed_flops)[1]) < 0.2
            for x, y in stairs
        )
    heights = [y for _, y in stairs]
    assert heights == sorted(heights)  # down to the right
    for saved, flops in ((2400, 620), (4400, 100), (6000, 90), (5200, 800)):
        x, y = at(saved, flops)
        tops = [top for (left, top), (end, same) in itertools.pairwise(shade) if left < x - 0.2 < end and top == same]
        assert all(y <= top + 0.2 for top in tops), (saved, flops)
    assert "offloads, both memories together" in page
    assert "5.00 kB moved to the host" in page


def test_slider_dot_and_sentence_are_of_one_plan(planning, browser, trace):
    """After a typed budget as after a release of the slider: the report's own figures, where the budget is."""
    ask(planning, "frontier")
    browser.of("frontier")
    for number, (budget, of) in enumerate((("37%", "saved"), (3000, "saved"), ("100%", "peak"))):
        browser.messages.clear()
        ask(planning, "plan", budget=budget, of=of, serial=number)
        answer = browser.of("plan")
        assert "error" not in answer, answer
        plan = browser.chosen[-1][0]
        report = trace.report(plan)
        again = units.flops(report.recomputed_flops)
        assert f": {again} again" in answer["text"]
        assert f"recomputes {again}" in answer["html"]
        budgets = [stop["budget"] for stop in answer["stops"]]
        below = int(answer["place"])
        where = plan.budget_bytes if of == "saved" else plan.saved_bytes
        if where < budgets[-1]:
            between = budgets[below] + (answer["place"] - below) * (budgets[below + 1] - budgets[below])
            assert between == pytest.approx(where)
        (dot,) = re.findall(r'class="remat-chosen" data-plan="([^"]*)"', answer["picture"])
        assert dot == plan.policy
        # No stop beside it promises less than the plan has shown to be possible.
        for stop, point in zip(answer["stops"], known_points(trace.frontier(at="function"), [plan]), strict=True):
            assert stop["text"].startswith(f"{units.nbytes(point.budget_bytes)}: {units.flops(point.recomputed_flops)}")


def test_a_point_says_its_bytes_its_work_and_its_bound():
    assert point_text(FrontierPoint(2_000_000, 1, 50, 40), 1000) == (
        "2.00 MB: 50 FLOPs again, 5.0% of the forward pass; never less than 40 FLOPs"
    )
    assert point_text(FrontierPoint(2, 1, 50, 50), None) == "2 B: 50 FLOPs again; proven least"


# What is recomputed, the bound, what names do not reach, and what is said of the bound: a half may be twice the least.
PROVEN = [
    (10, 10, (), "10 FLOPs, proven best;"),
    (10, 10, ("a derivative",), "10 FLOPs, the least of all choices of names;"),
    (10, 5, (), "10 FLOPs, never less than 5 FLOPs;"),
    (10, 5, ("a derivative",), "10 FLOPs, no choice of names has less than 5 FLOPs;"),
    (10, 0, (), "10 FLOPs;"),  # as for a peak on a device, where no bound is known
]


@pytest.mark.parametrize(("flops", "bound", "unreached", "text"), PROVEN)
def test_a_plan_says_its_budget_and_what_is_proven(flops, bound, unreached, text):
    plan = Plan("f", "function", "dots_saveable", 100, 90, flops, bound, of="peak", unreached=unreached)
    assert plan_meaning(plan) == "Recompute as little as possible within 100 B of an estimated peak."
    assert f"recomputes {text}" in plan_html(plan)
    assert "no value needs a name" in plan_html(plan)


def test_nothing_to_choose_is_said():
    assert "No single value" in what_if_html(())
    assert Report("none", "function").policy == "none"
    assert "Nothing is to be edited" in edit_html(rm.trace(loss, *ARGUMENTS).edit("as_written"))
