"""The tabs of the widget, in their order: one Python file and one script each. A new one is registered here."""

from remat_magic.widget.panel import Panel
from remat_magic.widget.panels.advice import Advice
from remat_magic.widget.panels.compare import Compare
from remat_magic.widget.panels.jaxprs import Jaxprs
from remat_magic.widget.panels.listing import Listing
from remat_magic.widget.panels.memory import Memory
from remat_magic.widget.panels.plan import Plan
from remat_magic.widget.panels.tables import Recomputed, Residuals

__all__ = ["PANELS"]

PANELS: tuple[type[Panel], ...] = (Residuals, Recomputed, Listing, Jaxprs, Memory, Advice, Compare, Plan)
