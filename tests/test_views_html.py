"""The report in a page, with and without its style sheet and scripts."""

import html
import re
from html.parser import HTMLParser

import pytest

from remat_magic.records import Program, ProgramLine, Report
from remat_magic.views.headline import totals
from remat_magic.views.html import copy_html, others_row, report_html, style
from remat_magic.views.jaxpr_text import lazy_chunks
from remat_magic.views.memory import peak_bar_html
from remat_magic.widget.panels import ID
from tests.views_records import blocks, fragments, plain, small
from tests.widget_frame import frame_of

_VOID = {"br", "img", "input"}


class _Page(HTMLParser):
    """Checks that tags are closed in order, and collects tags, attributes and the text outside of <style>."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], list[str]()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in {"p", "div", "h4", "td", "th", "summary"}:
            self.texts.append(" ")

    def handle_data(self, text):
        if "style" not in self.open:
            self.texts.append(text)

    @property
    def text(self):
        return " ".join("".join(self.texts).split())


def rows(fragment):
    """The cells' texts of each row in a table's body."""
    body = fragment.split("<tbody>")[1].split("</tbody>")[0]
    found = []
    for row in body.split("</tr>")[:-1]:
        found.append(
            [" ".join(html.unescape(re.sub(r"<[^>]*>", " ", cell)).split()) for cell in row.split("</td>")[:-1]]
        )
    return found


def test_the_residual_table_has_origin_and_readers_of_each():
    assert rows(fragments(small())["residuals"]) == [
        ["24.0 kB", "100%", "f32[6,1000]",
         "sin named a in jnp.sin(W @ x) , line 4 , scan x12 / block or tanh In[3]:9",
         "backward of sin computing matmul again and 1 more backward of neg"],
        ["20 B", "0.1%", "f32[5]", "cos in jnp.sin(W @ x) , line 4", "backward of sin"],
        ["8 B", "100%", "f32[2] offloaded (pinned_host)", "dot_general named b in W @ x , line 4", "nothing reads it"],
        # An argument has no line of its own.
        ["16 B", "100%", "f32[4] argument", "x", "computing matmul again, line 4"],
    ]  # fmt: skip


def test_the_recomputed_table_has_cost_and_kind_of_each():
    assert rows(fragments(small())["recomputed"]) == [
        ["80 FLOPs", "100%", "f32[5]", "dot_general in W @ x , line 4", "R repeated, 2 runs"],
        [
            "unknown",
            "",
            "f32[5]",
            "cos named c in jnp.sin(W @ x) , line 4 , while",
            "D deferred, an unknown number of runs",
        ],
    ]


def test_a_share_is_of_what_is_of_the_kind():
    """Of what is saved or of the arguments; the bar of the biggest is the longest."""
    page = fragments(blocks(12))["residuals"]
    assert [row[1] for row in rows(page)] == ["17%"] * 6 + ["100%"]
    assert 'title="of all that is of its kind">Share' in page
    assert page.count('style="--s:1"') == 7


def test_where_there_are_no_scripts_the_biggest_rows_are_not_folded():
    page = report_html(blocks(12))
    shown, *folds = page.split("<details><summary>")
    assert shown.count('<tr class="remat-row') == 5
    assert folds[0].startswith("12 more values, 384 B</summary>")
    assert folds[0].count('<tr class="remat-row') == 1
    assert folds[1].startswith("12 arguments, 3.07 kB</summary>")
    only = report_html(small(residuals=small().residuals[:1]))
    assert "Nothing is saved but what is alive anyway." in _Page(only).text


def test_the_bar_is_what_is_alive_at_the_peak():
    """Its parts make up the whole of it, and the list says the same in words."""
    report = small(peak_bytes=40_000, peak_by_kind=(("temporary", 6_000), ("residual", 20_000), ("argument", 14_000)))
    page = peak_bar_html(report)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", page)]
    assert widths == [35, 50, 15]
    assert 'aria-label="Alive at the estimated peak of 40.0 kB"' in page
    assert _Page(page).text == "saved for backward 20.0 kB arguments 14.0 kB temporaries 6.00 kB"
    assert "remat-peak-bar" in report_html(report)
    assert peak_bar_html(small(peak_bytes=None)) == ""


@pytest.mark.parametrize(
    ("changes", "part", "sentence"),
    [({"residuals": ()}, "residuals", "Nothing is saved for the backward pass."),
     ({"recomputed": ()}, "recomputed", "The backward pass recomputes nothing."),
     ({"complete": False}, "recomputed", "The backward half is being traced."),
     ({"backward_error": "No end."}, "recomputed", "No end."),
     ({"backward_error": "No end."}, "notes", "No end. 'a' is saved, yet its matmul is repeated. "
                                              "Not counted in the FLOPs: cos.")],
)  # fmt: skip
def test_empty_parts_say_why(changes, part, sentence):
    assert _Page(fragments(small(**changes))[part]).text == sentence


def test_only_whole_variables_are_marked():
    line = ProgramLine("c:f32[2] = mul[ab=a a=1] a ab 'a' a.b ca a", residuals=(("a", 0),))
    (chunk,) = lazy_chunks(small(forward=Program((line,), 1)))["forward"]
    marked = re.sub(r"</?(?:span|em)[^>]*>", "", re.sub(r"<b[^>]*>(.*?)</b>", r"«\1»", chunk))
    assert html.unescape(marked) == "c:f32[2] = mul[ab=«a» a=1] «a» ab 'a' a.b ca «a»\n"


def test_the_program_is_the_text_to_the_byte():
    report = small()
    for program, key in ((report.forward, "forward"), (report.backward, "backward")):
        page = "".join(lazy_chunks(report)[key])
        bare = re.sub(r"<i>.</i>", "", page)
        assert html.unescape(re.sub(r"<[^>]*>", "", bare)) == program.text + "\n"


def test_big_programs_come_in_chunks_of_a_hundred():
    lines = tuple(ProgramLine(f"v{number} = sin a", primitive="sin", residuals=(("a", 0),)) for number in range(12_050))
    chunks = lazy_chunks(small(backward=Program(lines, 12_050)))["backward"]
    assert len(chunks) == 121
    assert {chunk.count("\n") for chunk in chunks[:-1]} == {100}
    for chunk in chunks[::40]:
        _Page(chunk)  # complete in itself


def test_the_static_part_needs_no_script():
    page = copy_html(small(), [*map(others_row, (small(policy="none", recomputed=()), blocks(3)))], most=10**6)
    parsed = _Page(page)
    assert not {"select", "input", "button", "script"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert report_html(small()).startswith('<div class="remat remat-static"><style>')
    assert page.count('<td class="remat-policy"') == 2  # of each its figures
    assert "font-family: var(--jp-code-font-family, monospace)" in page
    for piece in ("loss(x f32[4]) -> f32[]", "differentiated: x", "Policy dots_saveable"):
        assert piece in parsed.text
    assert "dots_saveable 576 B" in parsed.text.replace("\n", " ")  # 18 of 32 bytes


@pytest.mark.parametrize("report", [small(), blocks(12), small(complete=False), Report("none", "function")])
def test_text_and_html_have_the_same_totals(report):
    text, page = plain(report, 200), fragments(report)["totals"].replace("saves", "saved")
    for total in totals(report):
        for piece in (total.label, total.value, total.detail):
            assert piece in text
            assert total.key == "peak" or html.escape(piece) in page


def test_controls_are_labelled_and_keep_their_keys():
    page = frame_of()
    for key in ("policy", "at"):
        assert f'<label for="{ID}{key}">' in page
        assert f'<select id="{ID}{key}"' in page
    for control in re.findall(r"<(?:select|input|button)[^>]*>|<[^>]*tabindex=[^>]*>", page):
        assert 'data-lm-suppress-shortcuts="true"' in control
    for tab in re.findall(r'aria-controls="([^"]*)"', page):
        assert f'id="{tab}"' in page
    assert 'role="status" aria-live="polite"' in page


def test_controls_appear_where_there_is_something_to_control():
    bare = frame_of(sites=(), names=(), can_apply=False)
    assert not {'data-control="at"', "radiogroup", 'data-action="apply"'} & set(
        re.findall(r'data-[a-z]+="[a-z]+"|radiogroup', bare)
    )
    assert "Apply" in frame_of()
    assert "all 2 sites" in frame_of(sites=small().sites * 2)
    assert 'value="sites">layer x12 (In[3]:4)' in frame_of()


def test_the_style_sheet_follows_the_theme():
    colours = re.findall(r"#[0-9a-f]{3,8}\b", style())
    declared = re.findall(r"var\(--jp-[a-z0-9-]+, (#[0-9a-f]{3,8})\)", style())
    assert sorted(colours) == sorted(declared)  # each colour is a fallback for the theme's own


def test_an_output_has_the_rules_of_its_classes_and_no_others():
    page = report_html(small())
    sheet, shown = re.search(r"<style>(.*?)</style>(.*)", page, re.DOTALL).groups()

    def names(text):
        return set(re.findall(r"(?<=\.)remat-[\w-]+", text))

    there = {"remat-static", *re.findall(r"remat-[\w-]+", shown)}
    alone = {name for name in there if f".{name}{{" in style()}
    assert len(alone) > 5
    assert all(f".{name}{{" in sheet for name in alone)
    assert len(sheet) < 0.8 * len(style())
    for rule in re.findall(r"([^{}]+){[^{}]*}", re.sub(r":(is|not|has)\([^()]*\)", "", sheet)):
        assert all(names(selector) <= there for selector in rule.split(","))
    assert sheet.count("{") == sheet.count("}")
    assert "{}" not in sheet
