"""demo.ipynb runs, shows what is kept in it, and what it shows is what the examples are there for."""

import itertools
import json
import re
import subprocess
import sys
from collections import Counter

import jax
import nbformat
import pytest

from tests.make_demo import DEMO, WIDGET, lacks

KEPT = nbformat.read(DEMO, as_version=4)

# How many residuals each inspection of an example has, in the order of its cells. Example 5 shows example 3 again.
RESIDUALS = {
    1: [9],
    2: [6],
    3: [7],
    4: [5],
    5: [7],
    6: [1, 1],
    7: [15, 8, 3, 11],
    8: [9],
    9: [8],
    10: [9],
    11: [6],
    12: [8, 16],
    13: [4, 5],
    14: [32, 4],
    15: [4, 3],
    16: [7],
    17: [3, 4],
    18: [3, 3],
    19: [150, 186, 21],
}


def made_by_this_jax():
    return KEPT.metadata.remat_magic.jax == jax.__version__ and not getattr(jax.config, "jax_remat3", False)


def is_inspection(cell):
    return cell.cell_type == "code" and cell.source.startswith("%%remat")


def without_its_library(notebook, cell):
    """Whether a run could not inspect what a cell asks for."""
    return notebook is not KEPT and bool(lacks(cell.source))


def texts(cell):
    """What a cell shows, as text: static reports and what it prints, without the widgets."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if WIDGET not in data:
            yield output.get("text") or data.get("text/plain", "")


def shown(cell):
    return "\n".join(texts(cell))


def report_of(cell):
    """The text of an inspection's static output."""
    return next(texts(cell))


def examples(notebook):
    """Cells by the number of the example whose heading they are under; 0 before the first and after the last."""
    found, number = {}, 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (heading := re.search(r"^#+ .*", cell.source, re.MULTILINE)):
            numbers = re.findall(r"^### Example (\d+):", cell.source, re.MULTILINE)
            number = int(numbers[0]) if numbers else 0
            assert numbers or heading[0].startswith(("# ", "## "))
        found.setdefault(number, []).append(cell)
    return found


def inspections(notebook, number):
    return [cell for cell in examples(notebook)[number] if is_inspection(cell)]


def residual_count(cell):
    return int(re.search(r"^Residuals \((\d+)\)$", report_of(cell), re.MULTILINE)[1])


def total(cell, label):
    """A number of the headline, with its unit."""
    return re.search(rf"^{label} +(\S+(?: \w+)?)(?:  |$)", report_of(cell), re.MULTILINE)[1]


def operations(cell, label):
    """How many operations are repeated, or deferred."""
    found = re.search(rf"^{label} .*?(\d+) operations?\b", report_of(cell), re.MULTILINE)
    return int(found[1]) if found else 0


def rows(cell):
    """The table of residuals without its readers, each row's lines joined."""
    table = report_of(cell).split("\nResiduals (")[1].split("\n\n")[0].splitlines()[2:]
    joined = []
    for line in table:
        if re.match(r" *[\d.]+ [kMG]?B  ", line):
            joined.append(line.strip())
        else:
            joined[-1] += " " + line.strip()
    return joined


@pytest.fixture(scope="module")
def ran(root, tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "ran.ipynb"
    # In a process of its own: nbclient leaves sockets open, and pytest takes their warnings for failures.
    command = [sys.executable, str(root / "tests" / "make_demo.py"), "--run-to", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return nbformat.read(path, as_version=4)


@pytest.fixture(params=["kept", pytest.param("ran", marks=pytest.mark.slow)])
def notebook(request):
    return KEPT if request.param == "kept" else request.getfixturevalue("ran")


# ------------------------------------------------------------------------------------------------------ the file itself


def test_the_file_is_valid_small_and_clean():
    nbformat.validate(KEPT)
    assert DEMO.stat().st_size < 2_100_000
    assert KEPT.metadata.kernelspec.name == "python3"
    assert set(KEPT.metadata) == {"kernelspec", "language_info", "remat_magic"}
    assert all(not cell.metadata for cell in KEPT.cells)
    assert len({cell.id for cell in KEPT.cells}) == len(KEPT.cells)
    code = [cell for cell in KEPT.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]


def test_nothing_of_the_machine_that_made_it():
    text = json.dumps(KEPT.cells)
    for trace in ("ipykernel", "site-packages", r"\b0x[0-9a-f]{6,}", r"(?<![\w.<])/(home|root|tmp|work|usr|opt|var)/"):
        assert not re.search(trace, text), trace


def test_all_nineteen_examples_are_inspected():
    found = examples(KEPT)
    assert sorted(found) == [0, *range(1, 20)]
    for number in range(1, 20):
        assert any(map(is_inspection, found[number])), f"example {number} has no %%remat"


def test_every_inspection_is_announced_and_explained():
    """A sentence before it; the numbers after it, or after the next one of the same example."""
    kinds = ["inspection" if is_inspection(cell) else cell.cell_type for cell in KEPT.cells]
    for here, after in itertools.pairwise(kinds):
        assert (here, after) != ("code", "inspection")
    assert kinds[-1] == "markdown"


def test_the_numbers_in_the_prose_are_shown_by_cells():
    """Every size and every share in the text stands in an output of the same example, or in one before it."""
    before = ""
    checked = 0
    for part in examples(KEPT).values():
        before += "\n".join(map(shown, part))
        for cell in part:
            if cell.cell_type == "markdown":
                for number in re.findall(r"(?<![\w.])\d[\d.,]* (?:B|kB|MB|GB|FLOPs)\b|\d+%", cell.source):
                    assert number in before or number in DIFFERENCES, f"{number} in {cell.source!r}"
                    checked += 1
    assert checked > 30


# In the prose, and a difference of two numbers that are shown.
DIFFERENCES = {"2.41 GB"}


# ------------------------------------------------------------------------------------------ what is shown, kept and now


def test_no_cell_fails(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)


def test_each_inspection_shows_a_report_that_needs_no_kernel(notebook):
    inspected = [cell for cell in notebook.cells if is_inspection(cell) and not without_its_library(notebook, cell)]
    assert len(inspected) >= 30
    for cell in inspected:
        static = cell.outputs[0].data
        assert static["text/html"].startswith('<div class="remat remat-static"')
        assert static["text/plain"].strip()


@pytest.mark.slow
def test_a_run_shows_widgets_too(ran):
    for cell in ran.cells:
        expected = is_inspection(cell) and not lacks(cell.source)
        assert any(WIDGET in output.get("data", {}) for output in cell.get("outputs", [])) == expected


@pytest.mark.slow
def test_a_cell_without_its_library_says_what_to_install(ran):
    for cell in ran.cells:
        if missing := lacks(cell.source):
            sentence = (
                f"This cell needs {' and '.join(missing)}: run %pip install {' '.join(missing)}, and then the cell"
            )
            assert shown(cell).startswith(sentence)
            assert len(shown(cell).splitlines()) == 1 + is_inspection(cell)


@pytest.mark.models
def test_12_the_step_of_each_library_before_and_after(notebook):
    """The figures of each are those of its widget, and a checkpoint on the blocks saves their inputs and the error."""
    found = 0
    for before, after in itertools.pairwise(cell for cell in notebook.cells if cell.cell_type == "code"):
        if not before.source.startswith("%%remat -o before_") or without_its_library(notebook, before):
            continue
        found += 1
        figures = re.search(r": saved ([\d.]+) -> 16\.8 MB, peak ([\d.]+) -> ([\d.]+) MB, 50% of the", shown(after))
        for label, number in (("saved", figures[1]), ("peak", figures[2])):
            assert float(total(before, label).removesuffix(" MB")) == pytest.approx(float(number), rel=0.005)
        assert float(figures[3]) < 0.75 * float(figures[2])
    assert found == 4 or notebook is not KEPT


@pytest.mark.slow
def test_a_run_shows_what_is_kept(ran):
    """The whole text where the same JAX made it; else the function, its residuals and what they cost."""
    for old, new in zip(KEPT.cells, ran.cells, strict=True):
        assert old.source == new.source
        if made_by_this_jax() and not lacks(old.source):
            assert shown(new) == shown(old)
        elif is_inspection(old) and not lacks(old.source):
            assert report_of(new).splitlines()[0] == report_of(old).splitlines()[0]
            assert residual_count(new) == residual_count(old)
            assert total(new, "saved") == total(old, "saved")


@pytest.mark.parametrize("number", RESIDUALS)
def test_residuals(notebook, number):
    assert [residual_count(cell) for cell in inspections(notebook, number)] == RESIDUALS[number]


def test_1_no_checkpoint(notebook):
    (cell,) = inspections(notebook, 1)
    assert total(cell, "saved") == "116 B"
    made = Counter(re.search(r"intermediate (\w+)", row)[1] for row in rows(cell) if "intermediate" in row)
    assert made == {"cos": 3, "sin": 2}


def test_2_to_4_policies(notebook):
    (layers,), (dots,), (named,) = (inspections(notebook, number) for number in (2, 3, 4))
    assert [total(cell, "saved") for cell in (layers, dots, named)] == ["44 B", "72 B", "20 B"]
    assert not any("intermediate cos" in row for row in rows(layers))
    assert [operations(cell, "repeated") for cell in (layers, dots)] == [3, 2]
    assert re.search(r"f32\[5\] +intermediate sin named 'a'", rows(named)[0])
    assert "recomputed all the same" not in shown(named)  # what is repeated are other layers' sines


def test_7_the_peak_tells(notebook):
    plain, on_g, on_f, on_h = inspections(notebook, 7)
    megabytes = [float(total(cell, "peak").removesuffix(" MB")) for cell in (plain, on_g, on_f, on_h)]
    assert megabytes[1] < 0.75 * megabytes[0]
    assert min(megabytes[2], megabytes[3]) > 0.99 * megabytes[0]
    assert total(on_f, "saved") == "0 B"
    table = re.findall(r"^\| \D+ \| (\d+) \| (.+) \| .+ \| (.+) \|$", examples(KEPT)[7][-1].source, re.MULTILINE)
    assert table == [
        (str(residual_count(cell)), total(cell, "saved"), total(cell, "peak")) for cell in inspections(notebook, 7)
    ]


def test_8_to_10_names_of_arguments_and_values(notebook):
    (plain,), (dots,), (named,) = (inspections(notebook, number) for number in (8, 9, 10))
    for argument in ("params[0]", "params[1]", "params[2]", "x"):
        assert any(f"argument {argument} " in row for row in rows(plain)), argument
    products = [row for row in rows(dots) if "intermediate dot_general" in row]
    assert [("x2" in row, "W @ x" in row, "last @ x" in row) for row in products] == [
        (True, True, False),
        (False, False, True),
    ]
    for name in ("layer0_output", "layer1_output"):
        assert any(f"intermediate sin named '{name}'" in row for row in rows(named)), name


def test_11_a_stale_trace(notebook):
    part = examples(notebook)[11]
    assert re.findall(r"JAX lists (\d)", "\n".join(map(shown, part))) == ["5", "5", "6"]
    (cell,) = inspections(notebook, 11)
    assert "!  JAX still holds an older trace of loss" in report_of(cell)
    assert [row.split("named ")[1].split()[0] for row in rows(cell) if "intermediate" in row] == ["'layer0_output'"]
    assert "recomputed all the same" not in shown(cell)


def test_14_and_15_scans(notebook):
    _, scanned = inspections(notebook, 14)
    made = [row for row in rows(scanned) if "[8,4]" in row and "intermediate" in row]
    assert [re.search(r"intermediate (\w+)", row)[1] for row in made] == ["max", "gt"]
    assert all("in scan x8" in row for row in made)
    assert [total(cell, "saved") for cell in inspections(notebook, 15)] == ["256 B", "128 B"]
    assert "nothing_saveable at relu_layer" in report_of(inspections(notebook, 15)[1])


def test_17_offloading(notebook):
    by_name, dots = inspections(notebook, 17)
    assert [total(cell, "saved") for cell in (by_name, dots)] == ["0 B", "0 B"]
    assert [total(cell, "offloaded") for cell in (by_name, dots)] == ["8.19 kB", "16.4 kB"]
    assert "offloaded (host) sin named 'h'" in rows(by_name)[0]
    assert ["offloaded (host) dot_general" in row for row in rows(dots)] == [True, True, False, False]


def test_18_saved_and_repeated_all_the_same(notebook):
    after, before = inspections(notebook, 18)
    assert "'h' is saved, and its tanh is recomputed all the same" in report_of(after)
    assert "all the same" not in report_of(before)
    assert [total(cell, "saved") for cell in (after, before)] == ["16 B", "16 B"]
    assert operations(after, "repeated") > operations(before, "repeated")


def test_19_a_transformer(notebook):
    _, unrolled, scanned = inspections(notebook, 19)
    for cell, product in ((unrolled, "f32[8,1024,3072] x12"), (scanned, "f32[12,8,1024,3072]")):
        row = next(row for row in rows(cell) if product in row)
        assert re.search(r'intermediate dot_general In\[\d+\]:\d+ x @ p\["kernel"\] in (scan x12 / )?block', row)
        assert len(rows(cell)) < 30
    assert total(unrolled, "saved") == total(scanned, "saved")


def test_applying_the_choice(notebook):
    text = "\n".join(map(shown, examples(notebook)[0]))
    assert "`squared` now runs under dots_with_no_batch_dims_saveable" in text
    assert "`squared` now runs as it was written" in text
    assert text.count("equal: True") == 2
    assert "block x12" in text
