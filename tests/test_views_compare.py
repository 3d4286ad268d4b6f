"""The comparison's table: its numbers, what is estimated and what measured, and safe text."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from remat_magic.records import Comparison, ComparisonRow, Times
from remat_magic.views.compare import comparison_table, render
from remat_magic.views.format import seconds
from tests.plot_records import Sheet, row, rows


class Cells(HTMLParser):
    """The rows of a table as (tag, attributes, text)."""

    def __init__(self, page):
        super().__init__()
        self.rows = []
        self.open = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append([tag, dict(attrs), ""])
            self.open.append(self.rows[-1][-1])

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data


def texts(cells):
    return [text for _, _, text in cells]


def shown(found, width=220):
    console = Console(width=width, force_jupyter=False)
    with console.capture() as captured:
        console.print(render(Comparison("loss", tuple(found), Sheet("A100", "its data sheet"))))
    return captured.get()


def test_the_table_has_rounded_numbers_and_hovers_with_exact_ones():
    table = Cells(comparison_table(rows(), "loss", "A100"))
    groups, heads, *body = table.rows
    assert texts(groups) == ["policy", "estimated, for A100", "counted"]
    assert texts(heads) == ["peak", "step", "recomputing", "saved", "recomputed"]
    dots = body[1]
    numbers = ["50.0 MB", "35.0 ms", "5.00 ms", "20.0 MB", "5.00 GFLOPs +0.5%"]
    assert texts(dots) == ["◆dots_saveable", *numbers]
    exact = [attributes.get("title") for _, attributes, _ in dots[1:]]
    assert exact[:2] == ["50,000,000 bytes", "0.035 seconds: forward 10.0 ms, backward 25.0 ms"]
    assert exact[3] == "20,000,000 bytes; besides 5,000,000 bytes of arguments, which are alive anyway"
    assert exact[4] == "5,000,000,002 FLOPs: 5,000,000,000 repeated, 2 deferred; +0.5% of the forward pass's"
    assert body[0][0][2] == "◆none= as_written"


def test_estimated_and_measured_are_told_apart():
    found = (row("none", 9, 1, measured_seconds=0.5, measured_temp_bytes=6_000_000, measured_bytes=7_000_000,
                 measured_compile_seconds=3.0, measured_flops=2e9, measured_device="H100"), *rows()[1:])  # fmt: skip
    table = Cells(comparison_table(found, device="A100"))
    assert texts(table.rows[0])[1:] == ["estimated, for A100", "measured, on H100", "counted"]
    assert texts(table.rows[1])[3:7] == ["temporaries", "run", "compile", "FLOPs"]
    assert texts(table.rows[2])[4:8] == ["6.00 MB", "500 ms", "3.00 s", "2.00 GFLOPs"]
    assert table.rows[2][4][1]["title"] == "6,000,000 bytes; 7,000,000 bytes with arguments and results"
    assert texts(table.rows[3])[4:8] == [""] * 4  # not measured
    assert "measured" not in comparison_table(rows())
    assert "temporaries (mea.)" in shown(found, 300)


def test_what_is_incomplete_is_a_lower_bound():
    unsure = row("none", 9, 1, times=Times("A100", 0.01, 0.02, 0.001, 0.0, complete=False), complete=False)
    page = comparison_table((unsure,))
    assert "≥ 30.0 ms" in page
    assert "≥ 1.00 GFLOPs" in page
    unknown = row("none", 9, 1, times=Times("A100", 0.01, 0.02, 0.001, None, complete=False))
    assert "unknown" in comparison_table((unknown,))


def test_errors_are_rows():
    page = comparison_table(rows())
    assert "my_policy raised KeyError when asked about dot_general." in page
    assert "my_policy raised KeyError" in shown(rows())
    failed = replace(rows()[1], error="Out of memory.")
    assert "Out of memory." in comparison_table((failed,))
    assert "50.0 MB" in comparison_table((failed,))


@pytest.mark.parametrize("width", [60, 100, 220])
def test_no_line_is_wider_than_the_terminal(width):
    lines = shown(rows(), width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    assert re.search(r"dots_saveable +◆", shown(rows(), 220))
    assert ComparisonRow("p", "function") == ComparisonRow("p", "function")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 s"), (1.2, "1.20 s"), (0.0183, "18.3 ms"), (0.9999, "1.00 s"), (123.4, "123 s"), (12.34, "12.3 s"),
     (1.5e-6, "1.50 µs"), (9.996e-4, "1.00 ms"), (1e-9, "1.00 ns"), (2e-12, "0.002 ns"), (None, "unknown"),
     (4321.0, "4,321 s")],
)  # fmt: skip
def test_seconds_have_three_digits(number, text):
    assert seconds(number) == text
