"""All policies side by side in JupyterLab: chosen in the picture and the table, sorted, measured, cancelled."""

import json
import re
from itertools import product

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.inspected import LOAD, Widget, focus, write_notebook
from tests.browser.lab import NotebookPage, Server
from tests.plot_records import xla_memory
from tests.pretend_compiler import NAMES
from tests.volume import usually

# Real arrays, so that it can be run; large enough for the policies to differ.
CELL = """\
%%remat -o w
import jax, jax.numpy as jnp

def layer(W, x):
    return jnp.sin(x @ W)

def loss(params, x):
    for W in params:
        x = layer(W, x)
    return jnp.sum(x)

loss([jnp.ones((64, 64))] * 3, jnp.ones((256, 64)))
"""


MESHED = """\
%%remat
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
spread = jax.ShapeDtypeStruct((256, 64), "float32", sharding=NamedSharding(mesh, P("data")))
loss([jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P()))] * 3, spread)
"""


@pytest.fixture(scope="module")
def opened(page_of_module: NotebookPage, lab: Server) -> NotebookPage:
    write_notebook(lab.folder / "compare.ipynb", LOAD, CELL, MESHED)
    page_of_module.open("compare.ipynb")
    page_of_module.run(0)
    return page_of_module


@pytest.fixture
def widget(opened: NotebookPage) -> Widget:
    """The widget with its Compare panel open."""
    opened.page.mouse.move(0, 0)
    opened.run(1)
    assert opened.errors() == []
    widget = Widget(opened, 1)
    widget.tab("Compare").click()
    expect(point(widget, "nothing_saveable")).to_be_visible()
    return widget


def point(widget: Widget, policy: str) -> Locator:
    return widget.part("comparison").locator(f'svg [data-policy="{policy}"]')


def policies(widget: Widget) -> list[str]:
    """The table's policies in the order shown."""
    return widget.part("comparison").locator("tbody tr [data-policy]").all_text_contents()


def test_a_click_on_a_point_sets_the_policy(widget: Widget) -> None:
    expect(widget.policy).to_have_value("as_written")
    point(widget, "nothing_saveable").click()
    expect(widget.policy).to_have_value("nothing_saveable")
    expect(point(widget, "nothing_saveable")).to_have_attribute("aria-pressed", "true")
    expect(widget.totals).to_contain_text("saved 0 B")
    row = widget.part("comparison").locator('tr[aria-current="true"]')
    expect(row).to_contain_text("nothing_saveable")


def test_the_slider_puts_plans_into_the_picture(widget: Widget) -> None:
    page = widget.notebook.page
    slider = widget.root.get_by_role("slider", name="Budget")
    expect(slider).to_be_visible()
    expect(slider).to_be_enabled(timeout=60_000)
    picture = widget.part("comparison").locator("svg")
    plans = picture.locator('[data-same*="plan("]')
    chosen = picture.locator('[aria-pressed="true"]')
    expect(plans).to_have_count(0)
    focus(slider)
    page.keyboard.press("ArrowLeft")
    expect(widget.policy).to_have_value(re.compile("^plan"))
    first = widget.policy.input_value()
    expect(plans).to_have_count(1)
    expect(chosen).to_have_attribute("data-same", first)
    page.keyboard.press("End")  # the focus has stayed on the slider
    expect(widget.policy).not_to_have_value(first)
    expect(chosen).not_to_have_attribute("data-same", first)
    expect(widget.part("comparison").locator('tr[aria-current="true"]')).to_have_count(1)
    plans.and_(page.locator(f'[data-same="{first}"]')).click()  # the one before has stayed to compare with
    expect(widget.policy).to_have_value(first)
    expect(chosen).to_have_attribute("data-same", first)
    widget.tab("Plan").click()
    expect(slider).to_be_visible()
    expect(slider).to_be_enabled()
    expect(widget.part("frontier").locator("[data-stop]")).not_to_have_count(0)


def test_the_keyboard_sets_it_too(widget: Widget) -> None:
    page = widget.notebook.page
    cells = widget.notebook.cell_count()
    focus(point(widget, "dots_saveable"))
    page.keyboard.press("Enter")
    expect(widget.policy).to_have_value("dots_saveable")
    expect(point(widget, "dots_saveable")).to_be_focused()
    button = widget.part("comparison").locator('button[data-policy="nothing_saveable"]')
    focus(button)
    page.keyboard.press("Space")
    expect(widget.policy).to_have_value("nothing_saveable")
    page.keyboard.type("dd")
    assert widget.notebook.cell_count() == cells


def test_the_table_sorts(widget: Widget) -> None:
    saved = widget.part("comparison").get_by_role("button", name="saved", exact=True)
    saved.click()
    ascending = policies(widget)
    # Of these three the one that recomputes all keeps least, and without a checkpoint most is kept.
    assert ascending[0] == "nothing_saveable"
    assert ascending.index("dots_saveable") < ascending.index("as_written")
    saved.click()
    descending = policies(widget)
    assert descending.index("as_written") < descending.index("dots_saveable") < descending.index("nothing_saveable")
    expect(saved.locator("xpath=..")).to_have_attribute("aria-sort", "descending")


def test_measuring_fills_the_table_while_the_kernel_works(widget: Widget) -> None:
    widget.root.get_by_label("Measure", exact=True).select_option("given")
    widget.root.get_by_role("button", name="Measure", exact=True).click()
    expect(widget.status).to_have_text(re.compile(r"^(\d+) of \1 measured\.$"), timeout=300_000)
    table = widget.part("comparison").locator("table")
    expect(table).to_contain_text("measured, on cpu")
    for column in ("temporaries", "run", "compile"):
        expect(table.get_by_role("button", name=column, exact=True)).to_be_visible()
    expect(widget.root.get_by_role("button", name="Cancel")).to_be_hidden()


# What can be seen at the moment when the button to cancel appears: a machine that is late finds it gone again.
_WATCH = """(root, others) => {
  const cancel = root.querySelector('[data-action="cancel"]');
  root.boxes = () => others.map(element => { const { x, y } = element.getBoundingClientRect(); return [x, y] });
  root.seen = [];
  new MutationObserver(() => {
    if (!cancel.hidden) root.seen.push({ focused: document.activeElement === cancel, boxes: root.boxes() });
  }).observe(cancel, { attributeFilter: ["hidden"] });
  return root.boxes();
}"""


def test_nothing_slides_under_the_pointer_while_it_measures(widget: Widget) -> None:
    """The other buttons stay where they are, and the keyboard finds what it was on."""
    others = [
        widget.root.get_by_role("button", name="Check gradients"),
        widget.root.get_by_role("button", name="Try all places"),
        widget.root.get_by_role("slider", name="Budget"),
    ]
    measure = widget.root.get_by_role("button", name="Measure", exact=True)
    expect(others[-1]).to_be_enabled(timeout=60_000)
    focus(measure)
    before = widget.root.evaluate(_WATCH, [control.element_handle() for control in others])
    widget.notebook.page.keyboard.press("Enter")
    expect(widget.status).to_have_text(re.compile(r"^(\d+) of \1 measured\.$"), timeout=300_000)
    expect(widget.root.get_by_role("button", name="Cancel")).to_be_hidden()
    expect(measure).to_be_focused()
    assert widget.root.evaluate("root => root.seen") == [{"focused": True, "boxes": before}]
    assert widget.root.evaluate("root => root.boxes()") == before


@pytest.mark.parametrize("widths", usually([(720, 2000), (1100, 1650)], (720, 2000)))  # the picture below, and beside
def test_every_column_can_be_read(widget: Widget, widths: tuple[int, int]) -> None:
    """Beside the picture where there is room for both, else below it; nothing scrolls in what scrolls."""
    page = widget.notebook.page
    try:
        for measured, width in product((False, True), widths):
            page.set_viewport_size({"width": width, "height": 1000})
            if measured and width == widths[0]:
                widget.root.get_by_role("button", name="Measure", exact=True).click()
                expect(widget.status).to_have_text(re.compile(r"^(\d+) of \1 measured\.$"), timeout=300_000)
            table = widget.part("comparison").locator(".remat-compare")
            expect(table.locator("table")).to_contain_text("measured" if measured else "estimated")
            expect(table).to_have_css("overflow-x", "visible")  # which may be replaced meanwhile
            panel = widget.part("comparison").locator("xpath=ancestor::*[contains(@class, 'remat-panel')][1]")
            page.wait_for_function("e => e.scrollWidth - e.clientWidth <= 1", arg=panel.element_handle())
    finally:
        page.set_viewport_size({"width": 1400, "height": 1000})


def test_places_are_tried_and_chosen(widget: Widget) -> None:
    """By the keyboard in the table, and by a click in the picture."""
    page = widget.notebook.page
    widget.root.get_by_role("button", name="Try all places").click()
    expect(widget.status).to_have_text(re.compile(r"^(\d+) of \1 tried\.$"), timeout=300_000)
    places = widget.part("places")
    row = places.locator('tbody button[data-policy="nothing_saveable"][data-at="layer"]')
    focus(row)
    page.keyboard.press("Enter")
    expect(widget.policy).to_have_value("nothing_saveable")
    expect(widget.at).to_have_value("layer")
    expect(row).to_be_focused()
    expect(places.locator('tr[aria-current="true"]')).to_contain_text("nothing_saveable at layer")
    places.locator('svg [data-policy="none"][data-at="function"] path').click()  # a label may stand far off
    expect(widget.policy).to_have_value("none")
    expect(widget.at).to_have_value("function")
    expect(places.locator('[aria-pressed="true"]')).to_have_attribute("data-at", "function")


def test_estimates_follow_the_device(widget: Widget) -> None:
    widget.root.get_by_label("Device", exact=True).select_option("TPU v5e")
    expect(widget.part("comparison")).to_contain_text("estimated, for TPU v5e")
    # At the top, wherever one is: whether it fits, or what would tell.
    expect(widget.part("fits")).to_contain_text(re.compile(r"pip install 'remat_magic\[tpu\]'|fits TPU v5e"))
    assert (
        widget.notebook.page.evaluate("() => localStorage.getItem('remat_magic-device')") == "TPU v5e"
    )  # and next time
    widget.root.get_by_label("Device", exact=True).select_option("this machine")
    expect(widget.part("fits")).to_be_empty()


def test_several_devices_are_offered_for_a_mesh_and_one_is_chosen_where_there_is_none(widget: Widget) -> None:
    notebook = widget.notebook
    widget.root.get_by_label("Device", exact=True).select_option("TPU v5e")
    notebook.run(2)
    meshed = Widget(notebook, 2)
    meshed.tab("Compare").click()
    device = meshed.root.get_by_label("Device", exact=True)
    expect(device).to_have_value("TPU v5e")  # as chosen before
    device.select_option("TPU v5e:2x4")
    expect(meshed.part("comparison")).to_contain_text("estimated, for TPU v5e:2x4, of one of 8 devices")
    expect(meshed.part("fits")).to_contain_text(re.compile(r"pip install 'remat_magic\[tpu\]'|fits TPU v5e:2x4"))
    expect(meshed.part("peak")).to_contain_text("left of TPU v5e:2x4")
    notebook.run(2)
    expect(Widget(notebook, 2).root.get_by_label("Device", exact=True)).to_have_value("TPU v5e:2x4")
    notebook.run(1)  # which is on no mesh
    alone = Widget(notebook, 1).root.get_by_label("Device", exact=True)
    expect(alone).to_have_value("TPU v5e")
    Widget(notebook, 1).tab("Compare").click()
    alone.select_option("this machine")


def test_memory_over_time_follows_the_policy(widget: Widget) -> None:
    widget.tab("Memory").click()
    expect(widget.part("memory")).to_contain_text("Held at the peak")
    before = widget.part("memory").locator("caption").text_content()
    widget.policy.select_option("nothing_saveable")
    expect(widget.part("memory").locator("caption")).not_to_have_text(before or "")


def test_what_is_held_follows_the_pointer_and_the_keys(widget: Widget) -> None:
    """Until they leave; an entry leads to its row, and a comparison is drawn over the picture."""
    widget.unfold()
    widget.root.get_by_label("vs", exact=True).select_option("nothing_saveable")
    widget.tab("Memory").click()
    part = widget.part("memory")
    expect(part).to_contain_text("A: nothing_saveable, peak")
    caption, slider = part.locator("caption"), part.get_by_role("slider")
    expect(caption).to_contain_text("Held at the peak")
    slider.hover(position={"x": 100, "y": 150})
    expect(caption).to_contain_text(re.compile(r"Held at moment \d+ of \d+, forward, .* by estimate; A holds"))
    widget.tab("Memory").hover()
    expect(caption).to_contain_text("Held at the peak")
    focus(slider)
    ticks = part.locator(".remat-ticks")
    before = ticks.text_content() or ""
    for key in ("Home", "+", "ArrowRight"):
        widget.notebook.page.keyboard.press(key)
    expect(caption).to_contain_text("Held at moment 2 of")
    expect(slider).to_have_attribute("aria-valuenow", "2")
    expect(ticks).not_to_have_text(before)
    widget.notebook.page.keyboard.press("Escape")
    expect(caption).to_contain_text("Held at the peak")
    part.locator("tr", has_text="residual").get_by_role("button").first.click()
    expect(widget.tab("Residuals")).to_have_attribute("aria-selected", "true")
    chip = widget.root.get_by_role("button", name="show all again")
    chip.click()
    widget.root.get_by_label("vs", exact=True).select_option("")


def test_advice_follows_the_policy(widget: Widget) -> None:
    widget.tab("Advice").click()
    expect(widget.part("advice")).not_to_be_empty()
    widget.policy.select_option("nothing_saveable")
    expect(widget.part("advice")).to_contain_text("recomputes everything")
    widget.tab("Memory").click()
    expect(widget.part("memory")).to_contain_text("Held at the peak")


def test_the_page_logs_no_error(widget: Widget) -> None:
    widget.root.get_by_role("button", name="Check gradients").click()
    expect(widget.part("gradients")).to_contain_text("Largest difference", timeout=300_000)
    assert widget.notebook.complaints() == []


# A compiler that says at once what a test wants it to say.
def test_pictures_are_drawn_for_the_width_that_there_is(widget: Widget) -> None:
    """Also where that changes while they are looked at, or while another tab is."""
    page = widget.notebook.page

    def fits(part: str) -> None:
        page.wait_for_function(
            "([root, part]) => root.querySelector(`[data-part=${part}] svg`)?.viewBox.baseVal.width"
            " === root.querySelector('.remat-body').clientWidth",
            arg=[widget.root.element_handle(), part],
        )

    widget.root.get_by_role("button", name="Try all places").click()
    expect(widget.status).to_have_text(re.compile(r"^(\d+) of \1 tried\.$"), timeout=300_000)
    said = widget.status.text_content() or ""
    order = policies(widget)
    widget.part("comparison").get_by_role("button", name="saved", exact=True).click()
    sorted_order = policies(widget)
    assert sorted_order != order
    try:
        page.set_viewport_size({"width": 1100, "height": 1000})
        fits("comparison")
        fits("places")
        expect(widget.status).to_have_text(said)
        assert policies(widget) == sorted_order
        widget.tab("Plan").click()
        slider = widget.root.get_by_role("slider", name="Budget")
        expect(slider).to_be_enabled(timeout=60_000)
        slider.press("ArrowLeft")
        expect(widget.policy).to_have_value(re.compile("^plan"))
        place, text = slider.input_value(), widget.part("stop").text_content() or ""
        page.set_viewport_size({"width": 1250, "height": 1000})
        fits("frontier")
        assert slider.input_value() == place
        expect(widget.part("stop")).to_have_text(text)
        widget.tab("Compare").click()
        fits("comparison")
    finally:
        page.set_viewport_size({"width": 1400, "height": 1000})


# A picture's own width and that of what it stands in, what stands beside it, and what can be scrolled sideways in that.
BESIDE = """(body, [picture, table]) => {
  const [one, other] = [picture, table].map(selector => body.querySelector(selector));
  const [all, left, right] = [body, one, other].map(element => element?.getBoundingClientRect());
  return { drawn: one?.querySelector("svg")?.viewBox.baseVal.width, room: left?.width, apart: right?.left - left?.right,
    unused: left?.left - all.left + all.right - right?.right, cut: other?.scrollWidth - other?.clientWidth };
}"""


def test_in_a_wide_window_pictures_use_what_their_tables_leave(widget: Widget) -> None:
    page = widget.notebook.page
    page.set_viewport_size({"width": 2200, "height": 1000})
    try:
        expect(widget.part("comparison").locator("svg")).to_be_visible(timeout=60_000)
        beside_one_another(widget, "[data-part=comparison] .remat-picture", "[data-part=comparison] .remat-compare")
        widget.tab("Plan").click()
        slider = widget.root.get_by_role("slider", name="Budget")
        expect(slider).to_be_enabled(timeout=60_000)
        slider.press("ArrowLeft")
        expect(widget.part("planned")).not_to_be_empty()
        beside_one_another(widget, "[data-part=frontier]", "[data-part=planned]")
    finally:
        page.set_viewport_size({"width": 1400, "height": 1000})


def beside_one_another(widget: Widget, *selectors: str) -> None:
    """Wait until a picture is drawn for its room, which is all that its table leaves."""
    body = widget.root.locator(".remat-body")
    waits = 100
    while (laid := body.evaluate(BESIDE, selectors))["drawn"] != pytest.approx(laid["room"], abs=8) and waits:
        waits -= 1
        widget.notebook.page.wait_for_timeout(200)
    assert laid["drawn"] == pytest.approx(laid["room"], abs=8)
    assert laid["drawn"] > 700
    assert 0 < laid["apart"] < 40
    assert abs(laid["unused"]) < 20
    assert laid["cut"] <= 1


# The last one, since it opens another notebook in the same page.
PRETEND = """\
import json, os, pathlib, stat, sys, tempfile
from remat_magic import devices
os.environ["REMAT_MAGIC_CACHE"] = tempfile.mkdtemp()
answer = json.loads({answer!r})
compiler = pathlib.Path(tempfile.mkdtemp(), "compiler")
compiler.write_text(
    f"#!{{sys.executable}}\\nimport pathlib, sys\\n"
    f"(pathlib.Path(sys.argv[-1]) / 'answer.json').write_text({{json.dumps(answer)!r}})\\n"
)
compiler.chmod(0o755)
devices.device._is_installed = lambda module: True
sys.executable = str(compiler)
"""


def test_xlas_memory_over_time_appears_over_the_estimate(page_of_module: NotebookPage, lab: Server) -> None:
    sizes = dict.fromkeys(NAMES, 1000) | {"alias": 3}
    answer = {"memory": sizes, "seconds": 1.5, "rematerialized": 0, "timeline": xla_memory().to_dict()}
    pretend = PRETEND.format(answer=json.dumps(answer))
    write_notebook(lab.folder / "compiled.ipynb", pretend, LOAD, CELL)
    page_of_module.open("compiled.ipynb")
    page_of_module.run_all()
    assert page_of_module.errors() == []
    widget = Widget(page_of_module, 2)
    widget.policy.select_option("nothing_saveable")
    expect(widget.totals).to_contain_text("saved 0 B")
    expect(widget.root).to_have_attribute("aria-busy", "false")
    widget.policy.select_option(index=0)
    expect(widget.totals).not_to_contain_text("saved 0 B")
    widget.tab("Memory").click()
    expect(widget.part("memory")).to_contain_text("Held at the peak")
    expect(widget.part("memory")).not_to_contain_text("XLA for")
    widget.tab("Compare").click()
    widget.root.get_by_label("Device", exact=True).select_option("H100 SXM")
    expect(widget.part("fits")).to_contain_text("fits H100 SXM")
    widget.tab("Memory").click()
    picture = widget.part("memory").locator("svg")
    expect(picture).to_contain_text("XLA for H100 SXM")
    expect(picture.locator("path.remat-xla")).to_be_visible()
    expect(widget.part("memory").locator("caption").last).to_contain_text("program for H100 SXM 4.10 kB")
    # Another choice is compiled in its turn; also one whose view is known, which is shown twice: the browser's copy at
    # once, and the kernel's soon after.
    widget.policy.select_option("nothing_saveable")
    expect(widget.totals).to_contain_text("saved 0 B")
    expect(widget.part("memory").locator("svg")).to_contain_text("XLA for H100 SXM")
    widget.tab("Compare").click()
    widget.root.get_by_label("Device", exact=True).select_option("this machine")
