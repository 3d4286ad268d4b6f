"""The tools of the widget: what its panels are searched, grouped, compared and copied by."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS

__all__ = ["ID", "button", "compare_tools", "name_tools", "plan_tools", "program_tools", "select", "table_tools"]

# Replaced by the script, per view: two views of one widget may be on a page, and ids must be unique there.
ID = "__remat__"

# What a checkpoint name's value can become.
_STATES = ("save", "offload", "recompute")
# More names than this are searched rather than read.
_MANY_NAMES = 6


def select(key: str, label: str, options: Iterable[tuple[str, str]]) -> str:
    """A dropdown with its label; options are pairs of value and text."""
    items = "".join(f'<option value="{html.escape(value)}">{escape(text)}</option>' for value, text in options)
    described = f' aria-describedby="{ID}meaning"' if key in ("policy", "at") else ""
    return (
        f'<span class="remat-field"><label for="{ID}{key}">{escape(label)}</label> '
        f'<select id="{ID}{key}" data-control="{key}"{described} {KEYS}>{items}</select></span>'
    )


def button(action: str, text: str, **more: str) -> str:
    """A button for one action of the script, with more attributes."""
    extra = "".join(f' {name.replace("_", "-")}="{html.escape(value)}"' for name, value in more.items())
    return f'<button type="button" data-action="{action}"{extra} {KEYS}>{escape(text)}</button>'


def name_tools(names: Sequence[str]) -> str:
    """Three states for each checkpoint name, and where there are many, a search."""
    if not names:
        return ""
    groups = list[str]()
    for number, name in enumerate(names):
        key = html.escape(name)
        radios = "".join(
            f'<label><input type="radio" name="{ID}name{number}" value="{state}" data-name="{key}" {KEYS}>'
            f"<span>{state}</span></label>"
            for state in _STATES
        )
        groups.append(
            f'<div class="remat-name" role="radiogroup" aria-labelledby="{ID}name{number}">'
            f'<code id="{ID}name{number}">{escape(name)}</code>{radios}</div>'
        )
    tools = ""
    if len(names) > _MANY_NAMES:
        buttons = "".join(button("all-names", state, data_state=state) for state in _STATES)
        tools = (
            f'<div class="remat-tools">{_search("names", "Names", "attn_* or part of a name")}'
            f"<span>set all that are shown to</span>{buttons}</div>"
        )
    return (
        f'<div role="group" aria-label="Checkpoint names">{tools}<div class="remat-names">{"".join(groups)}</div></div>'
    )


def _search(key: str, label: str, placeholder: str) -> str:
    return (
        f'<span class="remat-field"><label for="{ID}find-{key}">{label}</label> '
        f'<input type="search" id="{ID}find-{key}" data-find="{key}" placeholder="{placeholder}" '
        f'autocomplete="off" spellcheck="false" {KEYS}></span>'
    )


def table_tools(key: str) -> str:
    """What a table of values or operations is searched, grouped and copied by."""
    groups = [("", "nothing"), ("line", "line"), ("name", "name"), ("operation", "operation"), ("path", "loop or call")]
    options = "".join(f'<option value="{value}">{text}</option>' for value, text in groups)
    return (
        f'<div class="remat-tools">{_search(key, "Find", "any text of a row")}'
        f'<span class="remat-field"><label for="{ID}group-{key}">Group by</label> '
        f'<select id="{ID}group-{key}" data-group="{key}" {KEYS}>{options}</select></span>'
        f'<span class="remat-summary" data-summary="{key}"></span>{_copies(key)}</div>'
    )


def _copies(key: str) -> str:
    return button("copy-table", "Copy TSV", data_table=key, data_as="tsv") + button(
        "copy-table", "Copy Markdown", data_table=key, data_as="markdown"
    )


def program_tools() -> str:
    """What the two programs are moved through, compared and copied by."""
    panes = [("halves", "forward and backward"), ("forward", "forward, A and B"), ("backward", "backward, A and B")]
    return (
        '<div class="remat-tools"><label class="remat-check">'
        f'<input type="checkbox" data-control="together" checked {KEYS}> Scroll together</label>'
        f"{select('panes', 'Show', panes)}"
        '<span class="remat-summary" data-summary="jaxprs"></span>'
        f"{button('copy-program', 'Copy left', data_pane='0')}{button('copy-program', 'Copy right', data_pane='1')}"
        "</div>"
    )


def compare_tools(devices: Sequence[str], has_inputs: bool) -> str:
    """What stays of the Compare panel while its content changes: what times are estimated for, and measuring."""
    known = [("", "this machine"), *((name, name) for name in devices)]
    runs = [("", "compile only"), *([("given", "compile, run on your inputs")] if has_inputs else []),
            ("random", "compile, run on random inputs")]  # fmt: skip
    return (
        f'<div class="remat-tools">{select("device", "Estimate for", known)}{select("inputs", "Measure", runs)}'
        f"{button('measure', 'Measure')}{button('gradients', 'Check gradients')}"
        f'<button type="button" data-action="cancel" hidden {KEYS}>Cancel</button>'
        f'<progress data-part="progress" hidden aria-label="Measured" max="1" value="0"></progress>'
        f"{_copies('comparison')}</div>"
    )


def plan_tools() -> str:
    """What a budget is set by, a slider over the frontier or a text, which the script moves to Compare."""
    kinds = [("saved", "saved bytes"), ("peak", "estimated peak")]
    layers = [("", "automatic"), ("together", "together"), ("separately", "one by one")]
    return (
        '<div class="remat-tools"><span class="remat-slot" data-slot="budget"><span class="remat-field remat-wide">'
        f'<label for="{ID}budget">Budget</label> '
        f'<input type="range" id="{ID}budget" data-control="budget" min="0" max="0" step="0.05" value="0" disabled '
        f'aria-describedby="{ID}stop" {KEYS}></span>'
        f'<output class="remat-summary" id="{ID}stop" data-part="stop"></output>'
        f'<span class="remat-field"><label for="{ID}typed">or</label> '
        f'<input type="search" id="{ID}typed" data-control="typed" placeholder="2 GiB, 30%" autocomplete="off" {KEYS}>'
        f"</span>{select('of', 'of', kinds)}{select('layers', 'Equal layers', layers)}{button('plan', 'Plan')}</span>"
        f"{button('what-if', 'What if')}{button('loops', 'Loops')}{button('edit', 'Edit my source')}</div>"
    )
