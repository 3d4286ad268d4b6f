"""What the memory picture's script tells of a moment, against what the record holds then."""

import json
import shutil
import subprocess
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.views.alive import lookup, value_words
from remat_magic.widget import bundle
from remat_magic.widget.panel import SCRIPTS
from tests.cost_helpers import S
from tests.plot_records import timeline
from tests.views_records import infected

TOP = 3
# Entries and the rest of every number.
SCRIPT = """
const told = JSON.parse(process.argv[1]);
const at = (number) => {
  const { entries, rest } = m.aliveAt(told, number);
  return { entries: entries.map(({ value, count, bytes }) => [value.what, value.type, count, bytes]), rest };
};
console.log(JSON.stringify({
  alive: told.counts.map((_, number) => at(number)),
  numbers: [...Array(told.moments).keys()].map((place) => m.numberAt(told, place + 0.5)),
  ticks: m.roundNumbers(410, 5),
  outlines: m.outlines(told, (place) => place, (bytes) => bytes),
}));
"""


def ran(told):
    """What the script finds."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js on this machine")
    module = bundle.bundle({"m": SCRIPTS / "moments.js"}, "m").replace("export default m;", "")
    command = [node, "--input-type=module", "-e", module + SCRIPT, json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def net(w, x):
    body = jax.checkpoint(lambda c, w: (jnp.sin(c @ w), None))
    return jnp.sum(jax.lax.scan(body, jnp.cos(x @ w[0]), w)[0] ** 2)


@pytest.fixture(scope="module")
def traced():
    return rm.trace(net, S(4, 32, 32), S(16, 32)).timeline("dots_saveable", "function")


def test_the_script_tells_of_each_moment_what_is_held_then(traced):
    """The biggest first, alike ones together; with the rest it is all of the curve."""
    found = ran(lookup(traced, TOP))["alive"]
    assert len(found) == len(traced.moments)
    for number, (told, moment) in enumerate(zip(found, traced.moments, strict=True)):
        values = traced.alive_at(number)
        sums = Counter()
        for value in values:
            sums[value] += value.nbytes
        assert [entry[3] for entry in told["entries"]] == [nbytes for _, nbytes in sums.most_common(TOP)]
        assert {tuple(entry[:2]) for entry in told["entries"]} <= {(value_words(v), v.type) for v in values}
        assert sum(entry[3] for entry in told["entries"]) + told["rest"]["bytes"] == moment.bytes
        assert sum(entry[2] for entry in told["entries"]) + told["rest"]["count"] == len(values)


def test_of_a_long_program_each_stretch_tells_its_highest_moment(traced):
    told = lookup(traced, TOP, most=5)
    assert len(told["counts"]) == 5
    assert told["places"][told["peak"]] == traced.peak
    found = ran(told)
    for place, alive in zip(told["places"], found["alive"], strict=True):
        listed = sum(entry[3] for entry in alive["entries"])
        assert listed + alive["rest"]["bytes"] == traced.moments[place].bytes
        assert alive["rest"]["bytes"] >= 0
    # A moment that is not told has the number of the last one before it.
    expected = [max((i for i, p in enumerate(told["places"]) if p <= m), default=0) for m in range(told["moments"])]
    assert found["numbers"] == expected


def test_the_script_draws_what_python_drew():
    """The heights of the areas, of as many moments as there are pixels."""
    record = timeline(20, 30)
    found = ran(lookup(record, TOP))
    assert found["ticks"] == [0, 100, 200, 300, 400]
    arguments, _, temporaries = found["outlines"]
    assert arguments.startswith("M0.0,300.0H1.0L1.0,300.0H2.0")
    for number, moment in enumerate(record.moments):
        assert f"{number}.0,{moment.bytes}.0H{number + 1}.0" in temporaries


def test_what_would_change_what_is_seen_is_written_out():
    """The script makes text of it, which can be no markup, yet could turn the words around it."""
    told = lookup(infected(timeline(), "\u202eevil"), TOP)
    assert {value["type"] for value in told["values"]} == {"\\u202eevil"}
