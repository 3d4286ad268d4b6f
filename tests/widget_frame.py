"""The widget's frame for a trace that is made by hand, and a browser that keeps what it is sent."""

import threading
from types import SimpleNamespace

from remat_magic.records import Choice
from remat_magic.widget.frame import frame
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.panels import PANELS
from tests.views_records import small


def frame_of(*, title="", devices=(), can_apply=True, **changes):
    """The widget's frame for a trace with these attributes."""
    choices = changes.pop("choices", (Choice("none", "none", "No checkpoint."),))
    attributes = {"signature": "f(x) -> y", "wrt": ("x",), "sites": small().sites, "groups": (), "names": ("a",),
                  "function_name": "f", "gradients": (), "gradient": None, "mesh_devices": 1, "step_name": "",
                  "postponed": False, **changes}  # fmt: skip
    live = LiveTrace(SimpleNamespace(choices=lambda: choices, vmaps=(), **attributes))
    return frame(live, [panel(live, None, None) for panel in PANELS], title=title, can_apply=can_apply)


class Browser:
    """Keeps what a panel sends and chooses, and waits for it."""

    def __init__(self):
        self.messages, self.chosen, self._arrived = [], [], threading.Condition()

    def __call__(self, message):
        with self._arrived:
            self.messages.append(message)
            self._arrived.notify_all()

    def choose(self, plan, serial):
        self.chosen.append((plan, serial))

    def wait(self, wanted, seconds=120):
        """The last message that is wanted."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(map(wanted, self.messages)), seconds), self.messages
            return next(filter(wanted, reversed(self.messages)))

    def of(self, kind):
        return self.wait(lambda message: message["type"] == kind)
