"""The widget's scripts as one ES module: a browser gets a widget's script as text, which can import no file.

Each script is a module by itself, for editors and for the type checker. Here every module becomes a function that runs
once and returns what the module exports, so that names in different modules cannot meet, and imports become
assignments. Only the forms of ``import`` and ``export`` that the scripts use are known; any other is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from remat_magic.widget.panel import SCRIPTS, Panel

__all__ = ["bundle", "widget_script"]

_IMPORT = re.compile(r'import \{ (?P<names>\w+(?:, \w+)*) \} from "(?P<path>\.[\w./-]*/[\w.-]+\.js)";')
_EXPORT = re.compile(r"export (?=(?:async )?(?:function|const|class) (?P<name>\w+))")


def bundle(entries: Mapping[str, Path], expression: str) -> str:
    """One module of several and of what they import.

    Args:
        entries: a variable of the result for each module that ``expression`` uses; it has the module's exports.
        expression: what the result exports as its default.

    Raises:
        ValueError: a script imports or exports in a way that is not known here, or what is not there, or itself.
    """
    modules = _Modules()
    variables = "".join(f"const {name} = {modules.add(path)};\n" for name, path in entries.items())
    return f"{''.join(modules.texts)}{variables}export default {expression};\n"


class _Modules:
    """The modules so far, each after those that it imports."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._variables: dict[Path, str] = {}
        self._exports: dict[Path, list[str]] = {}
        self._begun: list[Path] = []

    def add(self, path: Path) -> str:
        """Add a module unless it is there.

        Returns:
            The variable that holds its exports.
        """
        path = path.resolve()
        if path in self._begun:
            raise ValueError(
                f"scripts import one another: {' -> '.join(module.name for module in (*self._begun, path))}"
            )
        if path not in self._variables:
            self._begun.append(path)
            exports: list[str] = []
            lines = path.read_text(encoding="utf-8").splitlines()
            body = "\n".join(self._line(path, line, exports) for line in lines)
            variable = f"module{len(self._variables)}"
            self.texts.append(
                f"// {path.name}\nconst {variable} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();\n"
            )
            self._variables[path], self._exports[path] = variable, exports
            self._begun.pop()
        return self._variables[path]

    def _line(self, path: Path, line: str, exports: list[str]) -> str:
        if imported := _IMPORT.fullmatch(line):
            target = (path.parent / imported["path"]).resolve()
            variable = self.add(target)
            missing = set(imported["names"].split(", ")) - set(self._exports[target])
            if missing:
                raise ValueError(f"{path.name}: {target.name} does not export {', '.join(sorted(missing))}")
            return f"const {{ {imported['names']} }} = {variable};"
        if exported := _EXPORT.match(line):
            exports.append(exported["name"])
            return line[exported.end() :]
        if re.match(r"(import|export)\b", line):
            raise ValueError(f"{path.name}: this form is not known to the bundle: {line}")
        return line


@cache
def widget_script(panels: tuple[type[Panel], ...]) -> str:
    """The script of a widget with these panels."""
    scripts = {panel.key: path for panel in panels if (path := panel.script()) is not None}
    entries = {"core": SCRIPTS / "turning.js", **{f"panel{n}": path for n, path in enumerate(scripts.values())}}
    makers = ", ".join(f"{json.dumps(key)}: panel{n}.panel" for n, key in enumerate(scripts))
    return bundle(entries, f"{{ render: (context) => core.render(context, {{ {makers} }}) }}")
