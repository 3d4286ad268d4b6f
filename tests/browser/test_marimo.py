"""``rm.show`` in marimo, where there is no magic and no kernel of IPython's."""

import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.slow

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import jax
    import jax.numpy as jnp

    import remat_magic as rm

    def block(x, w):
        return jnp.tanh(x @ w) @ w.T

    def loss(x, ws):
        for w in ws:
            x = block(x, w)
        return (x**2).sum()

    shape = jax.ShapeDtypeStruct
    trace = rm.trace(loss, shape((64, 32), "float32"), [shape((32, 32), "float32")] * 4)
    rm.show(trace, "nothing_saveable", "block")
    return


if __name__ == "__main__":
    app.run()
"""


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    notebook = tmp_path / "notebook.py"
    notebook.write_text(textwrap.dedent(NOTEBOOK))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "marimo", "run", str(notebook), "--headless", "--no-token", f"--port={port}"]
    settings = {"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    server = subprocess.Popen(
        [*command, "--host=127.0.0.1"],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:  # until it serves
            if "URL" in line:
                break
        else:
            pytest.fail("marimo did not start")
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}", timeout=60_000)
        yield page
        page.close()
    finally:
        server.terminate()
        server.communicate(timeout=30)


def test_the_widget_is_live_in_marimo(page: Page) -> None:
    """What is shown first is completed, and a choice is answered: both come from threads."""
    headline = page.locator(".remat-widget")
    expect(headline).to_contain_text("peak", timeout=300_000)
    expect(headline).not_to_contain_text("being traced")
    policies = page.get_by_label("Policy", exact=True)
    assert policies.input_value() == "nothing_saveable"
    saved = page.get_by_text(re.compile(r"^[\d.]+ kB$")).first
    before = saved.inner_text()
    policies.select_option("dots_saveable")
    expect(saved).not_to_have_text(before)
    expect(headline).not_to_contain_text("being traced")
    # A tab that is computed when it is opened, and one that is answered piece by piece.
    page.get_by_role("tab", name="Choices").click()
    expect(page.get_by_role("tabpanel").filter(visible=True)).not_to_be_empty()
    page.get_by_role("tab", name="Source").click()
    expect(page.get_by_role("tabpanel").filter(visible=True)).to_contain_text("jnp.tanh(x @ w) @ w.T")
