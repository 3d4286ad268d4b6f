"""XLA's memory over time in the picture of the estimate, and what is held at its peak: made by hand, read back."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import pytest

from remat_magic.views.timeline import timeline_html, timeline_svg
from tests.plot_records import compiled, timeline, xla_memory

SVG = "{http://www.w3.org/2000/svg}"


def of_class(picture, name):
    return [element for element in picture.iter() if element.get("class") == name]


def curve(picture):
    (path,) = (element for element in of_class(picture, "remat-xla") if element.tag == f"{SVG}path")
    return [tuple(map(float, point.split(","))) for point in re.findall(r"[\d.]+,[\d.]+", path.get("d"))]


def test_the_highest_of_the_curve_is_its_peak():
    picture = ET.fromstring(timeline_svg(timeline(), compiled=compiled()))
    peak = next(element for element in of_class(picture, "remat-xla-peak") if element.get("r") == "4")
    assert float(peak.get("cy")) == min(y for _, y in curve(picture))
    # On the scale of the estimate: the heights above zero are as the bytes.
    marks = {float(mark.get("y")) - 4: mark.text for mark in of_class(picture, "remat-tick")}
    (zero,) = (y for y, words in marks.items() if words == "0 B")
    top = min(marks)
    most = float(marks[top].split()[0]) * 1000
    assert (zero - float(peak.get("cy"))) / (zero - top) == pytest.approx(xla_memory().peak_bytes / most, abs=0.01)


def test_the_passes_begin_together():
    picture = ET.fromstring(timeline_svg(timeline(10, 40, 12), compiled=compiled()))
    (line,) = of_class(picture, "remat-halves")
    boundary = float(line.get("x1"))
    # In the step before the backward pass 1,380 bytes are held, in its first one 1,400.
    peak = min(y for _, y in curve(picture))
    heights = sorted((244 - y) / (244 - peak) * xla_memory().peak_bytes for x, y in curve(picture) if x == boundary)
    assert heights == pytest.approx([1380, 1400], abs=12)
    assert {curve(picture)[0][0], curve(picture)[-1][0]} == {64.0, 666.0}


def test_long_programs_are_thinned_and_keep_their_peak():
    held = tuple(1000 + (number == 4321) * 3000 for number in range(10_000))
    memory = replace(xla_memory(), held=held, peak=4321, steps=("step",) * 10_000, backward=None)
    picture = ET.fromstring(timeline_svg(timeline(), compiled=compiled(timeline=memory)))
    peak = next(element for element in of_class(picture, "remat-xla-peak") if element.get("r") == "4")
    assert len(curve(picture)) < 1500
    assert float(peak.get("cy")) == min(y for _, y in curve(picture))


def test_the_rows_add_up_to_the_peak():
    html = timeline_html(timeline(), compiled=compiled(), top=2)
    table = html[html.index("<table") : html.index("</table>")]
    sizes = [int(number.replace(",", "")) for number in re.findall(r'title="([\d,]+) bytes"', table)]
    assert sum(sizes) == xla_memory().peak_bytes == 4100
    words = unescape(table)
    assert "Held at the peak of XLA's program for H100 SXM 4.10 kB; with 900 B that is allocated" in words
    assert "the program needs 5.00 kB" in words
    assert "In other memories, besides: 64 B." in table
    assert "x2" in table  # two that are alike, with the line of the library that they were made in
    assert "By role: temporaries 3.00 kB, arguments 600 B, saved 500 B." in table


def test_what_is_not_known_is_said():
    html = timeline_html(timeline(), compiled=compiled(timeline=replace(xla_memory(), unknown=3), effort="quick"))
    assert "The sizes of 3 buffers are not known." in html
    assert "compiled quickly" in html
