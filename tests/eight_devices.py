"""Tests on eight devices that a CPU pretends to be: in a process of their own, since JAX counts its devices once."""

import os
import subprocess
import sys

import jax
import pytest

__all__ = ["eight", "not_on_eight", "run_on_eight"]

_MANY = "--xla_force_host_platform_device_count=8"

eight = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: run by test_on_eight_devices")
not_on_eight = pytest.mark.skipif(_MANY in os.environ.get("XLA_FLAGS", ""), reason="this is the run on eight devices")


def run_on_eight(file: str, *options: str) -> None:
    """Run the tests of a file that are skipped where there are fewer devices, and the others again.

    ``options`` are more of pytest's, as ``"-k", "eight"`` for those tests alone that have it in their names.
    """
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_MANY}", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options, file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout, done.stdout
