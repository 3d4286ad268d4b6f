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

from remat_magic.widget.panels import SCRIPTS, Panel

_IMPORT = re.compile(r'import \{ (?P<names>\w+(?:, \w+)*) \} from "(?P<path>\.[\w./-]*/[\w.-]+\.js)";')
_EXPORT = re.compile(r"export (?=(?:async )?(?:function|const|class) (?P<name>\w+))")


def bundle(entries: Mapping[str, Path], expression: str) -> str:
    """One module of several, as variables of the ``expression`` that is its default export, and of what they import.

    ValueError where a script imports or exports in a way that is not known here.
    """
    texts, variables = list[str](), dict[Path, str]()

    def add(path: Path) -> str:
        """Put a module after those that it imports, unless it is there; the variable that holds its exports."""
        path = path.resolve()
        if path not in variables:
            exports = list[str]()
            body = "\n".join(line(path, text, exports) for text in path.read_text(encoding="utf-8").splitlines())
            variables[path] = name = f"module{len(variables)}"
            exported = ", ".join(exports)
            texts.append(f"// {path.name}\nconst {name} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n")
        return variables[path]

    def line(path: Path, text: str, exports: list[str]) -> str:
        if imported := _IMPORT.fullmatch(text):
            return f"const {{ {imported['names']} }} = {add(path.parent / imported['path'])};"
        if exported := _EXPORT.match(text):
            exports.append(exported["name"])
            return text[exported.end() :]
        if re.match(r"(import|export)\b", text):
            raise ValueError(f"{path.name}: this form is not known to the bundle: {text}")
        return text

    own = "".join(f"const {name} = {add(path)};\n" for name, path in entries.items())
    return f"{''.join(texts)}{own}export default {expression};\n"


@cache
def widget_script(panels: tuple[type[Panel], ...]) -> str:
    """The script of a widget with these panels."""
    scripts = {panel.key: panel.script() for panel in panels}
    entries = {"core": SCRIPTS / "widget.js", **{f"panel{n}": path for n, path in enumerate(scripts.values())}}
    makers = ", ".join(f"{json.dumps(key)}: panel{n}.panel" for n, key in enumerate(scripts))
    return bundle(entries, f"{{ render: (context) => core.render(context, {{ {makers} }}) }}")
