"""The widget's frame: what stays in place while the policy changes."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from remat_magic.model import Choice, Site, SourceSpan

from . import format as fmt
from .cells import KEYS
from .format import escape
from .html import title_html

__all__ = ["ID", "frame"]

# Replaced by the script, per view: two views of one widget may be on a page, and ids must be unique there.
ID = "__remat__"

_TABS = (
    ("residuals", "Residuals"),
    ("recomputed", "Recomputed"),
    ("lines", "Lines"),
    ("jaxprs", "Jaxprs"),
    ("memory", "Memory"),
    ("advice", "Advice"),
    ("compare", "Compare"),
)


def _select(key: str, label: str, options: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<option value="{html.escape(value)}">{escape(text)}</option>' for value, text in options)
    described = f' aria-describedby="{ID}meaning"' if key in ("policy", "at") else ""
    return (
        f'<span class="remat-field"><label for="{ID}{key}">{escape(label)}</label> '
        f'<select id="{ID}{key}" data-control="{key}"{described} {KEYS}>{items}</select></span>'
    )


def _site(site: Site) -> str:
    times = f" x{site.times}" if site.times > 1 else ""
    where = _at(site.source)
    return f"{site.function}{times}{where}"


def _at(span: SourceSpan | None) -> str:
    return f" ({fmt.location(span)})" if span else ""


def _names(names: Sequence[str]) -> str:
    groups = list[str]()
    for number, name in enumerate(names):
        value = html.escape(name)
        radios = "".join(
            f'<label><input type="radio" name="{ID}name{number}" value="{state}" data-name="{value}" {KEYS}>'
            f"<span>{state}</span></label>"
            for state in ("save", "offload", "recompute")
        )
        groups.append(
            f'<div class="remat-name" role="radiogroup" aria-labelledby="{ID}name{number}">'
            f'<code id="{ID}name{number}">{escape(name)}</code>{radios}</div>'
        )
    return (
        f'<div class="remat-names" role="group" aria-label="Checkpoint names">{"".join(groups)}</div>' if groups else ""
    )


def _compare(devices: Sequence[str], has_inputs: bool, policies: Sequence[tuple[str, str]]) -> str:
    """What stays of the Compare panel while its content changes: what times are estimated for, and measuring."""
    known = [("", "this machine"), *((name, name) for name in devices)]
    runs = [("", "compile only"), *([("given", "compile, run on your inputs")] if has_inputs else []),
            ("random", "compile, run on random inputs")]  # fmt: skip
    return (
        f'<div class="remat-measure">{_select("device", "Estimate for", known)}{_select("inputs", "Measure", runs)}'
        f'<button type="button" data-action="measure" {KEYS}>Measure</button>'
        f'<button type="button" data-action="gradients" {KEYS}>Check gradients</button>'
        f'<button type="button" data-action="cancel" hidden {KEYS}>Cancel</button>'
        f"{_select('against', 'Difference from', [('', 'nothing'), *policies])}"
        f'<progress data-part="progress" hidden aria-label="Measured" max="1" value="0"></progress></div>'
        '<div data-part="difference"></div><div data-part="comparison"></div><div data-part="gradients"></div>'
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
    at = _select("at", "at", places) if sites else ""
    apply = f'<button type="button" data-action="apply" {KEYS}>Apply</button>' if can_apply else ""
    tabs = "".join(
        f'<button type="button" role="tab" id="{ID}tab-{key}" data-tab="{key}" aria-controls="{ID}panel-{key}" {KEYS}>'
        f'{text} <small data-count="{key}"></small></button>'
        for key, text in _TABS
    )
    panels = "".join(
        f'<div role="tabpanel" id="{ID}panel-{key}" data-part="{key}" aria-labelledby="{ID}tab-{key}" tabindex="0" '
        f'class="remat-panel remat-panel-{key}" {KEYS}>'
        f"{_compare(devices, has_inputs, policies) if key == 'compare' else ''}</div>"
        for key, _ in _TABS
    )
    differentiated = f' <small class="remat-wrt">differentiated: {escape(", ".join(wrt))}</small>' if wrt else ""
    return (
        f'{title_html(title)}<div class="remat-signature"><code>{escape(signature)}</code>{differentiated}</div>'
        f'<div class="remat-controls">{_select("policy", "Policy", policies)}{at}'
        f'<span class="remat-meaning" id="{ID}meaning"></span></div>'
        f'{_names(names)}<div data-part="totals"></div>'
        f'<div class="remat-code"><code data-part="code"></code>'
        f'<button type="button" data-action="copy" {KEYS}>Copy</button>{apply}</div>'
        '<div data-part="notes"></div>'
        f'<div class="remat-bar"><div class="remat-tabs" role="tablist" aria-label="Details">{tabs}</div>'
        f'<span class="remat-status" role="status" aria-live="polite" data-part="status"></span></div>{panels}'
    )
