"""Fixtures for the tests that drive a real notebook interface."""

import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from playwright.sync_api import Browser, Page, expect

import remat_magic as rm
from tests.browser.inspected import LOAD, write_notebook
from tests.browser.lab import VIEWPORT, NotebookPage, Server, browse, chromium, serve

expect.set_options(timeout=60_000)  # a loaded machine may be slow; no test asserts how fast anything is


@pytest.fixture(scope="session")
def _chromium() -> None:
    if chromium() is None:
        missing = "no Chromium on this machine (install your system's chromium package to run the browser tests)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)


@pytest.fixture(scope="session")
def lab(_chromium: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab, shared by all browser tests."""
    with serve(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture(scope="module")
def notebook7(_chromium: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Notebook 7."""
    with serve(tmp_path_factory.mktemp("notebook7"), "notebook") as server:
        yield server


@pytest.fixture(scope="package")
def browser(_chromium: None) -> Iterator[Browser]:
    """One Chromium for this folder: Playwright's event loop must not outlive the browser tests of this process."""
    with browse() as browser:
        yield browser


def loss(W: jax.Array, x: jax.Array) -> jax.Array:
    """Something with residuals."""
    return jnp.sum(jnp.tanh(x @ W))


@pytest.fixture(scope="package")
def trace() -> rm.Trace:
    """What a widget in a page of its own can show."""
    shape = jax.ShapeDtypeStruct
    return rm.trace(loss, shape((8, 8), "float32"), shape((4, 8), "float32"))


@pytest.fixture(scope="package")
def _page_of_lab(lab: Server, browser: Browser) -> Iterator[Page]:
    """JupyterLab, which takes seconds to start, opened once."""
    permissions = ["clipboard-read", "clipboard-write"]
    with browser.new_context(viewport=VIEWPORT, permissions=permissions) as context:
        yield context.new_page()


@pytest.fixture(scope="module")
def page_of_module(lab: Server, _page_of_lab: Page) -> Iterator[NotebookPage]:
    """A page for all tests of a module, to open a notebook once; each runs its cells anew, which makes new widgets."""
    page = NotebookPage(lab, _page_of_lab)
    yield page
    page.leave()
    lab.kill_kernels()


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, lab: Server, page_of_module: NotebookPage) -> NotebookPage:
    """The notebook of a module's ``CELLS`` after a first one, which has loaded the extension."""
    name = f"{request.module.__name__.rpartition('.')[2]}.ipynb"
    write_notebook(lab.folder / name, LOAD, *request.module.CELLS)
    page_of_module.open(name)
    page_of_module.run(0)
    return page_of_module


@pytest.fixture
def notebook(lab: Server, page_of_module: NotebookPage) -> Iterator[NotebookPage]:
    """The page for a test that opens a notebook of its own, before any other of its module is open."""
    yield page_of_module
    page_of_module.close()
    lab.kill_kernels()
