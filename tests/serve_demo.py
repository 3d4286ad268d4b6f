"""Tries the README's command that opens the demo, to the letter, until its page is served.

``python tests/serve_demo.py`` needs nothing but Python. JupyterLab reads and writes no settings of the developer's, and
opens no browser.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(r"^python3 .*bin/jupyter lab .*$", re.MULTILINE)
ADDRESS = re.compile(r"http://127\.0\.0\.1:\S*token=\S*")


def main() -> int:
    """Run the command, ask for the first page that it tells of, and end it; the exit status says whether it came."""
    command = COMMAND.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    with tempfile.TemporaryDirectory() as folder:
        own = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"), folder)
        server = subprocess.Popen(
            f"{command} --no-browser",
            shell=True,
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that JupyterLab, which the shell starts, is ended with it
        )
        told = list[str]()
        try:
            for line in server.stdout or ():
                told.append(line)
                if address := ADDRESS.search(line):
                    with urllib.request.urlopen(address[0], timeout=120) as page:
                        print("the demo is served:", page.status)
                    return 0
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    print("".join(told))
    return 1


if __name__ == "__main__":
    sys.exit(main())
