"""The first screen as HTML, of answers that are made by hand: its words agree, and what is not known is not said."""

import re
from dataclasses import replace

import pytest

import remat_magic as rm
from remat_magic.records import Edit, FileEdit, Fit, FitChoice, LiveValue, Moment, Progress, Timeline
from remat_magic.records.timeline import Life
from remat_magic.units import nbytes
from remat_magic.views import fit as views
from remat_magic.views.memory import peak_bar_html
from tests.programs import PROGRAMS
from tests.views_records import DOT, EVIL, SIN, small

GB = 10**9
CAPACITY = 16_900_000_000
WRITTEN = FitChoice(
    "as written", "as_written", "function", 50 * GB, 47 * GB, 54 * GB, False, extra_seconds=0.0, extra_time=0.0
)


def choice(what, needed, extra, **changes):
    """A choice that an estimate is known of, within a tenth."""
    estimate = FitChoice(what, what, "block", needed, needed * 9 // 10, needed * 11 // 10, None, extra_seconds=extra,
                         extra_time=extra)  # fmt: skip
    return replace(estimate, **changes).within(CAPACITY)


NAMES, ALL = choice("save 8 values of block, repeat the rest", 15 * GB, 0.06), choice("nothing", 11 * GB, 0.18)
TOO_BIG = choice("dots_saveable at block", 22 * GB, 0.03)
DONE = Progress(9, 9)


def fit_of(*tried, as_written=WRITTEN, progress=DONE, **more):
    return Fit("loss", "TPU v5e", CAPACITY, as_written, (as_written, *tried), progress=progress, **more)


def text_of(page):
    return " ".join(re.sub("<[^>]*>", " ", page).split())


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (WRITTEN, "Does not fit about 50.0 GB needed, 33.1 GB too much estimate, 47.0 to 54.0 GB"),
        (choice("a", 16 * GB, 0.0), "May fit about 16.0 GB needed, of 16.9 GB estimate, 14.4 to 17.6 GB"),
        (choice("a", 5 * GB, 0.0), "Fits about 5.00 GB of 16.9 GB, 11.9 GB left estimate, 4.50 to 5.50 GB"),
        (choice("a", 16 * GB, 0.0, compiled=True), "Fits 16.0 GB of 16.9 GB, 900 MB left compiled"),
        (choice("a", 17 * GB, 0.0, compiled=True), "Does not fit 17.0 GB needed, 100 MB too much compiled"),
        (replace(WRITTEN, needed_bytes=None, unusable="No backward pass."), "Not known No backward pass."),
    ],
)
def test_the_verdict_is_of_the_choice_that_is_shown(shown, said):
    assert text_of(views.verdict_html(shown, fit_of(), CAPACITY)) == said


def test_the_batch_and_that_nothing_has_to_change_are_said_of_the_program_as_written_alone():
    assert "with a batch of 5" in views.verdict_html(WRITTEN, fit_of(NAMES, largest_batch=5), CAPACITY)
    assert "batch" not in views.verdict_html(NAMES, fit_of(NAMES, largest_batch=5), CAPACITY)
    fits = replace(WRITTEN, needed_bytes=5 * GB, needed_low=5 * GB, needed_high=5 * GB, fits=True)
    assert "Nothing has to change" in views.verdict_html(fits, fit_of(as_written=fits), CAPACITY)
    searching = fit_of(as_written=fits, progress=Progress(1, 9))
    assert "Nothing has to change" not in views.verdict_html(fits, searching, CAPACITY)


def test_rows_have_what_is_needed_and_the_time_and_two_buttons_each():
    page = views.changes_html(fit_of(NAMES, ALL, TOO_BIG))
    assert text_of(page).startswith(
        "What to change (percentages are of the step's time) save 8 values of block , repeat the rest "
        "15.0 GB fits +6% Try Diff nothing 11.0 GB fits +18% Try Diff"
    )
    assert TOO_BIG.what not in text_of(page)  # where others fit
    assert page.count('data-policy="') == page.count('data-diff="') == 2
    assert "<button" not in views.changes_html(fit_of(NAMES), live=False)
    # Nothing fits, and it is known.
    nearest = text_of(views.changes_html(fit_of(TOO_BIG)))
    assert "22.0 GB too big +3%" in nearest
    assert "Nothing that was tried fits" in nearest
    assert "Nothing that was tried fits" not in text_of(views.changes_html(fit_of(TOO_BIG, progress=Progress(1, 9))))


def test_more_than_four_choices_are_elsewhere():
    page = views.changes_html(fit_of(*(choice(f"c{n}", 10 * GB - n * GB, n / 100) for n in range(9))), all_of=31)
    assert page.count("data-row=") == 4
    assert "all 31 choices" in page


def test_of_what_fits_those_are_shown_that_one_would_take():
    """The best and what needs clearly less: 64% more time for 0.3 GB less, or a doubt for more memory, is elsewhere."""
    best, hardly = choice("best", 8_400_000_000, 0.30), choice("hardly", 8_100_000_000, 0.64)
    clearly, doubtful = choice("clearly", 5 * GB, 0.70), choice("doubtful", 16_900_000_000, 0.29)
    faster = choice("faster", 16_900_000_000, 0.10)
    fit = fit_of(best, hardly, clearly, doubtful)
    page = views.changes_html(fit, all_of=5)
    assert re.findall('data-row="([^"]*)"', page) == ["best", "clearly"]
    assert "all 5 choices" in page
    assert "and 2 more" in views.changes_html(fit, live=False)
    assert re.findall('data-row="([^"]*)"', views.changes_html(fit_of(best, faster))) == ["best", "faster"]
    by_hand = choice("by hand", 7 * GB, 0.01, at="batch in 6")
    assert re.findall('data-row="([^"]*)"', views.changes_html(fit_of(by_hand, best))) == ["by hand", "best"]
    assert re.findall("^(?:best|hardly|clearly|doubtful)", str(fit).replace("  ", ""), re.M) == ["best", "clearly"]
    assert views.changes_html(fit_of(*(choice(f"c{n}", (22 + n) * GB, -n) for n in range(3)))).count("data-row") == 3


def test_shares_are_of_flops_where_no_time_is_known():
    written, names = (replace(one, extra_time=None, extra_seconds=None, extra_flops=0.2) for one in (WRITTEN, NAMES))
    page = views.changes_html(fit_of(names, as_written=written))
    assert "percentages are of the step's FLOPs" in page
    assert "+20%" in page


def test_what_fits_says_what_could_be_recomputed_less_and_nothing_else():
    fits = replace(WRITTEN, needed_bytes=5 * GB, needed_low=5 * GB, needed_high=5 * GB, fits=True)
    assert views.changes_html(fit_of(ALL, as_written=fits)) == ""
    less = choice("save more", 8 * GB, -0.2)
    assert "save more 8.00 GB fits -20%" in text_of(views.changes_html(fit_of(less, as_written=fits)))


def test_what_donates_has_a_key_of_its_own_and_says_what_it_asks():
    donating = replace(ALL, what="donate params", donate=("params",))
    rows = views.figures([ALL, donating])
    assert len({(row["policy"], row["at"]) for row in rows}) == 2
    page = views.diff_html(donating, Edit("f", "block", "nothing", verified=True), "TPU v5e", can_apply=True)
    assert "The caller may not use params after the call." in page
    assert "Apply" not in page
    assert "Apply" in views.diff_html(ALL, Edit("f", "block", "nothing", verified=True), "TPU v5e", can_apply=True)


def test_a_diff_is_copied_with_the_imports_of_its_cell():
    new = "%%remat\nfrom functools import partial\nf(x)\n"
    edit = Edit("f", "block", "a", (FileEdit("/tmp/1.py", 3, "%%remat\nf(x)\n", new),), verified=True)
    page = views.diff_html(ALL, edit, "TPU v5e", can_apply=False)
    assert '<div class="remat-diff-file"><b>In[3]</b>' in page
    assert f'data-text="{new}"' in page
    assert "by estimate on TPU v5e: 11.0 GB, it fits" in page
    assert "verified by tracing it" in page
    unverified = replace(edit, verified=False, differences=("It saves less.",))
    told = views.diff_html(ALL, unverified, "TPU v5e", can_apply=False)
    assert "It saves less." in told
    assert "verified by tracing it" not in told
    closest = replace(edit, saved_bytes=9, recomputed_flops=7)
    nearest = replace(unverified, closest=closest, planned_bytes=8, planned_flops=5, unnamed=("x has none.",))
    told = text_of(views.diff_html(ALL, nearest, "TPU v5e", can_apply=False))
    assert (
        "No edit of the source does exactly this. The nearest one is shown: it saves 9 B, not 8 B, and repeats 7"
        in told
    )
    assert "1 value that no edit names x has none." in told


def test_what_cannot_be_used_is_listed_with_the_reason_and_no_figure():
    (row,) = views.figures([replace(ALL, unusable="JAX cannot.")])
    assert (row["needed"], row["time"], row["fits"], row["error"]) == ("", "", "", "JAX cannot.")


def timeline(*values):
    lives = tuple(Life(0, 1, value) for value in values)
    held = sum(value.nbytes for value in values)
    return Timeline("as_written", "function", "loss", (Moment("forward", 0, 0, held, 0),), 0, lives)


def test_what_takes_it_is_by_line_the_most_first():
    saved = LiveValue("f32[4]", 3 * GB, "residual", "sin", source=SIN)
    held = timeline(saved, saved, LiveValue("f32[4]", GB, "temporary", "dot_general", source=replace(DOT, line=9)))
    page = views.takes_html(held, small())
    first, second = re.findall("<tr.*?</tr>", page)
    assert "6.00 GB" in first
    assert "jnp.sin(W @ x)" in first
    assert "remat-role-saved" in first
    assert "width:100%" in first
    assert "1.00 GB" in second
    assert "remat-role-temporaries" in second
    assert "width:17%" in second
    assert views.takes_html(timeline(LiveValue("f32[4]", GB, "parameter")), small()) == ""


def test_the_bar_is_as_long_as_what_is_needed_or_as_the_device():
    parts = (("residual", 30 * GB), ("parameter", 10 * GB))
    over = peak_bar_html(
        small(peak_bytes=40 * GB, peak_low=30 * GB, peak_high=50 * GB, peak_by_kind=parts), ("D", 20 * GB)
    )
    assert re.findall(r"(?:width|left):([\d.]+)%", over) == ["20.00", "60.00", "20.00", "40.00"]  # parts, doubt, limit
    under = peak_bar_html(small(peak_bytes=40 * GB, peak_by_kind=parts), ("D", 80 * GB))
    assert re.findall(r"(?:width|left):([\d.]+)%", under) == ["12.50", "37.50", "100.00"]


def test_what_was_compiled_is_drawn_as_xla_holds_it():
    """So that bar and verdict have one number; where XLA did not tell, the bar says that it is estimated."""
    held = [
        LiveValue("f32[4]", 9 * GB, "residual", "fusion", source=SIN),
        LiveValue("f32[4]", 2 * GB, "parameter", "parameter"),
    ]
    shown, report = choice("a", 12 * GB, 0.0, compiled=True), small(peak_bytes=4, peak_by_kind=(("residual", 4),))
    bar, takes = views.live_html(shown, report, timeline(held[0]), held, "D", CAPACITY)
    assert text_of(bar) == (
        "saved for backward 9.00 GB parameters 2.00 GB allocated and not in use then 1.00 GB D 16.9 GB"
    )
    assert takes == ""  # it fits
    too_big = choice("a", 30 * GB, 0.0, compiled=True)
    bar, takes = views.live_html(too_big, report, timeline(held[0]), held, "", CAPACITY)
    assert text_of(takes).startswith("What takes it (by estimate) 9.00 GB")
    assert "limit 16.9 GB" in text_of(bar)
    bar, _ = views.live_html(too_big, report, timeline(held[0]), [], "D", CAPACITY)
    assert text_of(bar).startswith("by estimate, 4 B: saved for backward 4 B")


def test_names_are_text():
    evil = replace(ALL, what=EVIL, policy=EVIL, at=EVIL, unusable="")
    edit = Edit(EVIL, EVIL, EVIL, (FileEdit(EVIL, None, EVIL, f"{EVIL}\n"),), differences=(EVIL,))
    for page in (
        views.changes_html(fit_of(evil)),
        views.verdict_html(replace(evil, needed_bytes=None, unusable=EVIL), None, CAPACITY),
        views.diff_html(evil, edit, EVIL, can_apply=True),
        views.takes_html(timeline(LiveValue(EVIL, GB, "residual", EVIL, source=replace(SIN, text=EVIL))), small()),
        peak_bar_html(small(peak_bytes=4, peak_by_kind=(("residual", 4),)), (EVIL, 5)),
    ):
        assert "<img" not in page


def test_why_a_device_keeps_less_than_autodiff_saves_is_said_where_it_does():
    fun, args = PROGRAMS["three_layers"]
    trace = rm.trace(fun, *args)
    report, timeline = trace.report(), trace.timeline()
    kept = timeline.saved_bytes
    assert 0 < kept <= report.saved_bytes
    assert views.saved_less_html(replace(report, residuals=()), timeline, "TPU v5e") == ""
    more = replace(report, residuals=(*report.residuals, *report.residuals))
    said = text_of(views.saved_less_html(more, timeline, "TPU v5e"))
    assert said.startswith(
        f"Autodiff saves {nbytes(2 * report.saved_bytes)}; TPU v5e holds at most {nbytes(kept)} of it"
    )
