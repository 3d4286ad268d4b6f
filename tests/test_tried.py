"""tests/TRIED.md says what the tests hold, and nothing that they do not."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from tests import tried
from tests.volume import in_turn


def test_the_page_is_in_step():
    """Renew it with ``python -m tests.tried``."""
    assert tried.PAGE.read_text(encoding="utf-8") == tried.page(tried._rows())


def test_the_counts_are_those_of_the_tables():
    """Counted by reading the files; here by importing them."""
    from tests import generated_operations, test_configurations, test_jax_cases, test_parity, test_security
    from tests.generated import POLICIES
    from tests.programs import PROGRAMS

    counts = {(what, where): number for what, number, where in tried.static()}

    def count(start):
        (found,) = [number for (what, _), number in counts.items() if what.startswith(start)]
        return found

    assert count("programs written") == len(PROGRAMS)
    assert count("of these") == len(PROGRAMS) * len(test_parity.POLICIES)
    assert count("uses of") == len(test_jax_cases.CASES)
    assert count("settings") == len(test_configurations.SETTINGS)
    assert count("policies") == len(POLICIES)
    assert count("attack") == len(test_security.ATTACKS) + 1
    operations = (generated_operations.UNARY, generated_operations.BINARY, generated_operations.SHAPED)
    assert count("element-wise") == sum(map(len, operations))


def test_nothing_failed_and_no_path_is_told():
    rows = tried._rows()
    assert rows
    assert all(row[-1] == "0" for row in rows)
    for row in rows:
        total, *parts = (int(number.replace(",", "")) for number in row[4:])
        assert total == sum(parts)
    text = tried.PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|usr)\b", text)


def test_a_tally_is_counted_by_version(tmp_path):
    file = tmp_path / "tally"
    lines = [["t", "1.0", False, "passed"], ["t", "1.0", False, "discarded"], ["t", "1.0", True, "passed"]]
    file.write_text("\n".join(map(json.dumps, lines)))
    old = [["1.0", "off", "3.9", "7", "9", "9", "0", "0"], ["0.9", "off", "3.9", "7", "1", "1", "0", "0"]]
    rows = {tuple(row[:2]): row[4:] for row in tried.written(old, tried.tally([file]), "3")}
    assert rows == {
        ("1.0", "off"): ["2", "1", "1", "0"],
        ("1.0", "on"): ["1", "1", "0", "0"],
        ("0.9", "off"): ["1", "1", "0", "0"],
    }


def test_where_there_is_no_time_for_all_each_file_has_its_turn():
    here = Path(__file__).parent
    names = ["test_a.py", "browser/test_b.py", "test_c.py", "test_d.py"]
    items = [SimpleNamespace(path=here / name, number=number) for name in names for number in range(2)]

    def order(turn):
        return [f"{item.path.name}{item.number}" for item in in_turn(items, turn)]

    for turn, first in enumerate(["test_a.py", "test_c.py", "test_d.py"]):
        assert order(turn)[:4] == ["test_b.py0", "test_b.py1", f"{first}0", f"{first}1"]
        assert sorted(order(turn)) == sorted(order(0))
    assert order(10) == order(1)  # of a checksum
    assert in_turn([], 1) == []
