"""See what JAX autodiff saves for the backward pass and why, and what every checkpoint policy would do.

In a notebook: ``%load_ext remat_magic``, then ``%%remat`` on a cell. In Python: ``remat_magic.trace(fun, *args)``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remat_magic.model import GradientDifference, Measurement, RematError, Report

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from remat_magic import devices, policies
    from remat_magic.analysis.trace import Trace, trace
    from remat_magic.model.plan_file import load_plan
    from remat_magic.tuning.assertions import assert_policy
    from remat_magic.tuning.compare import Comparison
    from remat_magic.tuning.gradients import check_gradients
    from remat_magic.tuning.job import Measuring

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "GradientDifference",
    "Measurement",
    "Measuring",
    "RematError",
    "Report",
    "Trace",
    "assert_policy",
    "check_gradients",
    "devices",
    "load_plan",
    "policies",
    "trace",
]

# Loaded when first asked for: `%load_ext remat_magic` must not wait for what only a click needs.
_LAZY = {
    "trace": "remat_magic.analysis.trace",
    "Trace": "remat_magic.analysis.trace",
    "load_plan": "remat_magic.model.plan_file",
    "assert_policy": "remat_magic.tuning.assertions",
    "check_gradients": "remat_magic.tuning.gradients",
    "Comparison": "remat_magic.tuning.compare",
    "Measuring": "remat_magic.tuning.job",
}
_MODULES = ("policies", "devices")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"remat_magic.{name}")
    raise AttributeError(f"module 'remat_magic' has no attribute {name!r}")


def load_ipython_extension(ip: InteractiveShell) -> None:
    """``%load_ext remat_magic``."""
    from remat_magic.magic import load

    load(ip)


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """``%unload_ext remat_magic``."""
    from remat_magic.magic import unload

    unload(ip)
