"""The widget's frame: what stays in place while the policy changes."""

from __future__ import annotations

import html
from collections.abc import Sequence

from remat_magic.api import Trace
from remat_magic.records import Site
from remat_magic.views.format import escape
from remat_magic.views.html import signature_html, title_html
from remat_magic.views.tables import KEYS
from remat_magic.widget.controls import ID, button, search, select
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.panel import Panel

__all__ = ["frame"]

# What a checkpoint name's value can become.
_STATES = ("save", "offload", "recompute")
# More names than this are searched rather than read.
_MANY_NAMES = 6


def frame(live: LiveTrace, panels: Sequence[Panel], *, title: str, can_apply: bool) -> str:
    """The controls, the tabs and the empty parts, each marked by ``data-part`` for the script to fill.

    Args:
        live: the inspected function.
        panels: the tabs.
        title: how the inspection came about.
        can_apply: whether the choice can be bound to the function's name.
    """
    trace = live.trace
    policies = [(choice.key, choice.label or choice.key) for choice in trace.choices()]
    at = select("at", "at", _places(trace.sites, trace.function_name)) if trace.sites else ""
    apply = button("apply", "Apply") if can_apply else ""
    return (
        f"{title_html(title)}{signature_html(trace.signature or trace.function_name, trace.wrt)}{_gradients(trace)}"
        f'<div class="remat-controls">{select("policy", "Policy", policies)}{at}'
        f"{select('against', 'vs', [('', 'nothing'), *policies])}"
        f"<span>{button('pin', 'Pin', title='Compare every choice with the one that is shown now')} "
        f"{button('undo', 'Undo', disabled='')} {button('redo', 'Redo', disabled='')}</span>"
        f'<span class="remat-meaning" id="{ID}meaning"></span></div>'
        f'{_names(trace.names)}<div data-part="totals"></div>'
        f'<div class="remat-code"><code data-part="code"></code>'
        f"{button('copy', 'Copy')}{apply}</div>"
        '<div data-part="notes"></div>'
        '<div class="remat-bar"><div class="remat-tabs" role="tablist" aria-label="Details">'
        f"{''.join(map(_tab, panels))}</div>"
        f'<button type="button" class="remat-chip" data-action="unpick" hidden {KEYS}></button>'
        '<span class="remat-status" role="status" aria-live="polite" data-part="status"></span>'
        f'<label class="remat-check"><input type="checkbox" data-control="beside" {KEYS}> Source beside</label></div>'
        f'<div class="remat-body">{"".join(map(_panel, panels))}</div>'
    )


def _gradients(trace: Trace) -> str:
    """A choice among the gradients that a function takes inside, and its own derivative; empty without any."""
    if not trace.gradients:
        return ""
    options = [
        (gradient.key, f"{gradient.function} ({gradient.place})" if gradient.place else gradient.function)
        for gradient in trace.gradients
    ]
    itself = ("none", "the function itself, not a gradient in it")
    chosen = trace.gradient.key if trace.gradient else "none"
    return f'<div class="remat-controls">{select("gradient", "Gradient of", [*options, itself], chosen)}</div>'


def _places(sites: Sequence[Site], function: str) -> list[tuple[str, str]]:
    whole = ("function", f"the whole of {function}" if function else "the whole function")
    if len(sites) == 1:
        return [whole, ("sites", _site(sites[0]))]
    return [whole, ("sites", f"all {len(sites)} sites"), *((site.key, _site(site)) for site in sites)]


def _site(site: Site) -> str:
    times = f" x{site.times}" if site.times > 1 else ""
    where = f" ({site.source.place})" if site.source else ""
    return f"{site.function}{times}{where}"


def _tab(panel: Panel) -> str:
    return (
        f'<button type="button" role="tab" id="{ID}tab-{panel.key}" data-tab="{panel.key}" '
        f'aria-controls="{ID}panel-{panel.key}" {KEYS}>'
        f'{panel.title} <small data-count="{panel.key}"></small></button>'
    )


def _panel(panel: Panel) -> str:
    """A tab's panel: its tools, which stay, above what follows the policy, which scrolls."""
    key = panel.key
    inner = "".join(f'<div data-part="{part}"></div>' for part in panel.parts)
    whole = "" if inner else f' data-part="{key}"'
    early = " data-early" if panel.early else ""
    return (
        f'<div role="tabpanel" id="{ID}panel-{key}" data-panel="{key}" aria-labelledby="{ID}tab-{key}">{panel.tools()}'
        f'<div class="remat-panel remat-panel-{key}"{whole}{early} tabindex="0" role="group" '
        f'aria-label="{panel.title}" {KEYS}>{inner}</div></div>'
    )


def _names(names: Sequence[str]) -> str:
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
            f'<div class="remat-tools">{search("names", "Names", "attn_* or part of a name")}'
            f"<span>set all that are shown to</span>{buttons}</div>"
        )
    return (
        f'<div role="group" aria-label="Checkpoint names">{tools}<div class="remat-names">{"".join(groups)}</div></div>'
    )
