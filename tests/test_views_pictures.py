"""The pictures: well-formed, told in words too, true to their numbers, and safe whatever the records hold."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from remat_magic.records import ComparisonRow
from remat_magic.views.pareto import pareto_svg
from remat_magic.views.svg import ticks
from remat_magic.views.timeline import timeline_html, timeline_svg
from tests.plot_records import compiled, row, rows, timeline

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text):
    return ET.fromstring(text)


def points(picture):
    return {node.get("data-policy"): node for node in picture.iter(f"{SVG}g") if node.get("role") == "button"}


def classes(element):
    return {name for inner in element.iter() for name in (inner.get("class") or "").split()}


PICTURES = {
    "pareto": lambda: pareto_svg(rows(), "dots_saveable"),
    "timeline": lambda: timeline_svg(timeline()),
    "one policy": lambda: pareto_svg((row("none", 5, 0, pareto=True),)),
    "no policy": lambda: pareto_svg(()),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_xml_and_say_what_they_show(name):
    picture = parsed(PICTURES[name]())
    named = {node.get("id"): node.text for node in picture if node.tag in (f"{SVG}title", f"{SVG}desc")}
    assert [bool(named[key]) for key in picture.get("aria-labelledby").split()] == [True, True]
    assert picture.get("viewBox")


def test_pictures_of_one_page_do_not_share_names():
    first, second = (parsed(timeline_svg(timeline(peak=peak))) for peak in (22, 30))
    names = [{node.get("id") for node in picture.iter() if node.get("id")} for picture in (first, second)]
    assert len(names[0]) == 2 + 2 + 3 + 1  # its words, patterns, areas, and what cuts them off
    assert not names[0] & names[1]
    for picture, own in zip((first, second), names, strict=True):
        used = {node.get("fill")[5:-1] for node in picture.iter() if (node.get("fill") or "").startswith("url(#")}
        used |= {node.get("href")[1:] for node in picture.iter(f"{SVG}use")}
        assert used < own


def test_nothing_depends_on_colour_alone():
    """The front by its shape, the areas by their patterns, the chosen one by a frame."""
    by_policy = points(parsed(pareto_svg(rows(), "dots_saveable")))
    for policy, point in by_policy.items():
        on_front = policy != "save_only_these_names('h')"
        assert ("remat-best" in classes(point)) == on_front
        assert ("remat-other" in classes(point)) != on_front
        # Every point has a frame, which the style sheet shows on the pressed one alone.
        assert (point.get("aria-pressed") == "true") == (policy == "dots_saveable")
    assert ".remat-point:not([aria-pressed=true]) .remat-ring{display:none}" in pareto_svg(rows())
    patterns = {node.get("fill") for node in parsed(timeline_svg(timeline())).iter() if node.get("fill")}
    assert len(patterns) == 2


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


@pytest.mark.parametrize("number", [2, 10, 40, "memory"])
def test_labels_do_not_overlap(number):
    if number == "memory":  # what the line is stands below the names of the passes, at the right
        found, least = _boxes(parsed(timeline_svg(timeline(), compiled=compiled()))), 10
    else:
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


def _areas(picture):
    outlines = {f"#{node.get('id')}": node.get("d") for node in picture.iter(f"{SVG}path") if node.get("id")}
    return {node.get("class"): outlines[node.get("href")] for node in picture.iter(f"{SVG}use") if node.get("class")}


def test_areas_stand_on_each_other():
    areas = _areas(parsed(timeline_svg(timeline())))
    assert set(areas) == {"remat-arguments", "remat-residuals", "remat-temporaries"}
    edge = {name: re.findall(r"[ML]([\d.]+),([\d.]+)H", path) for name, path in areas.items()}
    top = [edge["remat-arguments"][:50], edge["remat-residuals"][:50]]
    bottom = [list(reversed(edge["remat-residuals"][50:])), list(reversed(edge["remat-temporaries"][50:]))]
    for above, below in zip(top, bottom, strict=True):
        assert [y for _, y in above] == [y for _, y in below]


@pytest.mark.parametrize("peak", [0, 1234, 4999])
def test_thinning_keeps_the_maximum(peak):
    """Five thousand moments are drawn as a few hundred, and the one that matters is among them."""
    long = timeline(2000, 3000, peak)
    moments = [replace(moment, residuals=0) for moment in long.moments]
    long = replace(long, moments=tuple(moments))
    picture = parsed(timeline_svg(long))
    path = _areas(picture)["remat-temporaries"]
    assert path.count("H") <= 2 * 360
    heights = [float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)H", path)]
    mark = next(node for node in picture.iter(f"{SVG}path") if node.get("class") == "remat-peak")
    tip = float(re.match(r"M[\d.]+,([\d.]+)", mark.get("d"))[1])
    assert min(heights) == tip
    assert len(timeline_svg(long)) < 35_000


def test_the_peak_is_told_with_its_line():
    text = "".join(parsed(timeline_svg(timeline())).itertext())
    assert "Peak 7.10 kB, backward, sin In[3]:4" in text  # 300 + 100 * 18 + 5000
    assert "20 moments forward, 30 moments backward." in text


def test_what_is_held_at_the_peak_is_listed():
    page = timeline_html(timeline(), top=3)
    body = page[page.index("<tbody>") :]
    cells = [re.sub(r"<[^>]+>", " ", row).split() for row in body.split("</tr>")[:-1]]
    assert cells[0][:4] == ["4.80", "kB", "f32[6,200]", "temporary"]
    assert cells[1][:5] == ["900", "B", "f32[25]", "x9", "residual"]
    assert cells[2][:4] == ["300", "B", "f32[75]", "argument"]
    assert cells[3] == ["108", "B", "in", "3", "more", "values"]
    full = timeline_html(timeline())
    for word in ("inside scan", "cotangent", "constant", "argument params[&#x27;w&#x27;]", "In[3]:9"):
        assert word in full


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
