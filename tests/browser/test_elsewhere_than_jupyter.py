"""The live widget beside what is kept with the notebook, in documents as VS Code and Colab make them."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import remat_magic as rm
from tests.browser.alone import hear, sent, show_alone

pytestmark = pytest.mark.slow

# One document for the outputs of all cells, each output in two elements that are placed by hand.
VS_CODE = """
<div id="container" class="widgetarea">
  <div></div><div class="cell_container" id="one"><div class="output_container"><div class="output" id="a">{other}</div>
  </div></div><div></div>
  <div></div><div class="cell_container" id="two">
  <div class="output_container"><div class="output kept">{kept}</div></div>
  <div class="output_container"><div class="output live"></div></div></div><div></div>
</div>"""
# A document of each cell.
COLAB = """
<div id="output-area"><span id="output-header"></span><div id="output-body">
  <div class="display_data output-id-1"><div class="output_subarea output_html rendered_html">{other}</div></div>
  <div class="display_data output-id-2"><div class="output_subarea output_html rendered_html kept">{kept}</div></div>
  <div class="display_data output-id-3"><div class="output_subarea output_widget_view live"></div></div>
</div></div>"""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context() as context:
        yield context.new_page()


def kept_as(report: rm.Report) -> str:
    """What is kept of the widget with such a report."""
    return report._repr_html_().replace('class="remat remat-static"', 'class="remat remat-static" data-copy="its own"')


def kept_in(page: Page, text: str) -> Locator:
    return page.locator(".remat-static", has_text=text)


def shown_in(page: Page, document: str, trace: rm.Trace) -> None:
    """Another report, what is kept of the widget, and the widget, in a document."""
    kept, other = kept_as(trace.report("dots_saveable")), trace.report("nothing_saveable")._repr_html_()
    show_alone(page, trace, document.format(kept=kept, other=other), "dots_saveable")


@pytest.mark.parametrize("document", [VS_CODE, COLAB], ids=["VS Code", "Colab"])
def test_what_is_kept_gives_way_to_the_live_widget(page: Page, trace: rm.Trace, document: str) -> None:
    shown_in(page, document, trace)
    kept, other = page.locator(".kept"), kept_in(page, "nothing_saveable").first
    expect(kept.locator(".remat-static")).to_be_visible()  # until a kernel has answered
    expect(page.locator(".remat-widget")).to_be_hidden()
    hear(page, type="hello")
    expect(page.locator(".remat-widget")).to_be_visible()
    expect(kept.locator(".remat-static")).to_be_hidden()
    expect(other).to_be_visible()  # what was shown before is no part of it
    # The kernel replaces it as it learns more.
    newer = kept_as(trace.report("everything_saveable"))
    kept.evaluate("(kept, newer) => { kept.innerHTML = newer }", newer)
    expect(kept.locator(".remat-static")).to_contain_text("everything_saveable")
    expect(kept.locator(".remat-static")).to_be_hidden()
    page.evaluate("() => removed()")
    expect(kept.locator(".remat-static")).to_be_visible()


def test_a_view_that_was_lost_is_asked_for(page: Page, trace: rm.Trace) -> None:
    show_alone(page, trace)
    hear(page, type="hello", newest={"policy": "as_written", "complete": True})
    assert sent(page, "lost") == []
    hear(page, type="hello", newest={"policy": "dots_saveable", "complete": True})
    assert sent(page, "lost") == [{"type": "lost"}]
