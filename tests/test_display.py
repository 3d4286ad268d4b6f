"""Records as the values of cells: HTML in a notebook, tables in a terminal, a line inside of other things."""

import dataclasses
import io
import re

import jax.numpy as jnp
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.lib.pretty import pretty
from rich.console import Console

import remat_magic as rm
from remat_magic.records import Displayed, Listed
from remat_magic.views import display
from remat_magic.views.plans import alike_rows, flip_key, plan_rows, what_if_html
from tests.programs import f32

RECORDS = ["report", "preview", "plan", "edit", "timeline", "what_if", "advice"]


def layers(ws, x):
    for w in ws:
        x = x + jnp.sin(jnp.tanh(x @ w))
    return jnp.sum(x)


@pytest.fixture(scope="module")
def records():
    trace = rm.trace(layers, f32(6, 16, 16), f32(8, 16))
    plan = trace.plan("40%")
    return {
        "report": trace.report("dots_saveable"),
        "preview": rm.trace(layers, f32(6, 16, 16), f32(8, 16)).preview("nothing_saveable"),  # whose report nobody made
        "plan": plan,
        "edit": trace.edit(plan),
        "timeline": trace.timeline(),
        "what_if": trace.what_if("dots_saveable"),
        "advice": trace.advice("nothing_saveable"),
    }


@pytest.mark.parametrize("name", RECORDS)
def test_a_notebook_gets_html_and_a_terminal_tables(records, name):
    record = records[name]
    assert isinstance(record, Displayed)
    data, _ = DisplayFormatter().format(record)
    assert data["text/html"].startswith('<div class="remat remat-static">')
    assert data["text/plain"] == display.text(record).rstrip("\n")
    assert "<button" not in data["text/html"]  # nobody would hear it
    if name != "edit":  # whose diff is to be applied as it is
        assert max(map(len, data["text/plain"].splitlines())) <= 100
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(record)
    assert console.export_text().strip()


@pytest.mark.parametrize("name", ["report", "preview", "plan", "edit", "timeline"])
def test_one_line_inside_of_other_things(records, name):
    record = records[name]
    assert "\n" not in repr(record)
    assert len(repr(record)) < 150
    assert "layers" in repr(record)
    assert pretty([record]) == f"[{record!r}]"
    assert pretty({"a": record}) == f"{{'a': {record!r}}}"


def test_figures_are_the_records_own(records):
    report, plan, timeline = records["report"], records["plan"], records["timeline"]
    assert f"{rm.units.nbytes(report.saved_bytes)} saved, {rm.units.flops(report.recomputed_flops)} recomputed" in repr(
        report
    )
    assert "forward half" in repr(records["preview"])  # of which it is not known what is recomputed
    assert f"{rm.units.nbytes(plan.saved_bytes)} saved" in repr(plan)
    assert f"{len(plan.names)} values" in repr(plan)
    assert rm.units.nbytes(timeline.peak_bytes) in repr(timeline)
    assert records["edit"].diff() in display.text(records["edit"])
    for found in records["advice"]:
        assert " ".join(found.sentence.split()) in " ".join(repr(records["advice"]).split())


@pytest.mark.parametrize("width", [80, 100])
def test_no_figure_is_cut_off_where_there_is_little_room(width):
    compared = rm.trace(layers, f32(6, 16, 16), f32(8, 16)).compare(device="TPU v5e")
    shown = display.text(compared, width)
    for row in compared:
        assert not row.recomputed_flops or rm.units.flops(row.recomputed_flops) in shown


def test_lists_are_tuples(records):
    rows = records["what_if"]
    assert isinstance(rows, tuple)
    assert rows == tuple(rows)
    assert hash(rows) == hash(tuple(rows))
    assert isinstance(rows[:2], Listed)
    assert rows[:2] == tuple(rows)[:2]
    assert rows[0] is next(iter(rows))
    assert Listed() == ()
    assert "nothing to show" in repr(Listed())
    assert "nothing to show" in Listed()._repr_html_()


def test_nothing_shown_obeys_a_terminal(records):
    hostile = "f\x1b[2J\u202e\nx"
    value = dataclasses.replace(records["plan"].names[0], primitive=hostile, type=hostile)
    for record in (
        dataclasses.replace(records["report"], function=hostile, policy=hostile, at=hostile, signature=hostile),
        dataclasses.replace(records["plan"], function=hostile, status=hostile, names=(value,)),
        dataclasses.replace(records["edit"], function=hostile, unnamed=(hostile,)),
        dataclasses.replace(records["timeline"], function=hostile),
        Listed([dataclasses.replace(records["what_if"][0], value=value)]),
        Listed([dataclasses.replace(found, sentence=hostile) for found in records["advice"]]),
    ):
        for shown in (repr(record), display.text(record)):
            assert "\x1b" not in shown
            assert "\u202e" not in shown
        assert "\n" not in repr(record) or isinstance(record, Listed)


def test_what_if_tells_of_equal_layers_once(records):
    rows = records["what_if"]
    alike = alike_rows(rows)
    assert sum(count for _, count in alike) == len(rows)
    assert len(alike) < len(rows) / 2  # six layers, of which the first and the last may differ
    page = what_if_html(rows)
    # The button of a row is that of the first of its values.
    keys = [flip_key(row) for row in rows]
    assert len(set(keys)) == len(keys)
    assert re.findall(r'data-flip="([^"]*)"', page) == [keys[number] for number, _ in alike]
    number, count = max(alike, key=lambda each: each[1])
    assert f"{count} alike" in page
    assert f"{count} alike" in display.text(rows)
    # Equal trades of one expression are one, whichever of its values they are of (jax 0.10: a slice and its shape).
    told = [(row.change, row.value.source, row.value.path, row.saved_bytes, row.recomputed_flops) for row in rows]
    assert told.count(told[number]) == count


def test_equal_layers_have_one_row(records):
    """Where some of six layers save a value there is one row, which says how many, and which."""
    plan = records["plan"]
    rows = plan_rows(plan.names)
    assert sum(row.nbytes for row in rows) == sum(value.nbytes for value in plan.names)
    assert len(rows) < len(plan.names)
    assert {value.alike for value in plan.names} <= {5, 6}  # of each expression's six all can be saved, or all but one
    for row in rows:
        mine = [value for value in plan.names if value.origin == row.value.origin]
        every = mine[0].alike
        assert len({value.number for value in mine}) == len(mine)
        assert row.times == (f"{len(mine)} of {every}" if len(mine) < every else f"x{every}")
        assert bool(row.numbers) == (len(mine) < every)
    first = dataclasses.replace(plan.names[0], alike=9)
    some = [dataclasses.replace(first, key=str(number), number=number) for number in (0, 1, 2, 4, 7, 8)]
    (row,) = plan_rows(some)
    assert row.times == "6 of 9"
    assert row.numbers.startswith("number 1-3, 5, 8-9 ")
    assert "6 of 9" in display.text(dataclasses.replace(plan, names=tuple(some)))
    assert "1-3, 5, 8-9" in dataclasses.replace(plan, names=tuple(some))._repr_html_()
