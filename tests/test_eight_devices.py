"""All tests that need eight devices, in one process that has them, which takes long to start."""

from pathlib import Path

import pytest

from tests.eight_devices import not_on_eight, run_on_eight

THESE = Path(__file__).parent
pytestmark = [pytest.mark.slow, not_on_eight]


def test_on_eight_devices():
    files = [file for file in sorted(THESE.glob("test_*.py")) if "import eight" in file.read_text()]
    summary = run_on_eight("-m", "eight_devices", *map(str, files)).splitlines()[-1]
    assert " passed" in summary
    assert " skipped" not in summary


def test_programs_of_abstract_meshes_are_the_same_where_eight_devices_are():
    assert (
        " passed"
        in run_on_eight("-m", "not eight_devices and not slow", str(THESE / "test_sharding.py")).splitlines()[-1]
    )
