"""Measuring goes on while another device is looked at: its bar and its button do not mix with another job's."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

import remat_magic as rm
from tests.browser.alone import hear, sent, show_alone

pytestmark = pytest.mark.slow

MEASURING = {"type": "progress", "job": "measure", "doing": "Measuring", "did": "measured", "device": ""}
TRYING = {"type": "progress", "job": "places", "doing": "Trying", "did": "tried", "device": "TPU v5e"}


@pytest.fixture
def page(browser: Browser, trace: rm.Trace) -> Iterator[Page]:
    """The widget with its Compare panel open."""
    with browser.new_context() as context:
        page = context.new_page()
        show_alone(page, trace)
        hear(page, type="hello")
        page.get_by_role("tab", name="Compare").click()
        yield page


def step(page: Page, job: dict[str, str], done: int, total: int, **more: bool) -> None:
    """Let the widget hear how far a job is."""
    end = {"finished": done == total, "cancelled": False}
    hear(page, **job, done=done, total=total, current="dots_saveable", **{**end, **more})


def test_the_bar_and_the_button_are_of_the_job_that_was_begun_last(page: Page) -> None:
    bar, status = page.get_by_role("progressbar"), page.locator('[data-part="status"]')
    cancel = page.get_by_role("button", name="Cancel")
    measure, places = (page.get_by_role("button", name=name, exact=True) for name in ("Measure", "Try all places"))
    step(page, MEASURING, 2, 9)
    expect(status).to_have_text("Measuring dots_saveable, 3 of 9…")
    page.get_by_label("Device", exact=True).select_option("TPU v5e")
    step(page, MEASURING, 3, 9)
    expect(status).to_have_text("Measuring dots_saveable for this machine, 4 of 9…")
    expect(places).to_be_enabled()
    step(page, TRYING, 0, 20)
    step(page, MEASURING, 4, 9)
    assert bar.evaluate("bar => [bar.value, bar.max]") == [0, 20]
    expect(status).to_have_text("Trying dots_saveable, 1 of 20…")
    expect(measure).to_be_disabled()
    cancel.click()
    assert [message["job"] for message in sent(page, "cancel")] == ["places"]
    step(page, TRYING, 5, 20, finished=True, cancelled=True)
    expect(status).to_have_text("Cancelled; 5 of 20 tried.")
    expect(places).to_be_enabled()
    expect(measure).to_be_disabled()
    assert bar.evaluate("bar => [bar.value, bar.max]") == [4, 9]
    cancel.click()
    assert [message["job"] for message in sent(page, "cancel")] == ["places", "measure"]
    step(page, MEASURING, 5, 9, finished=True, cancelled=True)
    expect(status).to_have_text("Cancelled for this machine; 5 of 9 measured.")
    expect(cancel).to_be_hidden()
    expect(bar).to_be_hidden()
    expect(measure).to_be_focused()
