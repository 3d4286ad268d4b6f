"""The Choices and Memory panels on the kernel's side, with the real engine and without a browser."""

import html
import json
import re
from dataclasses import replace

import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import devices, units
from remat_magic.records import (
    Advice,
    Comparison,
    ComparisonRow,
    FitChoice,
    SourceSpan,
)
from remat_magic.views import choices
from remat_magic.views.format import about
from remat_magic.views.headline import advice_html
from remat_magic.widget import first_screen
from remat_magic.widget.first_screen import FirstScreen
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.panels import PANELS, Request
from tests.plot_records import xla_memory
from tests.pretend_compiler import SIZES
from tests.widget_frame import Browser


def loss(w, x):
    for _ in range(3):
        x = jnp.sin(w @ x)
    return jnp.sum(x)


ARGUMENTS = (jnp.ones((8, 8)), jnp.ones((8, 8)))


@pytest.fixture
def browser():
    return Browser()


@pytest.fixture
def comparing(browser):
    panels = Panels(LiveTrace(rm.trace(loss, *ARGUMENTS)), browser)
    yield panels
    panels.close()


class Panels:
    """All of a widget's, which share a trace."""

    def __init__(self, live, browser):
        self.live = live
        self.panels = [panel(live, browser, None) for panel in (*PANELS, FirstScreen)]

    def handle(self, request):
        next(panel for panel in self.panels if request.kind in panel._workers).handle(request)

    def close(self):
        self.live.close()
        for panel in self.panels:
            panel.close()


def ask(comparing, kind, **content):
    comparing.handle(Request({"type": kind, "policy": "dots_saveable", "at": "function", **content}))


def test_policies_are_choices_where_nothing_is_to_fit(comparing, browser):
    """All in one table, with what they keep and repeat, and no line."""
    ask(comparing, "tried", device="")
    html = browser.of("tried")["html"]
    assert 'data-policy="nothing_saveable" data-at="function"' in html
    assert "remat-fits" not in html
    assert 'data-control="budget"' not in html


def test_all_that_was_tried_is_told_as_it_grows_and_a_plan_for_a_budget_is_added(comparing, browser):
    live = comparing.live
    live.choose_device("A100 40GB SXM")
    ask(comparing, "tried", device=live.device)
    assert "Looking for what fits" in browser.of("tried")["html"]
    *_, fit = live.trace.fitting(live.device)
    live.show_fit(fit)
    browser.messages.clear()
    ask(comparing, "tried", device=live.device)
    told = browser.of("tried")
    assert told["count"] == len(fit.tried) == told["html"].count('<tr class="remat-row"')
    sizes = sorted({choice.needed_bytes for choice in fit.tried if choice.needed_bytes and not choice.unusable})
    least, most = (int(re.search(rf'data-{end}="(-?\d+)"', told["html"])[1]) for end in ("least", "most"))
    assert least < sizes[0] < sizes[-1] < most  # the slider has the range that there is
    browser.messages.clear()
    ask(comparing, "plan", budget=sizes[-1])
    said = browser.of("plan")
    assert said["said"].startswith(f"A plan for {units.nbytes(sizes[-1])}: ")
    plan = live.trace.plan(peak=sizes[-1], device=live.like)
    ask(comparing, "tried", device=live.device)
    again = browser.of("tried")
    assert f'data-policy="{html.escape(plan.policy)}" data-at="{html.escape(plan.at)}"' in again["html"]
    assert live.policy(plan.policy, plan.at) == plan or not plan.names


def test_what_donates_is_told_apart_by_its_place(comparing):
    """The same policy with the same arguments, at two places."""
    live = comparing.live
    one = FitChoice("a", "nothing_saveable", "loss", 1, 1, 1, None, donate=("w",))
    other = replace(one, what="b", at="function")
    live.offer([one, other])
    assert [live.policy(one.key, at) for at in ("loss", "function")] == [one, other]
    assert live.donating(one.key, "nowhere") is None


def test_what_each_policy_does_is_told_for_the_list(comparing, browser, monkeypatch):
    """As it is found out, then with those that do the same together and the front of all: what Compare has."""
    trace = comparing.live.trace
    monkeypatch.setattr(first_screen, "_TELL", 0)
    comparing.live.choose_device("A100 40GB SXM")
    plan = comparing.live.preview(trace.plan(0.3, "function"), "function").policy
    keys = [*(choice.key for choice in trace.choices()), plan]
    ask(comparing, "choices", device="A100 40GB SXM", policies=[*keys, 7])
    browser.wait(lambda message: message["type"] == "choices" and message["done"])
    answers = [message for message in browser.messages if message["type"] == "choices"]
    assert [answer["done"] for answer in answers] == [False] * len(keys) + [True]
    early = answers[2]["rows"]
    assert [row["keys"] for row in early] == [[key] for key in keys[:3]]
    assert not any(row["front"] for row in early)
    compared = trace.compare(at="function", device="A100 40GB SXM", besides=[comparing.live.policy(plan)])
    for told, row in zip(answers[-1]["rows"], compared, strict=True):
        assert told["keys"] == [row.policy, *row.same_as]
        assert (told["saved"], told["peak"]) == (
            units.nbytes(row.saved_bytes),
            about(row.peak_bytes, row.peak_low, row.peak_high),
        )
        assert told["repeated"].startswith(units.flops(row.repeated_flops) if row.repeated_flops else "nothing")
        assert told["front"] == row.pareto
        # What was told of each alone was the same.
        alone = [each for answer in answers[:-1] for each in answer["rows"] if each["keys"][0] in told["keys"]]
        assert {(each["saved"], each["repeated"], each["peak"]) for each in alone} == {
            (told["saved"], told["repeated"], told["peak"])
        }
    assert plan in [key for row in answers[-1]["rows"] for key in row["keys"]]
    assert any(row["front"] for row in answers[-1]["rows"])


@pytest.mark.parametrize(
    ("changes", "repeated"),
    [({}, "20 FLOPs"), ({"complete": False}, "≥ 20 FLOPs"), ({"repeated_flops": 0}, "nothing"),
     ({"repeated_flops": 0, "complete": False}, "unknown"), ({"repeated_flops": None}, "unknown"),
     ({"forward_flops": 0}, "20 FLOPs")],
)  # fmt: skip
def test_what_is_not_known_of_a_policy_is_said(changes, repeated):
    figures = {"saved_bytes": 8, "peak_bytes": None, "repeated_flops": 20, "forward_flops": 100, **changes}
    told = choices.figures(ComparisonRow("none", "function", **figures))
    assert (told["repeated"], told["peak"]) == (repeated, "unknown")
    assert choices.figures(ComparisonRow("none", "function", error="No.")) == {"keys": ["none"], "error": "No."}


def test_advice_is_shown_with_its_code_and_escaped(comparing, browser):
    ask(comparing, "advice", policy="nothing_saveable")
    assert "recomputes everything" in browser.of("advice")["html"]
    html = advice_html(
        [Advice("only-costs", "It is.", "Leave it.", 2048, "bytes", SourceSpan("m.py", "f", 3, 0, 3, 1))]
    )
    assert "2.05 kB" in html
    assert "m.py:3" in html
    quoted = advice_html([Advice("saved", "`x * 2 < y` keeps it.", "Write `f(x)`.", None, "bytes")])
    assert "<code>x * 2 &lt; y</code> keeps it." in quoted
    assert "<i>Write <code>f(x)</code>.</i>" in quoted
    both = advice_html([Advice("saved", "It is.", "`name(x)`, and policy=a.", None, "bytes", code="policy=a")])
    assert "<i><code>name(x)</code>, and </i><code>policy=a</code><i>.</i>" in both
    assert advice_html([]) == ""


def test_the_compiler_is_asked_and_its_word_is_every_figure_from_then_on(browser, pretend, cache):
    """In the verdict, the rows and the list of policies; of that device only."""
    started = pretend(SIZES)
    comparing = Panels(LiveTrace(rm.trace(loss, *ARGUMENTS), device="H100 SXM"), browser)
    *_, fit = comparing.live.trace.fitting("H100 SXM", compile=False)
    comparing.live.show_fit(fit)
    chosen = next(choice for choice in fit.tried if choice.policy not in ("as_written", "none"))
    of = {"policy": chosen.policy, "at": chosen.at, "device": "H100 SXM"}
    ask(comparing, "screen", **of)
    assert "Ask the compiler" in browser.of("screen")["verdict"]
    assert f"about {units.nbytes(chosen.needed_bytes)}</b>" in browser.of("screen")["verdict"]
    ask(comparing, "ask", **of)
    browser.wait(lambda message: message["type"] == "ask")
    ask(comparing, "screen", **of)
    told = browser.wait(lambda message: "compiled" in message.get("verdict", ""))
    assert {name: told[name] for name in of} == of
    assert ">21 B</b> of 63.7 GB, 63.7 GB left" in told["verdict"]
    assert "XLA computes 2 instructions again by itself" in told["verdict"]
    assert "Ask the compiler" not in told["verdict"]
    figures = {(row["policy"], row["at"]): row for row in browser.of("fit")["figures"]}
    row = figures[chosen.policy, chosen.at]
    assert (row["needed"], row["fits"]) == ("21 B", "fits, compiled")
    assert all("compiled" not in other["fits"] for other in figures.values() if other is not row)
    ask(comparing, "tried", device="H100 SXM")
    assert ">21 B, compiled<" in browser.of("tried")["html"]
    assert len(started.read_text().split()) == 1
    comparing.live.choose_device("B200")
    ask(comparing, "screen", device="B200")
    assert (
        "estimate" in browser.wait(lambda message: message.get("device") == "B200" and "verdict" in message)["verdict"]
    )
    comparing.close()


def test_xlas_memory_over_time_follows_the_compilation(browser, pretend, cache):
    """In the tab that was open before, and in one that is opened later."""
    timeline = json.dumps(xla_memory().to_dict())
    pretend(SIZES.replace("answer(", f"answer(timeline=json.loads({timeline!r}), "))
    comparing = Panels(LiveTrace(rm.trace(loss, *ARGUMENTS), device="H100 SXM"), browser)
    ask(comparing, "memory", device="H100 SXM")
    assert "XLA for" not in browser.of("memory")["html"]
    ask(comparing, "ask", device="H100 SXM")
    browser.wait(lambda message: message["type"] == "ask")
    ask(comparing, "memory", device="H100 SXM")
    html = browser.wait(lambda message: message["type"] == "memory" and "XLA for" in message["html"])["html"]
    assert "XLA for H100 SXM" in html
    assert "program for H100 SXM 4.10 kB" in html
    # Neither was it compiled for another device, nor another choice for this one.
    browser.messages.clear()
    ask(comparing, "memory", device="TPU v5e")
    assert "XLA for" not in browser.of("memory")["html"]
    ask(comparing, "memory", policy="nothing_saveable", device="H100 SXM")
    other = browser.wait(lambda message: message["type"] == "memory" and message["policy"] == "nothing_saveable")
    assert "XLA for" not in other["html"]
    comparing.close()


def test_a_compiler_that_is_not_there_is_named(browser, monkeypatch):
    monkeypatch.setattr(devices.device, "_is_installed", lambda module: False)
    comparing = Panels(LiveTrace(rm.trace(loss, *ARGUMENTS), device="H100 SXM"), browser)
    ask(comparing, "screen", device="H100 SXM")
    verdict = browser.of("screen")["verdict"]
    assert "compile: <code>pip install &#x27;remat_magic[cuda]&#x27;</code>" in verdict
    assert "Ask the compiler" not in verdict
    comparing.close()


def test_policies_too_close_to_tell_apart_are_named():
    """Those whose ranges overlap, and equal ones not at all."""
    ranges = {"a": (90, 100, 110), "b": (100, 103, 120), "c": (100, 103, 120), "d": (150, 200, 300)}
    rows = [
        ComparisonRow(policy, "function", peak_low=low, peak_bytes=peak, peak_high=high, recomputed_flops=1)
        for policy, (low, peak, high) in ranges.items()
    ]
    (note,) = Comparison("f", tuple(rows)).notes
    assert note.startswith("The ranges of these overlap, so either may need less: a and b. ")
    assert Comparison("f", tuple(rows[2:])).notes == ()
    several = tuple(replace(row, peak_bytes=100 + number) for number, row in enumerate(rows[:2] * 4))
    assert "; and 4 more pairs. " in Comparison("f", several).notes[0]
