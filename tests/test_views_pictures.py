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
from remat_magic.records import ComparisonRow, Life, LiveValue
from remat_magic.views.pareto import pareto_svg
from remat_magic.views.svg import ticks
from remat_magic.views.timeline import COLUMNS, layers, timeline_html
from tests.plot_records import row, rows, timeline
from tests.programs import f32
from tests.views_records import span

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text):
    return ET.fromstring(text)


def points(picture):
    return {node.get("data-policy"): node for node in picture.iter(f"{SVG}g") if node.get("role") == "button"}


def classes(element):
    return {name for inner in element.iter() for name in (inner.get("class") or "").split()}


PICTURES = {
    "pareto": lambda: pareto_svg(rows(), "dots_saveable"),
    "one policy": lambda: pareto_svg((row("none", 5, 0, pareto=True),)),
    "no policy": lambda: pareto_svg(()),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_xml_and_say_what_they_show(name):
    picture = parsed(PICTURES[name]())
    named = {node.get("id"): node.text for node in picture if node.tag in (f"{SVG}title", f"{SVG}desc")}
    assert [bool(named[key]) for key in picture.get("aria-labelledby").split()] == [True, True]
    assert picture.get("viewBox")


def test_nothing_depends_on_colour_alone():
    """The front by its shape, the chosen one by a frame."""
    by_policy = points(parsed(pareto_svg(rows(), "dots_saveable")))
    for policy, point in by_policy.items():
        on_front = policy != "save_only_these_names('h')"
        assert ("remat-best" in classes(point)) == on_front
        assert ("remat-other" in classes(point)) != on_front
        # Every point has a frame, which the style sheet shows on the pressed one alone.
        assert (point.get("aria-pressed") == "true") == (policy == "dots_saveable")
    assert ".remat-point:not([aria-pressed=true]) .remat-ring{display:none}" in pareto_svg(rows())


# ------------------------------------------------------------------------------------------------------ memory and cost


def test_points_are_buttons():
    by_policy = points(parsed(pareto_svg(rows(), "as_written")))
    assert set(by_policy) == {"none", "dots_saveable", "nothing_saveable", "save_only_these_names('h')"}
    for point in by_policy.values():
        assert point.get("tabindex") == "0"
        assert point.get("aria-label") == point.find(f"{SVG}title").text
    said = "none, same as as_written: peak 90.0 MB (estimated), 0 s estimated for recomputation and offloading"
    assert by_policy["none"].get("aria-label") == f"{said}, on the front"
    assert [point.get("aria-pressed") for point in by_policy.values()].count("true") == 1
    assert by_policy["none"].get("aria-pressed") == "true"  # as_written does the same


def _centre(point):
    path = point.find(f"{SVG}path")
    if path is not None:
        x, y = re.match(r"M([\d.]+),([\d.]+)", path.get("d")).groups()
        return float(x), float(y) + 6.5
    circle = point.find(f"{SVG}circle")
    return float(circle.get("cx")), float(circle.get("cy"))


def test_places_are_in_proportion():
    """A MB is as wide everywhere, and 18 ms lie 3.6 times as high as 5 ms."""
    by_policy = {policy: _centre(point) for policy, point in points(parsed(pareto_svg(rows()))).items()}
    step = (by_policy["none"][0] - by_policy["dots_saveable"][0]) / 40  # pixels for a MB
    left = by_policy["none"][0] - 90 * step
    assert by_policy["nothing_saveable"][0] == pytest.approx(left + 20 * step, abs=0.5)
    base = by_policy["none"][1]  # adds nothing
    assert (base - by_policy["nothing_saveable"][1]) / (base - by_policy["dots_saveable"][1]) == pytest.approx(
        18 / 5, rel=0.02
    )


def test_the_front_goes_through_its_points():
    picture = parsed(pareto_svg(rows()))
    (line,) = [node for node in picture.iter(f"{SVG}path") if node.get("class") == "remat-front"]
    for policy in ("none", "dots_saveable", "nothing_saveable"):
        x, y = _centre(points(picture)[policy])
        assert f"{x:.1f}" in line.get("d")
        assert re.search(rf"V{y:.1f}(?![\d.])", line.get("d"))
    assert not [e for e in parsed(pareto_svg((row("a", 1, 1),))).iter(f"{SVG}path") if e.get("class") == "remat-front"]


def _boxes(*elements):
    for element in elements:
        for label in element.iter(f"{SVG}text"):
            if label.text:
                x, y, wide = float(label.get("x")), float(label.get("y")), 6.16 * len(label.text)
                start = {"start": x, "middle": x - wide / 2, "end": x - wide}[label.get("text-anchor", "start")]
                yield start, y - 10, start + wide, y + 3


def _crowd(number):
    return tuple(row(f"policy_{i}", 50 + i % 5, 10 + i % 4, pareto=i == 0) for i in range(number))


def _labels_of(number):
    """Of points all in one place, as many as there is room for have a label, and every one its words."""
    of_points = points(parsed(pareto_svg(_crowd(number))))
    assert len(of_points) == number
    return _boxes(*of_points.values()), min(number, 8)


@pytest.mark.parametrize("number", [2, 10, 40])
def test_labels_do_not_overlap(number):
    found, least = _labels_of(number)
    boxes = list(found)
    assert len(boxes) >= least
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@pytest.mark.parametrize("front", [["nothing_saveable"], ["nothing_saveable", "dots_saveable"]])
def test_labels_keep_off_the_lines(front):
    """Just left of where the device ends, and at the last step of the front, which goes on to the right edge."""
    sizes = {"none": 160, "dots_saveable": 93, "nothing_saveable": 40}
    ranked = [
        replace(row, ranked_by="compiled", needed_bytes=needed, available_bytes=105, pareto=row.policy in front)
        for row in rows()
        if (needed := sizes.get(row.policy))
    ]
    picture = parsed(pareto_svg(ranked))
    (capacity,) = [node for node in picture.iter(f"{SVG}line") if node.get("class") == "remat-capacity"]
    (fits,) = [node for node in picture.iter(f"{SVG}text") if node.text == "fits"]
    end = float(capacity.get("x1"))
    last = _centre(points(picture)[front[-1]])
    boxes = list(_boxes(*points(picture).values()))
    assert len(boxes) == 3
    for left, top, right, bottom in boxes:
        assert right <= end or left >= end
        assert not (right > end - 30 and left < end and top < float(fits.get("y")) < bottom)
        assert not (top < last[1] < bottom and right > last[0])


def test_what_is_left_out_is_counted():
    assert "1 policy without a known peak and cost left out." in parsed(pareto_svg(rows())).find(f"{SVG}desc").text
    two = (*rows(), ComparisonRow("other", "function", error="no"))
    assert "2 policies without" in parsed(pareto_svg(two)).find(f"{SVG}desc").text
    assert "left out" not in parsed(pareto_svg(rows()[:3])).find(f"{SVG}desc").text
    assert "No policy with a known peak" in "".join(parsed(pareto_svg(rows()[4:])).itertext())


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
        assert sum(layer.held[number] for layer in found) == moment.bytes
    for layer in found:
        first, end = layer.life
        assert layer.held[first] > 0 < layer.held[end - 1]
        assert not any((*layer.held[:first], *layer.held[end:]))
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
    assert (rest.kind, rest.count, max(rest.held)) == ("", 18, sum(range(90, 108)))


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
    for changes in told["held"]:
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
    assert [told["peak"], 9000] in told["held"][1]
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
