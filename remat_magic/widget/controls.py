"""The controls that the frame and the panels of the widget are made of."""

from __future__ import annotations

import html
from collections.abc import Iterable

from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS

# Replaced by the script, per view: two views of one widget may be on a page, and ids must be unique there.
ID = "__remat__"

_TAUGHT = {
    "against": "A, the choice that the shown one, B, is compared with, in numbers and tables",
    "apply": "Bind the function's name to it with this choice; what was compiled before keeps the old one",
    "arrange": "Search the rows and group them (also the key / in the table); what is unfolded stays so",
    "at": "Where the policy goes: the whole function, its checkpoints, or a function that it calls",
    "beside": "Keep the source in sight, at the left of every tab",
    "copy": "Copy the code for this choice, to be pasted into your program",
    "device": "What it is to fit: bytes and times are this device's, and its compiler is asked where it is installed",
    "find": "Show the rows that have this in them",
    "gradient": "Which of the gradients that the function takes is looked at",
    "group": "Put the rows of one line, name, operation or loop together, with their sum",
    "policy": "What is saved for the backward pass and what it computes again; opens as a list with what each does",
    "state-offload": "Move it to the host's memory for the backward pass, and back",
    "state-recompute": "Let the backward pass compute it again",
    "state-save": "Keep it on the device for the backward pass",
    "tab-choices": "All that was looked at, by what it needs and the time that it takes, and the edit of your source",
    "tab-jaxprs": "The programs of the forward and the backward pass, as JAX prints them",
    "tab-listing": "Your source, with what each line saves and has computed again",
    "tab-memory": "What is held when, by the lines that hold it",
    "tab-notes": "What to know of the shown choice, and what would help that is no choice",
    "tab-values": "The values that are saved for the backward pass, called residuals, and what it computes again",
    "together": "The other pane follows to the same operation",
    "unpick": "Choose no line: all rows are shown again, and nothing is marked",
}
"""What a control is for, said on hover, by its key."""


def taught(key: str) -> str:
    """The attribute that says on hover what a control is for; nothing where there is nothing to say."""
    return f' title="{html.escape(_TAUGHT[key])}"' if key in _TAUGHT else ""


def select(key: str, label: str, options: Iterable[tuple[str, str]], chosen: str | None = None) -> str:
    """A dropdown with its label; options are pairs of value and text, ``chosen`` the value that it begins with."""
    items = "".join(
        f'<option value="{html.escape(value)}"{" selected" * (value == chosen)}>{escape(text)}</option>'
        for value, text in options
    )
    described = f' aria-describedby="{ID}meaning"' if key in ("policy", "at") else ""
    return (
        f'<span class="remat-field"{taught(key)}><label for="{ID}{key}">{escape(label)}</label> '
        f'<select id="{ID}{key}" data-control="{key}"{described} {KEYS}>{items}</select></span>'
    )


def button(action: str, text: str, **attributes: str) -> str:
    """A button for one action of the script, with more attributes."""
    extra = "".join(f' {name.replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items())
    extra += "" if "title" in attributes else taught(action)
    return f'<button type="button" data-action="{action}"{extra} {KEYS}>{escape(text)}</button>'
