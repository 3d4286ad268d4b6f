"""demo.ipynb runs, shows what is kept in it, and what it shows is what the examples are there for."""

import html
import itertools
import json
import re
import subprocess
import sys

import jax
import nbformat
import pytest

from tests.make_demo import DEMO, WIDGET, lacks

KEPT = nbformat.read(DEMO, as_version=4)

_PRODUCT = r"dot_general in"
_LAYERS = [r"argument params\[0\] ", r"argument params\[1\] ", r"argument params\[2\] ", "argument x "]
# Of each inspection of an example, in the order of its cells: how many residuals it has, and what its page says, as
# regular expressions; "not " is before what it must not say. That the figures are JAX's, tests/test_examples.py tells.
EXAMPLES = {
    1: [(9, "Saves 116 B 5 values", r"(\] cos in .*){3}", r"(\] sin in .*){2}")],
    2: [(6, "Saves 44 B", "repeats 184 FLOPs", r"not \] cos in")],  # three products
    3: [(7, "Saves 72 B", "repeats 11 FLOPs")],
    # What is repeated of it are other layers' sines.
    4: [(5, "Saves 20 B", r"f32\[5\] sin named a ", "not recomputed all the same")],
    5: [(7,)],  # example 3 again
    6: [(1, r"\] cos in"), (1, "argument x ")],
    7: [(15, "Saves 3.15 MB"), (8, "Saves 1.31 MB"), (3, "Saves 0 B"), (11, "Saves 2.10 MB")],
    8: [(9, *_LAYERS)],
    9: [(8, rf"f32\[4\] x2 {_PRODUCT} W @ x", rf"f32\[4\] {_PRODUCT} last @ x")],
    10: [(9, "sin named layer0_output", "sin named layer1_output")],
    11: [(6, "JAX still holds an older trace of loss", "Saves 16 B 1 value", "sin named layer0_output",
          "not recomputed all the same")],
    12: [(8, r"f32\[\] x8 cos in"), (16, r"f32\[\] x16 cos in")],
    13: [(4, "Saves 12 B"), (5, "Saves 16 B")],
    14: [(32, r"f32\[4\] x7 max in", r"bool\[4\] x8 gt in"),
         (4, r"f32\[8,4\] max in .* scan x8", r"bool\[8,4\] gt in .* scan x8")],
    15: [(4, "Saves 256 B"), (3, "Saves 128 B", "Policy nothing_saveable at relu_layer")],
    16: [(7,)],
    17: [(3, "Saves 0 B, offloads 8.19 kB", r"offloaded \(host\) sin named h "),
         (4, "Saves 0 B, offloads 16.4 kB", r"(offloaded \(host\) dot_general .*){2}")],
    18: [(3, "Saves 16 B", "repeats 68 FLOPs", "'h' is saved, and its tanh is recomputed all the same"),
         (3, "Saves 16 B", "repeats 36 FLOPs", "not all the same")],
    19: [(150, "Policy as_written"),
         (186, rf'1.21 GB 27% f32\[8,1024,3072\] x12 {_PRODUCT} x @ p\["kernel"\] , line 10 , block'),
         (21, rf'1.21 GB 27% f32\[12,8,1024,3072\] {_PRODUCT} x @ p\["kernel"\] , line 10 , scan x12 / block')],
}  # fmt: skip


def is_inspection(cell):
    return cell.cell_type == "code" and cell.source.startswith("%%remat")


def is_left_out(notebook, cell):
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


def page_of(cell):
    """The words of an inspection's static page on one line."""
    page = next(output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {}))
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def residuals_of(cell):
    """How many residuals a page tells of: those that are saved, and those that take no memory."""
    page = page_of(cell)
    saved = re.findall(r"(\d+) values? for the backward pass", page)
    others = re.findall(r"(?:arguments|unread|constants) \S+ \w+ (\d+) values?", page)
    return sum(map(int, saved + others))


def report_of(cell):
    """The text of an inspection's static output, its lines and columns joined."""
    return " ".join(next(texts(cell)).split())


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


def figure(cell, pattern):
    return re.search(pattern, report_of(cell))[1]


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
    text = json.dumps(KEPT.cells)  # nothing of the machine that made it
    for trace in ("ipykernel", "site-packages", r"\b0x[0-9a-f]{6,}", r"(?<![\w.<])/(home|root|tmp|work|usr|opt|var)/"):
        assert not re.search(trace, text), trace


def test_every_inspection_is_announced_and_explained():
    """A sentence before it; the numbers after it, or after the next one of the same example."""
    kinds = ["inspection" if is_inspection(cell) else cell.cell_type for cell in KEPT.cells]
    assert ("code", "inspection") not in itertools.pairwise(kinds)
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


def test_no_cell_fails_and_each_inspection_has_a_report_that_needs_no_kernel(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    inspected = [cell for cell in notebook.cells if is_inspection(cell) and not is_left_out(notebook, cell)]
    assert len(inspected) >= 30
    for cell in inspected:
        static = cell.outputs[0].data
        assert static["text/html"].startswith('<div class="remat remat-static"')
        assert static["text/plain"].strip()


@pytest.mark.slow
def test_a_run_shows_what_is_kept_and_widgets(ran):
    """The whole text where the same JAX made it; without its library, a cell says what to install."""
    same = KEPT.metadata.remat_magic.jax == jax.__version__ and not getattr(jax.config, "jax_remat3", False)
    for old, new in zip(KEPT.cells, ran.cells, strict=True):
        assert old.source == new.source
        missing = lacks(old.source)
        if missing:
            libraries = " ".join(missing)
            needs = f"This cell needs {' and '.join(missing)}: run %pip install {libraries}, and then the cell"
            assert shown(new).startswith(needs)
            assert len(shown(new).splitlines()) == 1 + is_inspection(new)
        else:
            assert not same or shown(new) == shown(old)
        widgets = any(WIDGET in output.get("data", {}) for output in new.get("outputs", []))
        assert widgets == (is_inspection(new) and not missing)


@pytest.mark.models
def test_12_the_step_of_each_library_before_and_after(notebook):
    """The figures of each are those of its widget, and a checkpoint on the blocks saves their inputs and the error."""
    found = 0
    for before, after in itertools.pairwise(cell for cell in notebook.cells if cell.cell_type == "code"):
        if not before.source.startswith("%%remat -o before_") or is_left_out(notebook, before):
            continue
        found += 1
        figures = re.search(r": saved ([\d.]+) -> 16\.8 MB, peak ([\d.]+) -> ([\d.]+) MB, 50% of the", shown(after))
        for label, number in (("saved", figures[1]), ("peak", figures[2])):
            assert float(figure(before, rf" {label} ([\d.]+) MB")) == pytest.approx(float(number), rel=0.005)
        assert float(figures[3]) < 0.75 * float(figures[2])
    assert found == 4 or notebook is not KEPT


@pytest.mark.parametrize("number", EXAMPLES)
def test_an_example_shows_what_it_is_there_for(notebook, number):
    cells = inspections(notebook, number)
    for cell, (residuals, *patterns) in zip(cells, EXAMPLES[number], strict=True):
        text = page_of(cell)
        assert residuals_of(cell) == residuals
        for pattern in patterns:
            wanted = not pattern.startswith("not ")
            assert bool(re.search(pattern.removeprefix("not "), text)) == wanted, pattern


def test_7_the_peak_tells(notebook):
    cells = inspections(notebook, 7)
    plain, on_g, on_f, on_h = (float(figure(cell, r" peak ([\d.]+) MB")) for cell in cells)
    assert on_g < 0.75 * plain
    assert min(on_f, on_h) > 0.99 * plain
    table = re.findall(r"^\| \D+ \| (\d+) \| (.+) \| .+ \| (.+) \|$", examples(KEPT)[7][-1].source, re.MULTILINE)
    patterns = r" saved (\S+ \w+)", r" peak (\S+ \w+)"
    figures = [tuple(figure(cell, pattern) for pattern in patterns) for cell in cells]
    assert table == [(str(residuals_of(cell)), *each) for cell, each in zip(cells, figures, strict=True)]


def test_what_the_other_cells_print(notebook):
    assert re.findall(r"JAX lists (\d)", "\n".join(map(shown, examples(notebook)[11]))) == ["5", "5", "6"]
    text = "\n".join(map(shown, examples(notebook)[0]))
    assert "`squared` now runs under dots_with_no_batch_dims_saveable" in text
    assert "`squared` now runs as it was written" in text
    assert text.count("equal: True") == 2
    assert "block x12" in text
