"""The widget in a page of its own: its model is there, and a test says what the kernel would."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page

import remat_magic as rm
from remat_magic.widget.widget import RematWidget

_MODEL = """\
([esm, css, frame, view]) => {
  const values = { _frame: frame, _view: view, _css: css, _copy_id: "its own" };
  const heard = {};
  window.sent = [];
  const model = {
    get: name => values[name],
    on: (name, callback) => (heard[name] ??= []).push(callback),
    off: (name, callback) => (heard[name] = heard[name].filter(one => one !== callback)),
    send: content => sent.push(content),
  };
  window.hear = message => heard["msg:custom"].forEach(callback => callback(message));
  const style = document.createElement("style");
  style.textContent = css;
  document.head.append(style);
  const el = document.querySelector(".live");
  const url = URL.createObjectURL(new Blob([esm], { type: "text/javascript" }));
  return import(url).then(({ default: widget }) => { window.removed = widget.render({ model, el }) });
}"""


def show_alone(
    page: Page, trace: rm.Trace, document: str = '<div class="live"></div>', policy: str = "as_written"
) -> None:
    """Show the widget of a trace in the element ``.live`` of a document.

    It is hidden until it hears of a kernel: ``hear(page, type="hello")``. What is kept of it is known as "its own".
    """
    page.set_content(document)
    widget = RematWidget(trace, policy)
    view = {**widget._render(widget.report), "serial": 0}
    page.evaluate(_MODEL, [str(widget._esm), str(widget._css), widget._frame, json.loads(json.dumps(view))])
    widget.close()


def hear(page: Page, **message: Any) -> None:
    """Let the widget hear a message of the kernel."""
    page.evaluate("message => hear(message)", message)


def sent(page: Page, kind: str) -> list[dict[str, Any]]:
    """What the widget has sent of one type."""
    return page.evaluate("kind => sent.filter(message => message.type === kind)", kind)
