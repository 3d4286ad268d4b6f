"""The pictures: well-formed, told in words too, true to their numbers, and safe whatever the records hold."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.records import Fit, FitChoice, Life, LiveValue
from remat_magic.views.choices import tried_html
from remat_magic.views.format import ticks
from remat_magic.views.memory import COLUMNS, layers, timeline_html
from tests.plot_records import timeline
from tests.programs import f32
from tests.views_records import span

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text):
    return ET.fromstring(text)


# ---------------------------------------------------------------------------------------------------- memory over time


def picture_of(html):
    """The parts that are in a page of the picture of memory: its SVG, its table's rows, and what its script reads."""
    rows = re.findall(r'<tr class="remat-row" data-layer="(\d+)".*?</tr>', html, re.DOTALL)
    told = re.search(r'data-time="([^"]*)"', html)
    return (
        parsed(re.search(r"<svg.*?</svg>", html, re.DOTALL)[0]),
        rows,
        json.loads(unescape(told[1])) if told else None,
    )


def net(w, x):
    body = jax.checkpoint(lambda c, w: (jnp.sin(c @ w), None))
    return jnp.sum(jax.lax.scan(body, jnp.cos(x @ w[0]), w)[0] ** 2)


@pytest.fixture(scope="module")
def traced():
    return rm.trace(net, f32(4, 32, 32), f32(16, 32)).timeline("dots_saveable", "function", device="TPU v5e")


def test_the_layers_add_up_to_what_is_held_at_each_moment(traced):
    """Those with a line are its own; at most twelve lines have a colour, and no two of them the same."""
    found = layers(traced)
    for number, moment in enumerate(traced.moments):
        assert sum(layer.live[number] for layer in found) == moment.bytes
    for layer in found:
        first, end = layer.life
        assert layer.live[first] > 0 < layer.live[end - 1]
        assert not any((*layer.live[:first], *layer.live[end:]))
    many = replace(
        timeline(),
        lives=tuple(
            Life(number, 50, LiveValue("f32[9]", 90 + number, "residual", "sin", source=span(number + 1, "jnp.sin(x)")))
            for number in range(30)
        ),
    )
    lines = [layer for layer in layers(many) if layer.kind]
    assert len({layer.colour for layer in lines}) == len(lines) == 12
    rest = layers(many)[-1]
    assert (rest.kind, rest.count, max(rest.live)) == ("", 18, sum(range(90, 108)))


def test_time_has_its_true_part(traced):
    """A scan is one of the moments, and most of the time."""
    whole = sum(traced.seconds)
    scans = sum(
        seconds
        for moment, seconds in zip(traced.moments, traced.seconds, strict=True)
        if moment.primitive in ("scan", "while")
    )
    assert scans > 0.5 * whole
    (*_, told) = picture_of(timeline_html(traced, live=True))
    of_scans = sum(", scan" in said for said in told["said"])
    assert of_scans / COLUMNS == pytest.approx(scans / whole, abs=0.02)
    page = timeline_html(replace(traced, seconds=()))
    assert "operations, one after another" in page
    assert "estimated time" not in page


def test_the_areas_are_as_high_as_the_bytes(traced):
    picture, _, told = picture_of(timeline_html(traced, live=True))
    most = ticks(traced.peak_bytes)[-1]
    tops = [100.0] * COLUMNS
    for path in picture.iter(f"{SVG}path"):
        for outline in path.get("d").split("z")[:-1]:
            x, y = map(float, re.match(r"M(\d+),([\d.]+)", outline).groups())
            for letter, number in re.findall(r"([HV])([\d.]+)", outline):
                if letter == "V":
                    y = float(number)
                elif float(number) > x:  # the upper edge is drawn first, from the left
                    for column in range(int(x), int(float(number))):
                        tops[column] = min(tops[column], y)
                    x = float(number)
                else:
                    break
    held = [0] * COLUMNS
    for changes in told["live"]:
        for (column, size), end in zip(changes, [*(start for start, _ in changes[1:]), COLUMNS], strict=True):
            for place in range(column, end):
                held[place] += size
    assert max(held) == traced.peak_bytes == held[told["peak"]]
    assert tops == pytest.approx([100 - 100 * size / most for size in held], abs=0.02)


@pytest.mark.parametrize("peak", [0, 1234, 4999])
def test_thinning_keeps_the_maximum(peak):
    """Five thousand moments are drawn as a few hundred, and the one that matters is among them."""
    long = timeline(2000, 3000, peak)
    moments = tuple(replace(moment, residuals=0) for moment in long.moments)
    lives = (
        Life(0, 5000, LiveValue("f32[9]", 300, "argument")),
        Life(peak, peak + 1, LiveValue("f32[9]", 9000, "temporary", source=span(4, "jnp.sin(x)"))),
    )
    page = timeline_html(replace(long, moments=moments, lives=lives), live=True)
    _, _, told = picture_of(page)
    assert [told["peak"], 9000] in told["live"][1]
    assert len(page) < 60_000


def test_where_a_device_ends_is_a_line_unless_it_is_far_away():
    near, far = (timeline_html(timeline(), limit=("TPU v5e", size)) for size in (6000, 60_000))
    # 7,100 bytes are held at most, and the axis ends at the next round number.
    assert f'style="bottom:{100 * 6000 / 8000:.2f}%"><span>TPU v5e: 6.00 kB</span>' in near
    assert "remat-limit-line" not in far


def test_the_peak_is_told_with_its_line():
    page = timeline_html(replace(timeline(), peak_low=6000, peak_high=9000))
    assert "At the peak, backward, sin In[3]:4: about 7.10 kB (6.00 to 9.00) by estimate" in page


def test_what_is_held_at_the_peak_is_listed():
    page = timeline_html(timeline())
    body = page[page.index("<tbody>") :]
    cells = [" ".join(re.sub(r"<[^>]+>", " ", row).split()) for row in body.split("</tr>")[:-1]]
    assert cells == [
        "4.80 kB 68% W @ x , line 4 temporaries",
        "900 B 13% jnp.sin(W @ x) , line 4 saved for backward",
        "300 B 4.2% arguments arguments",
        "64 B 0.9% lax.scan(body, x) , line 9 temporaries",
        "44 B 0.6% 2 other values of several kinds",
    ]


# ------------------------------------------------------------------------------------------------------ what was tried


def choice(what, needed, extra, **changes):
    return FitChoice(what, what, "function", needed, needed - 5, needed + 5, None, extra_time=extra, **changes)


TRIED = (choice("as_written", 100, 0.0), choice("nothing_saveable", 20, 0.3), choice("dots_saveable", 60, 0.1))


def test_points_are_where_their_figures_are_and_so_is_the_line():
    page = tried_html((*TRIED, choice("broken", 50, 0.2, unusable="No.")), Fit("f", "TPU v5e", 40, TRIED[0], TRIED))
    dots = re.findall(r'data-policy="(\w+)"[^>]*style="left:([\d.]+)%;bottom:([\d.]+)%"', page)
    across = {policy: float(left) for policy, left, _ in dots}
    upward = {policy: float(bottom) for policy, _, bottom in dots}
    assert set(across) == {"as_written", "nothing_saveable", "dots_saveable"}  # what cannot be used is a row alone
    assert "No." in page
    width = across["as_written"] - across["nothing_saveable"]
    assert across["dots_saveable"] - across["nothing_saveable"] == pytest.approx(width / 2, abs=0.02)
    height = upward["nothing_saveable"] - upward["as_written"]
    assert upward["dots_saveable"] - upward["as_written"] == pytest.approx(height / 3, abs=0.02)
    line = float(re.search(r'remat-budget" style="--remat-at:([\d.]+)%', page)[1])
    assert line - across["nothing_saveable"] == pytest.approx(width / 4, abs=0.02)
    slider = re.search(r'max="(\d+)" value="(\d+)"', page)
    assert 100 * int(slider[2]) / int(slider[1]) == pytest.approx(line, abs=0.1)  # its thumb is below the line


def test_where_all_need_the_same_there_is_no_picture_and_no_slider():
    same = tuple(replace(one, needed_bytes=100) for one in TRIED)
    page = tried_html(same, Fit("f", "", 40, same[0], same))
    assert "remat-plot" not in page
    assert "data-control" not in page
    assert page.count('<tr class="remat-row"') == 3
    assert "remat-fits" not in tried_html(TRIED)  # nothing is to fit


# ---------------------------------------------------------------------------------------------------------------- axes


@pytest.mark.parametrize("most", [1, 7, 9.99, 10, 123, 5.1e9, 1e-7, 99999999])
def test_ticks_are_round_and_reach_the_end(most):
    marks = ticks(most)
    assert marks[0] == 0
    assert marks[-1] >= most * (1 - 1e-9)
    assert 2 <= len(marks) <= 7
    step = marks[1]
    assert f"{step:.0e}"[0] in "125" or f"{step:.1e}"[:3] == "2.5"
    assert marks[-1] - most < step
