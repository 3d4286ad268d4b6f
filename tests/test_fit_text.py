"""The answer as text: whether a step fits, what takes the memory, what to change; or what a report saves."""

import dataclasses
import pickle
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.records import Fit, FitChoice, Note, Progress, Report
from remat_magic.views import display
from remat_magic.views.answer import taken
from remat_magic.views.tables import printed
from remat_magic.views.text import IN_CELL, MOST_LINES, Answer
from remat_magic.views.values import residual_rows
from tests.programs import PROGRAMS, f32
from tests.views_records import blocks, infected, plain, small

LAYERS = 12


def block(x, w):
    return x + jax.nn.gelu(x @ w) @ w.T


def loss_fn(ws, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0] ** 2)


def unrolled(ws, x):
    for layer in range(LAYERS):
        x = block(x, ws[layer])
    return jnp.sum(x**2)


def step(ws, momentum, x):
    gradient = jax.grad(loss_fn)(ws, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return jax.tree.map(lambda w, m: w - 0.1 * m, ws, momentum), momentum


WEIGHTS = f32(LAYERS, 64, 256)
STEP = (WEIGHTS, WEIGHTS, f32(512, 64))


def choice(what, needed, extra, fits, **more):
    figures = {"needed_low": needed, "needed_high": needed, "extra_seconds": extra, "extra_time": extra}
    return FitChoice(what, what, "block", needed, fits=fits, **{**figures, **more})


CODE = "@jax.checkpoint\ndef block(x, w): ..."
CHOICES = (
    choice("nothing_saveable", 50_000, 0.18, True, code=CODE),
    choice("a plan", 70_000, 0.04, None),
    choice("everything_saveable", 95_000, -0.01, False),
)


@pytest.fixture(scope="module")
def fits():
    """Answers as the search gives them, in each state."""
    trace = rm.trace(step, *STEP)
    report, timeline = trace.report(device="TPU v5e"), trace.timeline(device="TPU v5e")
    written = FitChoice("as written", "as_written", "function", report.peak_bytes, report.peak_low, report.peak_high,
                        None, extra_seconds=0.0, extra_time=0.0)  # fmt: skip
    too_small, large = written.needed_low // 2, 2 * written.needed_high
    no = Fit("loss_fn", "TPU v5e", too_small, written.within(too_small), CHOICES, report=report, timeline=timeline)
    yes = dataclasses.replace(no, capacity_bytes=large, as_written=written.within(large), largest_batch=1024)
    sure = dataclasses.replace(written, needed_bytes=too_small + 1, compiled=True)
    unknown = dataclasses.replace(written, needed_bytes=None, needed_low=None, needed_high=None, unusable="No JAX.")
    by_hand = dataclasses.replace(CHOICES[0], unusable="No edit writes it: by hand it is `f`.")
    return {
        "no": no,
        "yes": yes,
        "may": dataclasses.replace(no, capacity_bytes=report.peak_bytes, as_written=written.within(report.peak_bytes)),
        "compiled": dataclasses.replace(no, as_written=sure.within(too_small), largest_batch=7),
        "bytes": dataclasses.replace(no, device="", tried=CHOICES[2:], not_tried=("Not tried, since slow: f.",)),
        "nothing": dataclasses.replace(no, tried=(no.as_written,)),
        "by hand": dataclasses.replace(no, tried=(by_hand, CHOICES[2])),
        "by hand alone": dataclasses.replace(no, tried=(no.as_written, by_hand)),
        "early": dataclasses.replace(no, tried=(no.as_written,), progress=Progress(1, 30)),
        "stopped": dataclasses.replace(no, progress=Progress(3, 30, cancelled=True)),
        "unknown": dataclasses.replace(no, as_written=unknown.within(too_small)),
        "alone": Fit("loss_fn", "TPU v5e", too_small, written.within(too_small)),
        "a lot": dataclasses.replace(
            no,
            tried=tuple(
                dataclasses.replace(CHOICES[0], needed_bytes=10 ** (9 - n), what=f"{n} {'w' * 200}", code="f(x)\n" * 50)
                for n in range(9)
            ),
            report=dataclasses.replace(report, notes=tuple(Note("replicated", "word " * n) for n in range(20, 60))),
            largest_batch=3,
            progress=Progress(9, 30),
        ),
    }  # fmt: skip


STATES = [
    "no",
    "yes",
    "may",
    "compiled",
    "bytes",
    "nothing",
    "by hand",
    "by hand alone",
    "early",
    "stopped",
    "unknown",
    "alone",
    "a lot",
]


def text(record, width=100):
    return printed(Answer(record, hints=IN_CELL), width)


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("state", STATES)
def test_an_answer_has_40_lines_at_most(fits, state, width):
    lines = text(fits[state], width).splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= width
    assert "--text=full" in lines[-1]


@pytest.mark.parametrize(
    ("state", "word", "also"),
    [
        ("no", "DOES NOT FIT", ["Try", "nothing_saveable", "+18%", "may fit", CODE.splitlines()[1]]),
        ("yes", "FITS", ["Nothing has to change.", "it fits with a batch of up to 1,024, by estimate."]),
        ("may", "MAY FIT", ["Try"]),
        (
            "compiled",
            "DOES NOT FIT",
            [
                "1 B too much (compiled)",
                "it fits with a batch of 7, estimated from XLA's figure.",
                "At the estimated peak of ",
            ],
        ),
        ("bytes", "DOES NOT FIT", ["Nothing that was tried fits", "too big", "Not tried, since slow: f."]),
        ("nothing", "DOES NOT FIT", ["Nothing that was tried helps."]),
        ("by hand", "DOES NOT FIT", ["Nothing that can be used fits; these come", "nothing_saveable fits. No edit w"]),
        ("by hand alone", "DOES NOT FIT", ["Nothing that can be used helps.", "nothing_saveable fits. No edit writes"]),
        ("early", "DOES NOT FIT", ["Nothing that helps is known yet.", "Still looking: 1 of 30 choices."]),
        ("stopped", "DOES NOT FIT", ["Try", "The search was stopped after 3 of 30 choices."]),
        ("unknown", "NOT KNOWN", ["No JAX."]),
        ("a lot", "DOES NOT FIT", ["and 4 more choices", "and 37 more notes", "more lines"]),
    ],
)
def test_it_says_whether_it_fits_and_what_to_do(fits, state, word, also):
    shown = text(fits[state])
    assert shown.splitlines()[1].startswith(f"{word}  ")
    assert all(words in shown for words in also)
    assert ("too big" in shown) == (state in ("bytes", "by hand"))  # no help where something fits
    if state != "alone":
        assert shown.startswith("step: gradient of loss_fn")


def test_what_is_taken_is_what_the_timeline_holds(fits):
    """The lines add up to all that is held and has a line, as do the parts to the peak."""
    fit = fits["no"]
    held = Counter()
    for value in fit.timeline.alive:
        if value.source:
            held[value.source.line] += value.nbytes
    rows = taken(fit.timeline, fit.report)
    assert {row.source.line: row.nbytes for row in rows} == held
    assert [row.nbytes for row in rows] == sorted(held.values(), reverse=True)
    first = rows[0]
    assert first.where == f"test_fit_text.py:{first.source.line}, scan x12"
    assert f"{rm.units.nbytes(first.nbytes)}  {first.source.expression}" in text(fit)
    parts = re.search(r"At the estimated peak: (.*?)\n\n", text(fit), re.DOTALL)[1]
    for kind, word in (("parameter", "parameters"), ("state", "optimizer state"), ("residual", "saved for backward")):
        assert f"{word} {rm.units.nbytes(dict(fit.report.peak_by_kind)[kind])}" in " ".join(parts.split())


def test_unrolled_lines_tell_how_many_values_they_hold():
    trace = rm.trace(unrolled, WEIGHTS, f32(512, 64))
    timeline = trace.timeline()
    row = taken(timeline, trace.report())[0]
    count = sum(bool(value.source) and value.source.line == row.source.line for value in timeline.alive)
    assert count >= LAYERS
    assert row.where == f"test_fit_text.py:{row.source.line}, {count} values"


def test_where_it_fits_only_what_takes_less_time_is_offered(fits):
    faster = choice("dots_saveable", 60_000, -0.2, True)
    shown = text(dataclasses.replace(fits["yes"], tried=(faster, *CHOICES)))
    assert "Takes less time, and fits too" in shown
    assert "-20%" in shown
    assert "nothing_saveable" not in shown


@pytest.mark.slow
def test_small_functions_are_shown_whole_and_large_ones_in_40_lines():
    """For every way in which JAX nests programs: by the number of lines that the whole would have."""
    told = set()
    for fun, arguments in PROGRAMS.values():
        report = rm.trace(fun, *arguments).report()
        lines = text(report).splitlines()
        told.add(is_whole := any(line.startswith("Forward jaxpr") for line in lines))
        if is_whole:
            assert len(lines) <= 80
            assert report.forward.lines[-1].text in "\n".join(lines)
            assert report.backward.lines[-1].text in "\n".join(lines)
        else:
            assert len(lines) <= MOST_LINES
            assert len(plain(report).splitlines()) > 78
        assert "--device" in "\n".join(lines[-2:])
    assert told == {True, False}


def test_three_sines_are_whole_with_parameters_folded():
    report = rm.trace(*(lambda fun, args: (fun, *args))(*PROGRAMS["three_layers"])).report()
    shown = text(report)
    assert re.search(r"\w:f32\[5\] = dot_general\[…\] \w \w\n", shown)
    assert "preferred_element_type" not in shown
    assert plain(report).count("preferred_element_type") == 9  # products


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("report", [blocks(12), blocks(400), small(notes=("n " * 90,) * 9)], ids=["12", "400", "notes"])
def test_a_report_says_what_is_saved_the_largest_first(report, width):
    whole = dataclasses.replace(report, forward=dataclasses.replace(report.forward, equations=900))
    lines = text(whole, width).splitlines()
    assert len(lines) <= MOST_LINES
    start = lines.index("Saved for the backward pass")
    largest = next(row for row in residual_rows(report) if row.saved)
    assert lines[start + 1].split()[:2] == rm.units.nbytes(largest.nbytes).split()
    assert "Forward jaxpr" not in "".join(lines)


def test_nothing_large_is_laid_out():
    """To leave a jaxpr out takes no text of it."""
    trace = rm.trace(unrolled, WEIGHTS, f32(512, 64))
    report = trace.report()
    assert len(text(report).splitlines()) > 10
    assert not report.forward.laid_out
    assert not report.backward.laid_out


def test_records_of_a_fit_show_themselves(fits):
    fit = fits["no"]
    assert (
        repr(fit)
        == f"<Fit of loss_fn on TPU v5e, {rm.units.nbytes(fit.capacity_bytes)}: does not fit, "
        + (repr(fit).partition("does not fit, ")[2])
    )
    assert repr(CHOICES[0]) == "<FitChoice nothing_saveable: 50.0 kB needed, +18% time, fits>"
    assert "trace.edit(fit.best)" in display.text(fit)
    for record in (fit, CHOICES[0]):
        assert "50.0 kB" in record._repr_html_()
        plain_data = pickle.loads(pickle.dumps(record))
        hostile = infected(plain_data, "<b>\x1b[2J\u202e")
        assert "\x1b" not in display.text(hostile) + repr(hostile)
        assert "<b>\x1b" not in hostile._repr_html_()
        assert "&lt;b&gt;" in hostile._repr_html_()


def test_a_report_of_nothing_is_text_too():
    assert text(Report("none", "function")).splitlines()[-1].startswith("Does it fit?")


def test_a_users_own_test_fails_with_the_answer():
    trace = rm.trace(step, *STEP)
    rm.assert_fits(trace, "1 GB")
    with pytest.raises(AssertionError) as caught:
        rm.assert_fits(trace, "2 MB")
    failed = str(caught.value)
    assert failed.splitlines()[3].startswith("DOES NOT FIT  about ")
    assert "@jax.checkpoint on block" in failed
    assert len(failed.splitlines()) <= MOST_LINES + 2
    with pytest.raises(rm.RematError, match="accelerator"):
        rm.assert_fits(trace)


def test_what_fits_is_not_searched(monkeypatch):
    """A test that passes takes no longer than the estimate."""
    looked = []
    monkeypatch.setattr(rm.planning.places.Search, "run", lambda *_, **__: looked.append(1) or iter([Progress(0, 9)]))
    rm.assert_fits(rm.trace(step, *STEP), "1 GB")
    assert not looked


def test_a_plan_is_shown_as_the_change_that_it_is(fits):
    diff = "--- a.py\n+++ a.py\n@@ -1 +1 @@\n-x = f(y)\n+x = name(f(y))\n z\n"
    shown = printed(Answer(fits["no"], diff=diff), 100)
    assert "nothing_saveable: the change to your source\n  -x = f(y)\n  +x = name(f(y))\n" in shown
    assert "+++" not in shown


def test_a_comment_that_has_no_room_stands_above_its_line(fits):
    line = "@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)"
    best = replace(fits["no"].best, code=f"{line}  # on block")
    shown = printed(Answer(replace(fits["no"], tried=(best,))), 120)
    assert f"  {line}  # on block\n" in shown
    narrow = printed(Answer(replace(fits["no"], tried=(best,))), 102)
    assert f"  # on block\n  {line}\n" in narrow
