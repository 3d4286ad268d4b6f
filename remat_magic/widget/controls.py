"""The controls that the frame and the panels of the widget are made of."""

from __future__ import annotations

import html
from collections.abc import Iterable

from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS

__all__ = ["ID", "button", "copies", "search", "select"]

# Replaced by the script, per view: two views of one widget may be on a page, and ids must be unique there.
ID = "__remat__"


def select(key: str, label: str, options: Iterable[tuple[str, str]], chosen: str | None = None) -> str:
    """A dropdown with its label; options are pairs of value and text, ``chosen`` the value that it begins with."""
    items = "".join(
        f'<option value="{html.escape(value)}"{" selected" * (value == chosen)}>{escape(text)}</option>'
        for value, text in options
    )
    described = f' aria-describedby="{ID}meaning"' if key in ("policy", "at") else ""
    return (
        f'<span class="remat-field"><label for="{ID}{key}">{escape(label)}</label> '
        f'<select id="{ID}{key}" data-control="{key}"{described} {KEYS}>{items}</select></span>'
    )


def button(action: str, text: str, **more: str) -> str:
    """A button for one action of the script, with more attributes."""
    extra = "".join(f' {name.replace("_", "-")}="{html.escape(value)}"' for name, value in more.items())
    return f'<button type="button" data-action="{action}"{extra} {KEYS}>{escape(text)}</button>'


def search(key: str, label: str, placeholder: str) -> str:
    """A field to search by, with its label."""
    return (
        f'<span class="remat-field"><label for="{ID}find-{key}">{label}</label> '
        f'<input type="search" id="{ID}find-{key}" data-find="{key}" placeholder="{placeholder}" '
        f'autocomplete="off" spellcheck="false" {KEYS}></span>'
    )


def copies(part: str) -> str:
    """Buttons that copy the table of a part as it is shown, among what *More* unfolds."""
    tsv = button("copy-table", "Copy TSV", data_table=part, data_as="tsv")
    markdown = button("copy-table", "Copy Markdown", data_table=part, data_as="markdown")
    return f'<span class="remat-optional">{tsv} {markdown}</span>'
