"""The widget's frame: what stays in place while the policy changes."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from remat_magic import units
from remat_magic.api import Trace
from remat_magic.records import Site
from remat_magic.views.format import escape
from remat_magic.views.headline import head_html
from remat_magic.views.tables import KEYS
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.panels import ID, SCRIPTS, Panel, button, select, taught

# What a checkpoint name's value can become.
_STATES = ("save", "offload", "recompute")
_MORE = "Further figures of the choice, its code, a comparison, and rarer options"
_ASK = "Show all figures for one device: XLA says how it shards the values, in a second for 1,000 operations"
_TO_EDIT = "The plan as an edit of your source, with whole cells to copy"
_OTHER = "?"  # what the list of devices has for so many bytes


def frame(live: LiveTrace, panels: Sequence[Panel], *, title: str, can_apply: bool) -> str:
    """The controls, the tabs and the empty parts, each marked by ``data-part`` for the script to fill."""
    trace = live.trace
    head = head_html(trace.signature, trace.function_name, trace.step_name, trace.wrt, title)
    # Where it takes XLA long to say how values are spread, and that was not done.
    spread = button("one-device", "Ask XLA", title=_ASK) if trace.postponed else ""
    policies = [(choice.key, choice.label or choice.key) for choice in trace.choices()]
    meanings = {choice.key: choice.meaning for choice in trace.choices()}
    places = _places(trace.sites, trace.function_name)
    for site in trace.groups:
        places.append((site.key, f"{_site(site)}, {site.key.rpartition('/')[2]} steps under one checkpoint"))
    places += [(site.key, f"{site.key} parts") for site in trace.vmaps]  # of the batch the choices tell
    at = select("at", "Place", places) if len(places) > 1 else ""
    apply = button("apply", "Apply") if can_apply else ""
    more_button = button("more", "more", aria_expanded="false", aria_controls=f"{ID}more", title=_MORE)
    # Of one gradient there is little to choose.
    several, itself = (_gradients(trace), "") if len(trace.gradients) > 1 else ("", _gradients(trace))
    return (
        f'<div class="remat-head">{head}{_devices(live)}</div>'
        '<div class="remat-verdict" data-part="verdict" role="status" aria-live="polite"></div>'
        f'<div class="remat-fitting"{" data-can-apply" * can_apply}><div data-part="bar"></div><div class="remat-two">'
        '<section data-part="takes"></section><section data-part="changes"></section></div>'
        '<div class="remat-diffs" data-part="diff"></div></div>'
        f'<div class="remat-controls remat-choosing" data-meanings="{html.escape(json.dumps(meanings))}">{several}{at}'
        f'{select("policy", "Policy", policies)}<span class="remat-line" data-part="totals"></span>{more_button}</div>'
        f'<div class="remat-optional" id="{ID}more"><p class="remat-line" data-part="rarer"></p>'
        f'<div class="remat-controls">{itself}'
        f"{select('against', 'Compare with', [('', 'no other'), *policies])}</div>"
        f'<p class="remat-meaning" id="{ID}meaning"></p>{_names(trace.names)}'
        f'<div class="remat-code"><code data-part="code"></code>'
        f"{button('to-edit', 'Show its edit', hidden='', title=_TO_EDIT)}{button('copy', 'Copy')}{apply}</div></div>"
        '<div class="remat-against" data-part="against" role="status" aria-live="polite"></div>'
        f'<div data-part="wrong"></div>{spread and f"""<div class="remat-controls">{spread}</div>"""}'
        '<div class="remat-bar"><div class="remat-tabs" role="tablist" aria-label="Details">'
        f"{''.join(map(_tab, panels))}</div>"
        f'<button type="button" data-action="unpick" hidden{taught("unpick")} {KEYS}></button>'
        '<span class="remat-status" role="status" aria-live="polite" data-part="status"></span>'
        f'<label class="remat-check"{taught("beside")}><input type="checkbox" data-control="beside" {KEYS}> '
        "Source beside</label></div>"
        f'<div class="remat-body">{"".join(map(_panel, panels))}</div>'
    )


def _devices(live: LiveTrace) -> str:
    """What is to be fitted: a device, or so many bytes, which a field is for; where nothing is chosen it asks."""
    offered = [("", "choose one: does it fit?")]
    for name, size in live.devices.items():
        offered.append((name, name if size is None or units.is_bytes(name) else f"{name}, {units.nbytes(size)}"))
    return (
        f'<span class="remat-device">{select("device", "Device", [*offered, (_OTHER, "other size…")], live.device)}'
        f'<input type="search" data-control="size" aria-label="Bytes to fit" placeholder="24 GiB" hidden '
        f'autocomplete="off" {KEYS}></span>'
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
    return select("gradient", "Gradient of", [*options, itself], chosen)


def _places(sites: Sequence[Site], function: str) -> list[tuple[str, str]]:
    whole = ("function", f"the whole of {function}" if function else "the whole function")
    possible = [(site.key, f"{_site(site)}, no checkpoint yet") for site in sites if site.possible]
    written = [(site.key, _site(site)) for site in sites if not site.possible]
    if len(written) > 1:
        written.insert(0, ("sites", f"all {len(written)} sites"))
    elif written:
        written = [("sites", written[0][1])]
    return [whole, *written, *possible]


def _site(site: Site) -> str:
    times = f" x{site.times}" if site.times > 1 else ""
    where = f" ({site.source.place})" if site.source else ""
    return f"{site.function}{times}{where}"


def _tab(panel: Panel) -> str:
    return (
        f'<button type="button" role="tab" id="{ID}tab-{panel.key}" data-tab="{panel.key}" '
        f'aria-controls="{ID}panel-{panel.key}"{taught(f"tab-{panel.key}")} {KEYS}>'
        f'{panel.title} <small data-count="{panel.key}"></small></button>'
    )


def _panel(panel: Panel) -> str:
    """A tab's panel: its tools, which stay, above what follows the policy, which scrolls."""
    key = panel.key
    inner = "".join(f'<div data-part="{part}"{" data-early" * (part in panel.early)}></div>' for part in panel.parts)
    whole = "" if inner else f' data-part="{key}"'
    return (
        f'<div role="tabpanel" id="{ID}panel-{key}" data-panel="{key}" aria-labelledby="{ID}tab-{key}">{panel.tools()}'
        f'<div class="remat-panel remat-panel-{key}"{whole} tabindex="0" role="group" '
        f'aria-label="{panel.title}" {KEYS}>{inner}</div></div>'
    )


def _names(names: Sequence[str]) -> str:
    """Three states for each checkpoint name."""
    if not names:
        return ""
    groups = list[str]()
    for number, name in enumerate(names):
        key = html.escape(name)
        radios = "".join(
            f"<label{taught(f'state-{state}')}>"
            f'<input type="radio" name="{ID}name{number}" value="{state}" data-name="{key}" {KEYS}>'
            f"<span>{state}</span></label>"
            for state in _STATES
        )
        groups.append(
            f'<div class="remat-name" role="radiogroup" aria-labelledby="{ID}name{number}">'
            f'<code id="{ID}name{number}">{escape(name)}</code>{radios}'
            f"<small hidden>not needed by the backward pass</small></div>"
        )
    return f'<div role="group" aria-label="Checkpoint names"><div class="remat-names">{"".join(groups)}</div></div>'


# ----------------------------------------------------------------------------------------- the scripts as one ES module


_IMPORT = re.compile(r'import \{ (?P<names>\w+(?:, \w+)*) \} from "(?P<path>\.[\w./-]*/[\w.-]+\.js)";')
_EXPORT = re.compile(r"export (?=(?:async )?(?:function|const|class) (?P<name>\w+))")


def bundle(entries: Mapping[str, Path], expression: str) -> str:
    """One module of several, as variables of the ``expression`` that is its default export, and of what they import.

    ValueError where a script imports or exports in a way that is not known here.
    """
    texts, variables = list[str](), dict[Path, str]()

    def add(path: Path) -> str:
        """Put a module after those that it imports, unless it is there; the variable that holds its exports."""
        path = path.resolve()
        if path not in variables:
            exports = list[str]()
            body = "\n".join(line(path, text, exports) for text in path.read_text(encoding="utf-8").splitlines())
            variables[path] = name = f"module{len(variables)}"
            exported = ", ".join(exports)
            texts.append(f"// {path.name}\nconst {name} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n")
        return variables[path]

    def line(path: Path, text: str, exports: list[str]) -> str:
        if imported := _IMPORT.fullmatch(text):
            return f"const {{ {imported['names']} }} = {add(path.parent / imported['path'])};"
        if exported := _EXPORT.match(text):
            exports.append(exported["name"])
            return text[exported.end() :]
        if re.match(r"(import|export)\b", text):
            raise ValueError(f"{path.name}: this form is not known to the bundle: {text}")
        return text

    own = "".join(f"const {name} = {add(path)};\n" for name, path in entries.items())
    return f"{''.join(texts)}{own}export default {expression};\n"


@cache
def widget_script(panels: tuple[type[Panel], ...]) -> str:
    """The script of a widget with these panels."""
    scripts = {panel.key: panel.script() for panel in panels}
    entries = {"core": SCRIPTS / "widget.js", **{f"panel{n}": path for n, path in enumerate(scripts.values())}}
    makers = ", ".join(f"{json.dumps(key)}: panel{n}.panel" for n, key in enumerate(scripts))
    return bundle(entries, f"{{ render: (context) => core.render(context, {{ {makers} }}) }}")
