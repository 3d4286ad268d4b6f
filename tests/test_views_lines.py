"""What each line of the source saves and has recomputed."""

from views_records import DOT, EVIL, SIN, evil, small, span

from remat_magic.model import Equation, Residual
from remat_magic.views.lines import line_rows, lines_html


def test_lines_add_up():
    """Nothing is lost and nothing counted twice: the lines' bytes and FLOPs are the report's."""
    report = small()
    rows = line_rows(report)
    assert sum(row.saved for row in rows) == report.saved_bytes + report.offloaded_bytes
    assert sum(row.flops or 0 for row in rows) == report.recomputed_flops
    assert sum(row.operations for row in rows) == len(report.recomputed)


def test_a_line_has_its_place_and_the_outermost_expressions():
    (row,) = line_rows(small())  # SIN and DOT start in one place of one line
    assert row.place == "In[3]:4"
    start = SIN.column
    assert row.ranges == ((start, start + len("jnp.sin(W @ x)")),)
    assert "<u>jnp.sin(W @ x)</u>" in lines_html(small())


def test_lines_stand_in_the_order_of_the_source_and_what_has_none_last():
    saved = [
        Residual("f32", (2,), 8, "intermediate", "sin", source=source)
        for source in (None, span(9, "b"), span(4, "a"), span(7, "c", cell=2), span(1, "d", cell=None))
    ]
    rows = line_rows(small(residuals=tuple(saved), recomputed=()))
    assert [row.place for row in rows] == ["In[2]:7", "In[3]:4", "In[3]:9", "line 1", ""]
    assert "no line of yours" in lines_html(small(residuals=tuple(saved), recomputed=()))


def test_bars_share_a_scale():
    saved = (Residual("f32", (2,), 8, "intermediate", "sin", source=span(4, "a")),
             Residual("f32", (8,), 32, "intermediate", "sin", source=span(5, "b")))  # fmt: skip
    again = (Equation("sin", flops=5, source=span(4, "a")), Equation("sin", source=span(5, "b")))
    html = lines_html(small(residuals=saved, recomputed=again))
    assert html.count('remat-fill-saved" style="width:25.0%"') == 1
    assert html.count('remat-fill-saved" style="width:100.0%"') == 1
    assert html.count("remat-fill-again") == 1  # of unknown cost there is no bar
    assert "unknown" in html


def test_arguments_cost_no_line_anything():
    kept = tuple(residual for residual in small().residuals if residual.kind == "argument")
    assert line_rows(small(residuals=kept, recomputed=())) == []
    assert "No line saves" in lines_html(small(residuals=kept, recomputed=()))
    assert DOT.line == SIN.line


def test_nothing_can_inject_html():
    html = lines_html(evil())
    assert EVIL not in html
    assert "&lt;img" in html
