"""XLA's memory over time in the picture of the estimate, and what is held at its peak: made by hand, read back."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import pytest

from remat_magic.views.memory import timeline_html
from tests.plot_records import compiled, timeline, xla_memory

SVG = "{http://www.w3.org/2000/svg}"


def curve(**changes):
    """The points of XLA's curve in the picture, which is 400 wide and 100 high."""
    page = timeline_html(timeline(10, 40, 12), compiled=compiled(**changes))
    picture = ET.fromstring(re.search(r"<svg.*?</svg>", page, re.DOTALL)[0])
    (path,) = (path for path in picture.iter(f"{SVG}path") if path.get("class") == "remat-xla")
    return [tuple(map(float, point.split(","))) for point in re.findall(r"[\d.]+,[\d.]+", path.get("d"))]


def test_the_highest_of_the_curve_is_its_peak():
    """On the scale of the estimate, whose axis ends at 8 kB."""
    assert 100 - min(y for _, y in curve()) == pytest.approx(100 * xla_memory().peak_bytes / 8000, abs=0.01)


def test_the_passes_begin_together():
    """In the step before the backward pass 1,380 bytes are held, in its first one 1,400."""
    heights = sorted((100 - y) * 80 for x, y in curve() if x == 80)  # ten of fifty moments
    assert heights == pytest.approx([1380, 1400], abs=1)
    assert {curve()[0][0], curve()[-1][0]} == {0, 400}


def test_long_programs_are_thinned_and_keep_their_peak():
    held = tuple(1000 + (number == 4321) * 3000 for number in range(10_000))
    points = curve(timeline=replace(xla_memory(), held=held, peak=4321, steps=("step",) * 10_000, backward=None))
    assert len(points) < 1500
    assert 100 - min(y for _, y in points) == pytest.approx(100 * 4000 / 8000, abs=0.01)


def test_the_rows_add_up_to_the_peak():
    html = timeline_html(timeline(), compiled=compiled())
    table = html[html.rindex("<table") : html.rindex("</table>")]
    sizes = [int(number.replace(",", "")) for number in re.findall(r'title="([\d,]+) bytes"', table)]
    assert sum(sizes) == xla_memory().peak_bytes == 4100
    words = unescape(table)
    assert "Held at the peak of XLA's program for H100 SXM 4.10 kB; another 900 B is allocated" in words
    assert "the program needs 5.00 kB" in words
    assert "In other memories, besides: 64 B." in table
    assert "x2" in table  # two that are alike, with the line of the library that they were made in
    kinds = re.findall(r'<td class="remat-kind"[^>]*>([^<]*)</td>', table)
    assert {*kinds} == {"temporaries", "arguments", "saved for backward"}  # as the bar has them


def test_what_is_not_known_is_said():
    html = timeline_html(timeline(), compiled=compiled(timeline=replace(xla_memory(), unknown=3), effort="quick"))
    assert "The sizes of 3 buffers are not known." in html
    assert "compiled quickly" in html
