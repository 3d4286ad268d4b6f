"""The tabs of the widget, in their order: one Python file and one script each. A new one is registered here."""

from remat_magic.widget.panel import Panel
from remat_magic.widget.panels.choices import Choices
from remat_magic.widget.panels.jaxprs import Jaxprs
from remat_magic.widget.panels.listing import Listing
from remat_magic.widget.panels.memory import Memory
from remat_magic.widget.panels.notes import Notes
from remat_magic.widget.panels.values import Values

__all__ = ["PANELS"]

PANELS: tuple[type[Panel], ...] = (Values, Listing, Memory, Jaxprs, Choices, Notes)
