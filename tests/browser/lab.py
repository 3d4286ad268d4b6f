"""A real JupyterLab or Notebook 7 on loopback, and a page of it in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import site
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page, ViewportSize, sync_playwright

Interface = Literal["lab", "notebook"]

VIEWPORT: ViewportSize = {"width": 1400, "height": 1000}

# Chromium calls home when started; where the network is closed each try is an error and a delay.
_CHROMIUM_FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]

_APP_OPTIONS = {
    "lab": [
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ],
    "notebook": ["--JupyterNotebookApp.expose_app_in_browser=True"],
}

_SETTINGS = {
    # Without windowing every cell is in the page, so that a test can look at cells that are scrolled away.
    "notebook-extension/tracker": {"windowingMode": "none"},
    # The question about Jupyter's news would lie over the page.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

# The kernel is idle and no cell is running.
_IDLE = (
    "window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
    " && window.jupyterapp.shell.currentWidget.content.widgets.every(cell => cell.model.executionState !== 'running')"
)


def chromium() -> str | None:
    """The path of a Chromium or Chrome, or None where the machine has none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


@dataclass(frozen=True)
class Server:
    """A running server. ``folder`` is where its notebooks lie."""

    interface: Interface
    url: str
    token: str
    folder: Path
    log: Path
    pid: int

    def page_url(self, notebook: str) -> str:
        """The address of a notebook in a workspace of its own."""
        if self.interface == "notebook":
            return f"{self.url}/notebooks/{notebook}?token={self.token}"
        return f"{self.url}/lab/workspaces/auto-{secrets.token_hex(4)}/tree/{notebook}?token={self.token}"

    def api(self, path: str, method: str = "GET") -> Any:
        """Ask the server's REST API; returns the parsed answer, or None where it has no body."""
        request = urllib.request.Request(
            f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def shut_down_kernels(self) -> None:
        """End every kernel, as a person does who comes back to the notebook the next day."""
        for session in self.api("sessions"):
            self.api(f"sessions/{session['id']}", "DELETE")

    def kill_kernels(self) -> None:
        """End every kernel sooner than it would end itself, where nobody looks at how it ends."""
        for child in psutil.Process(self.pid).children():
            child.kill()
        for _ in range(60):
            try:
                return self.shut_down_kernels()  # before the server starts others
            except urllib.error.HTTPError:  # it has just begun to
                time.sleep(0.5)
        return self.shut_down_kernels()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(folder: Path) -> dict[str, str]:
    environment = dict(os.environ)
    for variable in (
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR",
    ):
        environment[variable] = str(folder / variable.lower())
        (folder / variable.lower()).mkdir()
    # Run from the source tree without an installation, the kernel must find the same package as this process.
    package = find_spec("remat_magic")
    if package is not None and package.origin is not None:
        parent = str(Path(package.origin).parent.parent)
        if parent not in site.getsitepackages():
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [parent, environment.get("PYTHONPATH")]))
    return environment


def _write_settings(folder: Path) -> None:
    for plugin, settings in _SETTINGS.items():
        file = folder / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(settings))


@contextmanager
def serve(folder: Path, interface: Interface = "lab") -> Iterator[Server]:
    """Start a server with settings, data and runtime folders of its own, and stop it with its kernels.

    Raises:
        RuntimeError: the server ended or did not answer within three minutes; the text holds its log.
    """
    notebooks = folder / "notebooks"
    notebooks.mkdir(parents=True)
    environment = _environment(folder)
    _write_settings(Path(environment["JUPYTERLAB_SETTINGS_DIR"]))
    port, token, log = _free_port(), secrets.token_hex(16), folder / "server.log"
    command = [
        *(sys.executable, "-m", "jupyterlab" if interface == "lab" else "notebook"),
        *("--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"),
        *(f"--ServerApp.root_dir={notebooks}", f"--IdentityProvider.token={token}"),
        *_APP_OPTIONS[interface],
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=notebooks)
    server = Server(interface, f"http://127.0.0.1:{port}", token, notebooks, log, process.pid)
    try:
        _wait_for_answer(server, process)
        yield server
        server.kill_kernels()
    finally:
        process.kill()  # it has nothing left to end
        process.wait()


def _wait_for_answer(server: Server, process: subprocess.Popen[bytes], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.api("status")
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"the server did not answer; its log:\n{server.log.read_text()}")


@contextmanager
def browse() -> Iterator[Browser]:
    """A headless Chromium.

    Playwright's synchronous interface holds an event loop running in this thread: keep it no longer than needed.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_CHROMIUM_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class NotebookPage:
    """An open notebook, driven as a person drives it."""

    def __init__(self, server: Server, page: Page) -> None:
        self.server = server
        self.page = page
        self.console: list[str] = []  # errors and warnings that the page logged, exceptions that it did not catch
        page.set_default_timeout(60_000)
        page.on("console", self._logged)
        page.on("pageerror", self._raised)

    def _logged(self, entry: ConsoleMessage) -> None:
        if entry.type in ("error", "warning"):
            self.console.append(entry.text)

    def _raised(self, error: Error) -> None:
        self.console.append(str(error))

    def complaints(self) -> list[str]:
        """What the page logged of the widget, but for what says only that the machine is slow."""
        ours = [entry for entry in self.console if re.search(r"remat|anywidget", entry, re.IGNORECASE)]
        # JupyterLab's own; and anywidget's, which scripts/page.js makes up for.
        slow = r"Plugin anywidget:plugin .* to activate|\[anywidget\] Failed to initialize model"
        return [entry for entry in ours if not re.search(slow, entry)]

    def open(self, notebook: str, *, kernel: bool = True) -> None:
        """Open a notebook of the server's folder, alone, and wait until the page can be used.

        With ``kernel=False`` the notebook must ask for a kernel that is not there; "No Kernel" is then chosen.
        """
        if self._is_lab():
            self.close()  # JupyterLab's own start takes much longer than a notebook's
            self.page.evaluate(
                "async path => { await window.jupyterapp.commands.execute('docmanager:open', { path }) }", notebook
            )
        else:
            self.page.goto(self.server.page_url(notebook))
        self._wait(
            "window.jupyterapp?.started && !document.querySelector('#jupyterlab-splash')"
            " && window.jupyterapp.shell.currentWidget?.content?.widgets?.length"
        )
        if not kernel:
            dialog = self.page.locator(".jp-Dialog")
            dialog.get_by_role("button", name="No Kernel").click()
            dialog.wait_for(state="detached")
            return
        self.wait_idle()

    def close(self) -> None:
        """Close what is open in JupyterLab, saved or not."""
        self.page.evaluate(
            """async () => {
                const documents = [...window.jupyterapp.shell.widgets('main')].filter(widget => widget.context);
                for (const document of documents) {
                    document.context.model.dirty = false;  // or it would ask
                    const closed = new Promise(done => document.disposed.connect(done));
                    document.close();
                    await closed;
                }
            }"""
        )

    def leave(self) -> None:
        """Leave the page as a new one: nothing open or remembered, and as wide and light as it was."""
        self.page.remove_listener("console", self._logged)
        self.page.remove_listener("pageerror", self._raised)
        self.page.set_viewport_size(VIEWPORT)
        if self.page.locator(".jp-Dialog").count() or not self._is_lab():
            self.page.goto("about:blank")
            return
        self.close()
        self.page.evaluate("() => localStorage.clear()")
        if self.page.evaluate("() => document.body.dataset.jpThemeName") != "JupyterLab Light":
            self.set_theme("JupyterLab Light")

    def _is_lab(self) -> bool:
        """Whether JupyterLab runs in the page."""
        return self.server.interface == "lab" and self.page.evaluate("() => !!window.jupyterapp?.started")

    def run_all(self, seconds: float = 1200) -> None:
        """Run all cells by the menu's command and wait until the kernel is idle."""
        self._begin("notebook:run-all-cells")
        self._wait(f"window.rematRan && {_IDLE}", seconds=seconds)

    def start(self, index: int) -> None:
        """Run one cell and wait until it has begun."""
        self._begin("notebook:run-cell", index)
        state = "window.jupyterapp.shell.currentWidget.content.widgets[index].model.executionState"
        self._wait(f"window.rematRan || {state} === 'running'", index)

    def run(self, index: int, seconds: float = 180) -> None:
        """Run one cell and wait until it has ended."""
        self._begin("notebook:run-cell", index)
        self._wait(f"window.rematRan && {_IDLE}", seconds=seconds)

    def _begin(self, command: str, index: int | None = None) -> None:
        """Give a command, for one cell or all, and say in ``rematRan`` when it has been carried out."""
        self.page.evaluate(
            "([command, index]) => { const app = window.jupyterapp;"
            " if (index !== null) app.shell.currentWidget.content.activeCellIndex = index;"
            " window.rematRan = null;"
            " app.commands.execute(command).then(() => { window.rematRan = true }) }",
            [command, index],
        )

    def _wait(self, condition: str, index: int | None = None, seconds: float = 180) -> None:
        """Wait for what holds of a cell; asked at intervals, since each frame asked would have to be drawn."""
        self.page.wait_for_function(f"index => {condition}", arg=index, timeout=seconds * 1000, polling=25)

    def wait_idle(self, seconds: float = 180) -> None:
        """Wait until the kernel is idle and no cell is running."""
        self._wait(_IDLE, seconds=seconds)

    def leave_out_unseen_cells(self) -> None:
        """Let the browser leave out what is scrolled away, as JupyterLab 4.6 does unless told otherwise."""
        self.page.evaluate(
            "() => { const content = window.jupyterapp.shell.currentWidget.content;"
            " content.notebookConfig = { ...content.notebookConfig, windowingMode: 'contentVisibility' } }"
        )

    def save(self) -> None:
        """Save the notebook and wait until it is on disk."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def set_theme(self, theme: str) -> None:
        """Switch the theme by its name, e.g. "JupyterLab Dark"."""
        light = "false" if "Dark" in theme else "true"
        self.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })",
            theme,
        )
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light && !document.querySelector('#jupyterlab-splash')",
            arg=light,
        )

    def cell_count(self) -> int:
        """How many cells the notebook has."""
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.widgets.length")

    def errors(self) -> list[str]:
        """The error outputs of all cells, as text."""
        return self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.widgets.flatMap(cell =>"
            " (cell.model.outputs?.toJSON() ?? []).filter(output => output.output_type === 'error')"
            ".map(output => output.ename + ': ' + output.evalue))"
        )

    def cell(self, index: int) -> Locator:
        """The cell at an index, counted from 0."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def outputs(self, index: int) -> Locator:
        """The output area of a code cell."""
        return self.cell(index).locator(".jp-Cell-outputArea").first
