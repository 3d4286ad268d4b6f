"""The widget's frame: what stays in place while the policy changes."""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.records import Choice, Site, SourceSpan
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.html import title_html
from remat_magic.views.tables import KEYS
from remat_magic.views.tools import (
    ID,
    button,
    compare_tools,
    name_tools,
    plan_tools,
    program_tools,
    select,
    table_tools,
)

__all__ = ["frame"]

_TABS = (
    ("residuals", "Residuals"),
    ("recomputed", "Recomputed"),
    ("lines", "Source"),
    ("jaxprs", "Jaxprs"),
    ("memory", "Memory"),
    ("advice", "Advice"),
    ("compare", "Compare"),
    ("plan", "Plan"),
)


def _site(site: Site) -> str:
    times = f" x{site.times}" if site.times > 1 else ""
    where = _at(site.source)
    return f"{site.function}{times}{where}"


def _at(span: SourceSpan | None) -> str:
    return f" ({fmt.location(span)})" if span else ""


# The parts of the panels that have several.
_PARTS = {"compare": ("comparison", "gradients"), "plan": ("frontier", "planned", "found")}


def _panel(key: str, text: str, tools: str) -> str:
    """A tab's panel: its tools, which stay, above what follows the policy, which scrolls."""
    inner = "".join(f'<div data-part="{part}"></div>' for part in _PARTS.get(key, ()))
    whole = "" if inner else f' data-part="{key}"'
    return (
        f'<div role="tabpanel" id="{ID}panel-{key}" data-panel="{key}" aria-labelledby="{ID}tab-{key}">{tools}'
        f'<div class="remat-panel remat-panel-{key}"{whole} tabindex="0" role="group" aria-label="{text}" {KEYS}>'
        f"{inner}</div></div>"
    )


def frame(
    *,
    title: str,
    signature: str,
    wrt: Sequence[str],
    choices: Sequence[Choice],
    sites: Sequence[Site],
    names: Sequence[str],
    function: str,
    can_apply: bool,
    devices: Sequence[str] = (),
    has_inputs: bool = False,
) -> str:
    """The controls, the tabs and the empty parts, each marked by ``data-part`` for the script to fill.

    Args:
        title: how the inspection came about.
        signature: what is inspected, and
        wrt: with respect to what.
        choices: the policies of the dropdown.
        sites: the checkpoint sites of the other one.
        names: the checkpoint names, each with three states.
        function: the function's name.
        can_apply: whether the choice can be bound to the function's name.
        devices: whose data sheets times can be estimated by.
        has_inputs: whether there are arrays to run on.
    """
    policies = [(choice.key, choice.label or choice.key) for choice in choices]
    places = [("function", f"the whole of {function}" if function else "the whole function")]
    if len(sites) == 1:
        places.append(("sites", _site(sites[0])))
    else:
        places += [("sites", f"all {len(sites)} sites"), *((site.key, _site(site)) for site in sites)]
    at = select("at", "at", places) if sites else ""
    apply = button("apply", "Apply") if can_apply else ""
    tabs = "".join(
        f'<button type="button" role="tab" id="{ID}tab-{key}" data-tab="{key}" aria-controls="{ID}panel-{key}" {KEYS}>'
        f'{text} <small data-count="{key}"></small></button>'
        for key, text in _TABS
    )
    tools = {
        "residuals": table_tools("residuals"),
        "recomputed": table_tools("recomputed"),
        "jaxprs": program_tools(),
        "compare": compare_tools(devices, has_inputs),
        "plan": plan_tools(),
    }
    panels = "".join(_panel(key, text, tools.get(key, "")) for key, text in _TABS)
    differentiated = f' <small class="remat-wrt">differentiated: {escape(", ".join(wrt))}</small>' if wrt else ""
    return (
        f'{title_html(title)}<div class="remat-signature"><code>{escape(signature)}</code>{differentiated}</div>'
        f'<div class="remat-controls">{select("policy", "Policy", policies)}{at}'
        f"{select('against', 'vs', [('', 'nothing'), *policies])}"
        f"<span>{button('pin', 'Pin', title='Compare every choice with the one that is shown now')} "
        f"{button('undo', 'Undo', disabled='')} {button('redo', 'Redo', disabled='')}</span>"
        f'<span class="remat-meaning" id="{ID}meaning"></span></div>'
        f'{name_tools(names)}<div data-part="totals"></div>'
        f'<div class="remat-code"><code data-part="code"></code>'
        f"{button('copy', 'Copy')}{apply}</div>"
        '<div data-part="notes"></div>'
        f'<div class="remat-bar"><div class="remat-tabs" role="tablist" aria-label="Details">{tabs}</div>'
        f'<button type="button" class="remat-chip" data-action="unpick" hidden {KEYS}></button>'
        '<span class="remat-status" role="status" aria-live="polite" data-part="status"></span>'
        f'<label class="remat-check"><input type="checkbox" data-control="beside" {KEYS}> Source beside</label></div>'
        f'<div class="remat-body">{panels}</div>'
    )
