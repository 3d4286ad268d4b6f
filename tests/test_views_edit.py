"""An edit of the source in a page: what goes, what comes, and what stays, folded."""

import html
import random
import re

import pytest

from remat_magic.records import Edit, FileEdit
from remat_magic.views.plans import diffs_html, edit_html


def edit(old, new, **options):
    return Edit("f", "function", "none", (FileEdit("model.py", None, old, new),), verified=True, **options)


def shown(page):
    """The text in the order of the page, a pair each: of which element, and the line."""
    inside = re.search(r'<div class="remat-diff"[^>]*>(.*)</div>', page, re.DOTALL)[1]
    found, folded = [], False
    for piece in re.split(r"(</?details>)", inside):
        folded = (folded or piece == "<details>") and piece != "</details>"
        text = re.sub(r"<summary.*?</summary>|</?pre>", "", piece)
        for tag, line in re.findall(r"(?:<(ins|del|small)>)?([^<>\n]+)\n", text):
            found.append(("fold" if folded else tag, html.unescape(line)))
    return found


def numbered(count):
    return [f"line {number}\n" for number in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_the_page_is_the_diff_with_what_stays_between(seed):
    """Without the folds it is the diff; with them the whole of both texts."""
    drawn = random.Random(seed)
    old = numbered(drawn.randrange(1, 50))
    new = list(old)
    for _ in range(drawn.randrange(1, 4)):
        at = drawn.randrange(len(new) + 1)
        new[at : at + drawn.randrange(3)] = [f"<new {drawn.random()}>\n" for _ in range(drawn.randrange(1, 3))]
    change = edit("".join(old), "".join(new))
    lines = shown(edit_html(change))
    assert "".join(f"{line}\n" for tag, line in lines if tag != "fold") == change.diff()
    body = [(tag, line) for tag, line in lines if tag != "small"]
    assert "".join(f"{line[1:]}\n" for tag, line in body if tag != "ins") == "".join(old)
    assert "".join(f"{line[1:]}\n" for tag, line in body if tag != "del") == "".join(new)
    assert {line[0] for tag, line in body if tag == "ins"} <= {"+"}
    assert {line[0] for tag, line in body if tag == "del"} <= {"-"}


def test_an_edited_cell_can_be_copied_whole():
    """With what a script copies; of a file there is the diff."""
    new = 'a = "<b>"\n'
    cell = Edit("f", "function", "none", (FileEdit("<cell>", 3, "a = 1\n", new),), verified=True)
    changed = edit("a = 1\n", new)
    for one, copied in ((cell, new), (changed, changed.diff())):
        (text,) = re.findall(r'data-action="copy" data-text="([^"]*)"', diffs_html(one))
        assert html.unescape(text) == copied
    assert "<button" not in edit_html(cell)


def test_three_lines_around_a_change_stay_unfolded():
    old = numbered(20)
    page = edit_html(edit("".join(old), "".join([*old[:10], "new\n", *old[10:]])))
    assert [line for tag, line in shown(page) if not tag] == [f" line {number}" for number in range(7, 13)]
    assert "<ins>+new\n</ins>" in page
    assert re.findall(r">(\d+ unchanged lines)</summary>", page) == ["7 unchanged lines"] * 2


def test_of_a_long_text_the_folds_keep_only_what_is_near():
    old = numbered(1000)
    page = edit_html(edit("".join(old), "".join([*old, "new\n"])))
    assert "997 unchanged lines" in page
    assert "(947 lines are not kept here)" in page
    assert "line 500\n" not in page


def test_what_is_no_diff_is_said():
    unkept = edit("a\n", "b\n", budget_bytes=1, differences=("why.",))
    page = edit_html(Edit("f", "function", "none", unkept.files, budget_bytes=1, differences=("why.",)))
    assert "<ins>" not in page
    assert "# There is no edit of the source that was verified to keep to 1 saved bytes: why." in page
