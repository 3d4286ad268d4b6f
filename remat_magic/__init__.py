"""See what JAX autodiff saves for the backward pass and why, and what every checkpoint policy would do.

In a notebook: ``%load_ext remat_magic``, then ``%%remat`` on a cell. In Python: ``remat_magic.trace(fun, *args)``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remat_magic.records import Exhausted, GradientDifference, Measurement, RematError, Report

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from remat_magic import devices, policies
    from remat_magic.api import Trace, assert_fits, catch, catching, check_gradients, trace
    from remat_magic.measuring.explain import explain
    from remat_magic.meshes import mesh
    from remat_magic.records.comparison import Comparison
    from remat_magic.widget.widget import show

__version__ = "0.3.0"

__all__ = [
    "Comparison",
    "Exhausted",
    "GradientDifference",
    "Measurement",
    "RematError",
    "Report",
    "Trace",
    "assert_fits",
    "catch",
    "catching",
    "check_gradients",
    "devices",
    "explain",
    "mesh",
    "policies",
    "show",
    "trace",
]

# Loaded when first asked for: `%load_ext remat_magic` must not wait for what only a click needs.
_OF_API = ("Trace", "assert_fits", "catch", "catching", "check_gradients", "trace")
_LAZY = dict.fromkeys(_OF_API, "remat_magic.api") | {
    "Comparison": "remat_magic.records.comparison",
    "explain": "remat_magic.measuring.explain",
    "mesh": "remat_magic.meshes",
    "show": "remat_magic.widget.widget",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in ("policies", "devices"):
        return importlib.import_module(f"remat_magic.{name}")
    raise AttributeError(f"module 'remat_magic' has no attribute {name!r}")


def load_ipython_extension(ip: InteractiveShell) -> None:
    """``%load_ext remat_magic``."""
    from remat_magic.notebook.magic import load

    load(ip)


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """``%unload_ext remat_magic``."""
    from remat_magic.notebook.magic import unload

    unload(ip)
