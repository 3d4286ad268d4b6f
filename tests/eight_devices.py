"""Tests on eight devices that a CPU pretends to be: in a process of their own, since JAX counts its devices once."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest

__all__ = ["eight", "not_on_eight", "run_on_eight"]

_MANY = "--xla_force_host_platform_device_count=8"

_REASON = "needs eight devices: run by test_on_eight_devices"
not_on_eight = pytest.mark.skipif(_MANY in os.environ.get("XLA_FLAGS", ""), reason="this is the run on eight devices")


def eight(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that needs eight devices: skipped where there are fewer, run by ``test_on_eight_devices``."""
    return pytest.mark.eight_devices(pytest.mark.skipif(len(jax.devices()) < 8, reason=_REASON)(test))


def run_on_eight(*options: str) -> str:
    """Run pytest with ``options`` on eight devices, and return what it prints; its failures are this one's."""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_MANY}", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"  # two programs at once can wait for each other
    environment.pop("PYTEST_ADDOPTS", None)  # how the run around this one prints
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rf", *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout
