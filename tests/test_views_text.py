"""The report in a terminal."""

import re
from io import StringIO

import pytest
from rich.console import Console

from remat_magic.records import Program, ProgramLine, Report
from remat_magic.views.text import render
from tests.views_records import blocks, infected, plain, small

WIDE = """\
loss(x f32[4]) -> f32[]
differentiated: x
policy dots_saveable

saved          24.0 kB  2 values
offloaded          8 B  1 value
arguments         16 B  1 value needed, alive anyway
repeated      80 FLOPs  2 operations
deferred   1 operation  cost unknown
peak             412 B  estimated
!  'a' is saved, yet its matmul is repeated.
!  Not counted in the FLOPs: cos.

f = jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)

Residuals (4)
"""

TABLES = """\
   Size  Value                           Made by
24.0 kB  f32[6,1000]                     sin named 'a' in jnp.sin(W @ x),
                                         In[3]:4, scan x12 / block
                                         or tanh In[3]:9
                                         backward of sin; computing matmul
                                         again, and 1 more
   20 B  f32[5]                          cos in jnp.sin(W @ x), In[3]:4
                                         backward of sin
    8 B  f32[2] offloaded (pinned_host)  dot_general named 'b' in W @ x,
                                         In[3]:4
                                         nothing reads it
   16 B  f32[4] argument                 x
                                         computing matmul again, line 4

Recomputed (3)
    Cost  Value   Made by
80 FLOPs  f32[5]  dot_general in W @ x, In[3]:4
                  R repeated, 2 runs
 unknown  f32[5]  cos named 'c' in jnp.sin(W @ x), In[3]:4, while
                  D deferred, an unknown number of runs

Checkpoint sites (1)
Site   Calls  As written        Source
layer  x12    nothing_saveable  In[3]:4
"""

PROGRAMS = """\
Forward jaxpr, 1 equation
   { lambda ; a:f32[4]. let
       b:f32[5] = sin a

Backward jaxpr, 2 equations
   { lambda ; b:f32[5]. let
R      c:f32[5] = dot_general[
D      d:f32[5] = cos b
"""


def test_the_text_begins_with_the_headline():
    assert plain(small(), 200).startswith(WIDE)


def test_the_tables_are_those_of_a_page_with_the_last_columns_below():
    assert TABLES in plain(small(), 78)


def test_programs_keep_their_indentation_and_are_marked():
    assert plain(small(), 120).endswith(PROGRAMS)


@pytest.mark.parametrize("width", [60, 61, 80, 100, 120, 200])
@pytest.mark.parametrize(
    "report", [small(), blocks(12), infected(small()), Report("none", "function")], ids=lambda r: r.policy[:8]
)
def test_no_line_is_longer_than_the_terminal(report, width):
    assert max(map(len, plain(report, width).splitlines())) <= width
    file = StringIO()
    Console(file=file, force_jupyter=False, width=width).print(render(report))
    assert max(map(len, file.getvalue().splitlines())) <= width


def test_a_big_program_is_cut_and_says_so():
    big = Program(tuple(ProgramLine(f"line {number}") for number in range(12_000)), 12_000)
    text = plain(small(forward=big), 100)
    assert "line 199\n" in text
    assert "line 200\n" not in text
    assert "… 11,800 more lines; all of them are in report.forward.text" in text


def test_a_missing_backward_half_is_said():
    text = plain(small(backward_error="The loop has no known length.", recomputed=(), backward=Program()), 100)
    assert "!  The loop has no known length." in text
    assert "Recomputed" not in text


def test_residuals_are_marked_as_whole_words():
    line = ProgramLine("{ lambda ; a:f32[4] e:f32[]. let e = mul a e in (a, e) }", residuals=(("a", 0), ("e", 1)))
    console = Console(file=StringIO(), record=True, width=100, force_terminal=True)
    console.print(render(small(forward=Program((line,), 1))))
    shown = next(text for text in console.export_text(styles=True).splitlines() if "= mul" in text)
    marked = re.findall(r"\x1b\[1;4m(\w+)\x1b", shown)
    assert marked == ["a", "e", "e", "a", "e", "a", "e"]  # not the letters of "lambda" and "let"
