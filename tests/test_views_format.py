"""Numbers and places, and the rows that all views share."""

import pytest

from remat_magic import units
from remat_magic.records import Equation, SourceSpan
from remat_magic.views import format as fmt
from remat_magic.views.headline import totals
from remat_magic.views.values import recomputed_rows, residual_rows
from tests.views_records import blocks, small


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (48, "48 B"), (999, "999 B"), (1000, "1.00 kB"), (1234, "1.23 kB"), (12_582_912, "12.6 MB"),
     (999_499, "999 kB"), (999_500, "1.00 MB"), (123_456_789, "123 MB"), (-16, "-16 B"), (-12_582_912, "-12.6 MB"),
     (9_999, "10.0 kB"), (99_960, "100 kB"), (5 * 10**18, "5.00 EB")],
)  # fmt: skip
def test_bytes_have_three_digits(number, text):
    assert fmt.nbytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 s"), (1.2, "1.20 s"), (0.0183, "18.3 ms"), (0.9999, "1.00 s"), (123.4, "123 s"), (12.34, "12.3 s"),
     (1.5e-6, "1.50 µs"), (9.996e-4, "1.00 ms"), (1e-9, "1.00 ns"), (2e-12, "0.002 ns"), (None, "unknown"),
     (4321.0, "4,321 s")],
)  # fmt: skip
def test_seconds_have_three_digits(number, text):
    assert fmt.seconds(number) == text


def test_flops_have_three_digits():
    assert [fmt.flops(number) for number in (None, 0, 51, 1_170_000_000_000)] == [
        "unknown", "0 FLOPs", "51 FLOPs", "1.17 TFLOPs"]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "cell", "text"),
    [("/x/ipykernel_1/2.py", 3, "In[3]:7"), ("/x/ipykernel_1/2.py", None, "line 7"), ("<stdin>", None, "line 7"),
     ("/home/me/model.py", None, "model.py:7"), ("C:\\me\\model.py", None, "model.py:7")],
)  # fmt: skip
def test_a_place_is_a_cell_or_a_short_path_with_its_line(file, cell, text):
    assert fmt.location(SourceSpan(file, "f", 7, 0, 7, 1, cell)) == text


def test_what_the_policy_costs_comes_first_and_the_biggest_of_it():
    kinds = [(row.kind, row.nbytes) for row in residual_rows(small())]
    assert kinds == [("intermediate", 24000), ("intermediate", 20), ("offloaded (pinned_host)", 8), ("argument", 16)]


def test_every_residual_is_in_one_row():
    for report in (small(), blocks(3), blocks(12), blocks(12, names=False)):
        rows = residual_rows(report)
        assert sorted(map(id, (one for row in rows for one in row.residuals))) == sorted(map(id, report.residuals))
        assert sum(row.nbytes for row in rows) == sum(residual.nbytes for residual in report.residuals)


def test_names_that_differ_in_numbers_are_folded_only_where_there_are_many():
    few = residual_rows(blocks(2))
    assert {row.name for row in few if row.name} == {f"layer{layer}_{part}" for layer in (0, 1) for part in "abcdef"}
    many = residual_rows(blocks(12))
    assert [row.count for row in many] == [12] * 7
    assert many[0].name == "layer0_a … layer11_a"
    assert many[-1].label == "params[0]['w'] … params[11]['w']"


def test_recomputed_operations_fold_by_place():
    first, second = recomputed_rows(small())
    assert (first.kind, first.primitive, first.count, first.runs, first.flops) == ("repeated", "dot_general", 2, 2, 80)
    assert (second.kind, second.name, second.runs, second.flops) == ("deferred", "c", None, None)  # a while loop


def values(report):
    return {total.key: (total.value, total.detail) for total in totals(report)}


def test_what_is_not_known_is_said():
    preview = values(small(complete=False, recomputed=()))
    assert preview["repeated"] == ("…", "being traced")
    failed = values(small(backward_error="no", recomputed=()))
    assert failed["repeated"] == ("unknown", "no backward pass")
    assert values(small(recomputed=()))["repeated"][0] == "nothing"
    assert "peak" not in values(small(peak_bytes=None))
    assert values(small(forward_flops=None))["repeated"][1] == "2 operations"


def test_unknown_runs_of_one_make_the_row_unknown():
    known, unknown = Equation("sin", times=2, flops=1), Equation("sin", times=None, flops=None)
    (row,) = recomputed_rows(small(recomputed=(known, unknown)))
    assert (row.count, row.runs, row.flops) == (2, None, None)


def test_what_differs_reads_differently():
    assert units.apart(48, 1_000_000) == ("48 B", "1.00 MB")
    assert units.apart(1_000_001, 1_000_002) == ("1,000,001 bytes", "1,000,002 bytes")
