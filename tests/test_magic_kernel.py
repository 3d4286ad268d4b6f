"""The magic in a real IPython kernel, spoken to as a notebook does, and in a real terminal."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from jupyter_client.manager import KernelManager

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Ran:
    """What running one cell sent back."""

    status: str = ""
    count: int = 0
    stdout: str = ""
    stderr: str = ""
    errors: list = field(default_factory=list)
    displays: list = field(default_factory=list)
    updates: list = field(default_factory=list)


class Notebook:
    def __init__(self, client, manager):
        self.client, self.manager = client, manager

    def run(self, *lines, cell_id="a", interrupt_on=None):
        ran = Ran()

        def output(message):
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    setattr(ran, content["name"], getattr(ran, content["name"]) + ANSI.sub("", content["text"]))
                    if interrupt_on and content["text"].startswith(interrupt_on):
                        self.manager.interrupt_kernel()
                case "error":
                    ran.errors.append(ANSI.sub("", "\n".join(content["traceback"])))
                case "display_data" | "execute_result":
                    ran.displays.append(content["data"])
                case "update_display_data":
                    ran.updates.append(content["data"])
                case _:
                    pass

        reply = self.client.execute_interactive("\n".join(lines), output_hook=output, timeout=240)
        ran.status, ran.count = reply["content"]["status"], reply["content"]["execution_count"]
        return ran

    def value(self, expression):
        ran = self.run(f"print(repr({expression}))")
        assert ran.status == "ok", ran
        return ran.stdout.strip()

    def complete(self, text):
        return self.client.complete(text, len(text), reply=True, timeout=240)["content"]["matches"]


@pytest.fixture(scope="module")
def notebook(root):
    manager = KernelManager()
    manager.start_kernel(cwd=str(root))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=240)
        notebook = Notebook(client, manager)
        assert notebook.run("%load_ext remat_magic").status == "ok"
        ran = notebook.run(
            "import jax, jax.numpy as jnp, time", "x = jnp.ones(3)", "def loss(x): return jnp.sum(jnp.sin(x))"
        )
        assert ran.status == "ok"
        yield notebook
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_value_is_the_widget_and_it_is_shown(notebook):
    ran = notebook.run("%%remat", "1", "jax.grad(loss)(x)")
    assert (ran.status, ran.stdout, ran.stderr, ran.errors) == ("ok", "", "", [])
    static, live = ran.displays
    assert "text/html" in static
    assert "application/vnd.jupyter.widget-view+json" in live
    assert notebook.value("_") == "RematWidget(loss, policy='as_written')"


def test_lines_and_numbers_are_those_of_the_cell(notebook):
    ran = notebook.run("%%remat", "", "def wave(x):", "    return jnp.sum(jnp.sin(x))", "wave(x)")
    assert notebook.value(f"{{(r.source.cell, r.source.line) for r in _{ran.count}.report.residuals if r.source}}") == (
        f"{{({ran.count}, 4)}}"
    )


def test_tracing_that_takes_a_moment_says_so_until_it_is_done(notebook):
    """And what was said is gone then, whether the function could be traced or not."""
    assert notebook.run("import remat_magic.notebook.session as session; session._MOMENT = 0.01").status == "ok"
    for line in ("return jnp.sum(jnp.sin(x))", "raise ValueError"):
        ran = notebook.run("%%remat", "def slow(x):", "    time.sleep(0.3)", f"    {line}", "slow(x)")
        assert ran.displays[0] == {"text/plain": "Tracing slow…"}
        assert ran.updates[0] == {"text/plain": ""}
    assert notebook.run("session._MOMENT = 1e6").status == "ok"
    ran = notebook.run("%%remat", "1", "loss(x)")
    assert not any("Tracing" in display["text/plain"] for display in ran.displays)


def test_an_interrupt_while_tracing(notebook):
    ran = notebook.run(
        "%%remat",
        "def slow(x):",
        "    print('tracing', flush=True)",
        "    time.sleep(30)",
        "    return x",
        "slow(x)",
        interrupt_on="tracing",
    )
    assert ran.status == "error"
    assert "UsageError: tracing was interrupted" in ran.stderr
    assert ran.errors == []
    assert notebook.value("slow.__name__") == "'slow'"


@pytest.mark.slow
def test_in_a_terminal_the_text_is_printed(root, tmp_path):
    """In a terminal the text is printed, below the prompt."""
    session = (
        "%load_ext remat_magic\n"
        "import jax.numpy as jnp\n"
        "%%remat\n"
        "def loss(x):\n"
        "    return jnp.sum(jnp.sin(x))\n"
        "loss(jnp.ones(3))\n"
        "\n\n"  # the plain prompt wants two empty lines after a cell magic
        "_.policy\n"
        "%remat --text loss(jnp.ones(4))\n"
        "%remat nope(1)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor", "--no-confirm-exit"],
        input=session,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        check=False,
    )
    assert "loss(x f32[3]) -> f32[]" in ran.stdout, ran.stdout + ran.stderr
    assert "Out[4]: 'as_written'" in ran.stdout
    assert ran.stdout.count("loss(x f32[4]) -> f32[]") == 1
    assert "UsageError: `nope` is not defined" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout


@pytest.mark.slow
def test_a_training_step_is_applied_with_its_policy(notebook):
    notebook.run("w = jnp.ones((3, 3))", "def of_layers(w, x): return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))")
    ran = notebook.run(
        "%%remat -o kept --apply -p nothing_saveable",
        "@jax.jit",
        "def train_step(w, x):",
        "    value, gradient = jax.value_and_grad(of_layers)(w, x)",
        "    return w - 0.1 * gradient, value",
        "w, value = train_step(w, x)",
    )
    assert ran.errors == []
    assert "`train_step` now runs under nothing_saveable" in ran.stdout
    assert notebook.value("(kept.report.function, kept.report.saved_bytes, float(w[0, 0]))") == "('of_layers', 0, 1.0)"
    assert notebook.value("'prevent_cse' in str(jax.make_jaxpr(train_step)(w, x))") == "True"
    assert notebook.value("bool(jnp.allclose(train_step(w, x)[0], train_step.__wrapped__(w, x)[0]))") == "True"
    ran = notebook.run("%remat --text --gradient none train_step(w, x)")
    assert "train_step(w f32[3,3], x f32[3])" in ran.stdout
    assert notebook.complete("%remat --gradient ") == ["none", "of_layers"]
