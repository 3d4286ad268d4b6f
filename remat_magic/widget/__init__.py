"""The notebook widget: it holds the selection, asks for reports and sends HTML. It knows no JAX."""

from remat_magic.widget.widget import RematWidget

__all__ = ["RematWidget"]
