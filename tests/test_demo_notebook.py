"""demo.ipynb and the notebooks of docs/ run, show what is kept in them, and that is what they are there for."""

import html
import itertools
import json
import re
import subprocess
import sys

import jax
import nbformat
import pytest

from tests.make_demo import DEMO, NOTEBOOKS, WIDGET, lacks

KEPT = {path.name: nbformat.read(path, as_version=4) for path in NOTEBOOKS}

_PRODUCT = r"dot_general in"
_LAYERS = [r"argument params\[0\] ", r"argument params\[1\] ", r"argument params\[2\] ", "argument x "]
# Of each inspection below a heading, in the order of its cells: how many residuals it has, and what its page says, as
# regular expressions; "not " is before what it must not say. That the figures are JAX's, tests/test_examples.py tells.
EXAMPLES = {
    "Example 1": [(9, "Saves 116 B 5 values", r"(\] cos in .*){3}", r"(\] sin in .*){2}")],
    "Example 2": [(6, "Saves 44 B", "repeats 184 FLOPs", r"not \] cos in")],  # three products
    "Example 3": [(7, "Saves 72 B", "repeats 11 FLOPs")],
    # What is repeated of it are other layers' sines.
    "Example 4": [(5, "Saves 20 B", r"f32\[5\] sin named a ", "not recomputed all the same")],
    "Example 6": [(8, "Saves 1.31 MB")],
    "Example 7": [(9, *_LAYERS), (8, rf"f32\[4\] x2 {_PRODUCT} W @ x", rf"f32\[4\] {_PRODUCT} last @ x")],
    "Example 8": [(4, "Saves 12 B"), (5, "Saves 16 B")],
    "Example 9": [(4, "Saves 256 B"), (3, "Saves 128 B", "Policy nothing_saveable at relu_layer")],
    "Example 10": [(7,)],
    "Two ways to differentiate a sine": [(1, r"\] cos in"), (1, "argument x ")],
    "Names": [(9, "sin named layer0_output", "sin named layer1_output")],
    "A helper that was redefined": [(6, "JAX still holds an older trace of loss", "Saves 16 B 1 value",
                                     "sin named layer0_output", "not recomputed all the same")],
    "A loop, and the same as a scan": [
        (32, r"f32\[4\] x7 max in", r"bool\[4\] x8 gt in"),
        (4, r"f32\[8,4\] max in .* scan x8", r"bool\[8,4\] gt in .* scan x8")],
    "To another memory, and back": [(3, "Saves 0 B, offloads 8.19 kB", r"offloaded \(host\) sin named h "),
                                    (4, "Saves 0 B, offloads 16.4 kB", r"(offloaded \(host\) dot_general .*){2}")],
    "Saved, and computed again all the same": [
        (3, "Saves 16 B", "repeats 68 FLOPs", "'h' is saved, and its tanh is recomputed all the same"),
        (3, "Saves 16 B", "repeats 36 FLOPs", "not all the same")],
    "A transformer of the size of GPT-2": [
        (150, "Policy as_written"),
        (186, rf'1.21 GB 27% f32\[8,1024,3072\] x12 {_PRODUCT} x @ p\["kernel"\] , line 10 , block'),
        (21, rf'1.21 GB 27% f32\[12,8,1024,3072\] {_PRODUCT} x @ p\["kernel"\] , line 10 , scan x12 / block')],
}  # fmt: skip


def is_inspection(cell):
    return cell.cell_type == "code" and cell.source.startswith("%%remat")


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


def parts(notebooks):
    """The cells of all notebooks by the heading that they are under, without what follows a colon in it."""
    found = {}
    for notebook in notebooks.values():
        heading = ""
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                heading = (re.findall(r"^#+ ([^:\n]*)", cell.source, re.MULTILINE) or [heading])[-1]
            found.setdefault(heading, []).append(cell)
    return found


def inspections(notebooks, heading):
    return [cell for cell in parts(notebooks)[heading] if is_inspection(cell)]


def figure(cell, pattern):
    return re.search(pattern, report_of(cell))[1]


@pytest.fixture(scope="module")
def ran(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    # In a process of its own: nbclient leaves sockets open, and pytest takes their warnings for failures.
    command = [sys.executable, str(root / "tests" / "make_demo.py"), "--run-to", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return {name: nbformat.read(folder / name, as_version=4) for name in KEPT if (folder / name).exists()}


@pytest.fixture(params=["kept", pytest.param("ran", marks=pytest.mark.slow)])
def notebooks(request):
    return KEPT if request.param == "kept" else request.getfixturevalue("ran")


# ------------------------------------------------------------------------------------------------------ the file itself


@pytest.mark.parametrize("name", KEPT)
def test_the_file_is_valid_small_and_clean(name):
    notebook = KEPT[name]
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "remat_magic"}
    assert all(not cell.metadata for cell in notebook.cells)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    text = json.dumps(notebook.cells)  # nothing of the machine that made it
    for trace in ("ipykernel", "site-packages", r"\b0x[0-9a-f]{6,}", r"(?<![\w.<])/(home|root|tmp|work|usr|opt|var)/"):
        assert not re.search(trace, text), trace


def test_the_demo_is_short():
    assert DEMO.stat().st_size < 1_000_000
    assert len(KEPT[DEMO.name].cells) <= 50


@pytest.mark.parametrize("name", KEPT)
def test_every_inspection_is_announced(name):
    """A sentence is before it, and after the last one."""
    kinds = ["inspection" if is_inspection(cell) else cell.cell_type for cell in KEPT[name].cells]
    assert ("code", "inspection") not in itertools.pairwise(kinds)
    assert ("inspection", "inspection") not in itertools.pairwise(kinds)
    assert kinds[-1] == "markdown"


@pytest.mark.parametrize("name", KEPT)
def test_the_numbers_in_the_prose_are_shown_by_cells(name):
    """Every size and every share in the text stands in an output below the same heading, or before it."""
    before = ""
    for part in parts({name: KEPT[name]}).values():
        before += re.sub(" +", " ", "\n".join(map(shown, part)))
        for cell in part:
            if cell.cell_type == "markdown":
                for number in re.findall(r"(?<![\w.])\d[\d.,]* (?:B|kB|MB|GB|FLOPs)\b|\d+%", cell.source):
                    assert number in before or number in NOT_SHOWN, f"{number} in {cell.source!r}"


# In the prose, and a difference of two numbers that are shown.
NOT_SHOWN = {"2.41 GB"}


# ------------------------------------------------------------------------------------------ what is shown, kept and now


def test_no_cell_fails_and_each_inspection_has_a_report_that_needs_no_kernel(notebooks):
    cells = [cell for notebook in notebooks.values() for cell in notebook.cells]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    inspected = [cell for cell in cells if is_inspection(cell)]
    assert len(inspected) >= 25
    for cell in inspected:
        static = cell.outputs[0].data
        assert static["text/html"].startswith('<div class="remat remat-static"')
        assert static["text/plain"].strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_a_run_shows_what_is_kept_and_widgets(ran, name):
    """The whole text where the same JAX made it."""
    kept = KEPT[name]
    if name not in ran:
        pytest.skip(f"{', '.join(lacks(kept))} are not installed: pip install '.[models]'")
    same = kept.metadata.remat_magic.jax == jax.__version__ and not getattr(jax.config, "jax_remat3", False)
    for old, new in zip(kept.cells, ran[name].cells, strict=True):
        assert old.source == new.source
        assert not same or shown(new) == shown(old)
        widgets = any(WIDGET in output.get("data", {}) for output in new.get("outputs", []))
        assert widgets == is_inspection(new)


def test_the_step_of_each_library_before_and_after():
    """The figures of each are those of its widget, and a checkpoint on the blocks saves their inputs and the error."""
    cells = [cell for cell in KEPT["libraries.ipynb"].cells if cell.cell_type == "code"]
    pairs = [pair for pair in itertools.pairwise(cells) if pair[0].source.startswith("%%remat -o before_")]
    assert len(pairs) == 4
    for before, after in pairs:
        figures = re.search(r": saved ([\d.]+) -> 16\.8 MB, peak ([\d.]+) -> ([\d.]+) MB, 50% of the", shown(after))
        for label, number in (("saved", figures[1]), ("peak", figures[2])):
            assert float(figure(before, rf" {label} ([\d.]+) MB")) == pytest.approx(float(number), rel=0.005)
        assert float(figures[3]) < 0.75 * float(figures[2])


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_shows_what_it_is_there_for(notebooks, heading):
    cells = inspections(notebooks, heading)
    for cell, (residuals, *patterns) in zip(cells, EXAMPLES[heading], strict=True):
        text = page_of(cell)
        assert residuals_of(cell) == residuals
        for pattern in patterns:
            wanted = not pattern.startswith("not ")
            assert bool(re.search(pattern.removeprefix("not "), text)) == wanted, pattern


def test_the_story_goes_from_what_does_not_fit_to_what_does(notebooks):
    first, *between, last, _asserted = [
        cell for cell in parts(notebooks)["1. A step that does not fit"] if cell.cell_type == "code"
    ]
    assert "DOES NOT FIT" in shown(first)
    assert "FITS" in shown(last)
    assert "NOT" not in shown(last)
    assert re.search(r"fits: True .*checkpoint", shown(between[0]))
    assert "traced as it would be written: True" in shown(between[1])
    added = [line[1:] for line in shown(between[1]).splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert all(line in last.source for line in added)


def test_the_peak_tells(notebooks):
    text = "\n".join(map(shown, parts(notebooks)["Example 6"]))
    plain, on_f, on_g, on_h = map(float, re.findall(r"peak ([\d.]+) MB, repeated", text))
    assert on_g < 0.75 * plain
    assert min(on_f, on_h) > 0.99 * plain


def test_what_the_other_cells_print(notebooks):
    of = parts(notebooks)
    assert re.findall(r"JAX lists (\d)", "\n".join(map(shown, of["A helper that was redefined"]))) == ["5", "5", "6"]
    text = "\n".join(map(shown, of["Example 10"]))
    assert text.count("  equal") == 6
    assert "equal: True" in text
    fits = re.findall(
        r"^(\w[\w ]*?)  +.* (True|None|False) ", "\n".join(map(shown, of["One step on many accelerators"])), re.M
    )
    assert {"True", "None"} <= {fit for _, fit in fits}
    assert len(fits) == 10
    assert "8 devices, of each: saved  1.57 MB" in "\n".join(map(shown, of["Automatic sharding"]))
