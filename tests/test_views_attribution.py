"""What each line of the source saves and has recomputed."""

from remat_magic.records import Equation, Residual
from remat_magic.views.attribution import expressions, line_rows
from tests.views_records import DOT, SIN, small, span


def test_lines_add_up():
    """Nothing is lost and nothing counted twice: the lines' bytes and FLOPs are the report's."""
    report = small()
    rows = line_rows(report)
    assert sum(row.saved for row in rows) == report.saved_bytes + report.offloaded_bytes
    assert sum(row.flops or 0 for row in rows) == report.recomputed_flops
    assert sum(row.operations for row in rows) == len(report.recomputed)


def test_a_line_has_its_place_and_its_expressions():
    (row,) = line_rows(small())  # SIN and DOT start in one place of one line
    assert row.place == "In[3]:4"
    found = {costs.source: (costs.saved, costs.flops) for costs in expressions(small())}
    assert found == {SIN: (24020, None), DOT: (8, 80)}  # the cos has no known cost
    assert DOT.line == SIN.line


def test_lines_stand_in_the_order_of_the_source_and_what_has_none_last():
    saved = [
        Residual("f32", (2,), 8, "intermediate", "sin", source=source)
        for source in (None, span(9, "b"), span(4, "a"), span(7, "c", cell=2), span(1, "d", cell=None))
    ]
    rows = line_rows(small(residuals=tuple(saved), recomputed=()))
    assert [row.place for row in rows] == ["In[2]:7", "In[3]:4", "In[3]:9", "line 1", ""]


def test_arguments_cost_no_line_anything():
    kept = tuple(residual for residual in small().residuals if residual.kind == "argument")
    assert kept
    assert line_rows(small(residuals=kept, recomputed=())) == []


def test_hovers_count_what_is_alike():
    saved = [Residual("f32", (2,), 8, "intermediate", "sin", "a", source=SIN)] * 3
    saved += [Residual("f32", (size,), 4 * size, "offloaded", "dot_general", source=SIN) for size in range(10)]
    again = [Equation("sin", flops=5, source=SIN), Equation("cos", source=SIN, repeated=False)] * 2
    (row,) = line_rows(small(residuals=tuple(saved), recomputed=tuple(again)))
    assert row.attribution.saves.startswith('204 bytes: f32[2] sin "a" x3, f32[0] dot_general offloaded, f32[1] ')
    assert row.attribution.saves.endswith("f32[6] dot_general offloaded, and 3 more")
    assert row.attribution.repeats == "10 FLOPs: sin repeated x2, cos deferred (cost unknown) x2"
