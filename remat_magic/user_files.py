"""Whose a file of code is: the user's own, or that of an installed package."""

from __future__ import annotations

import os
import re
import sysconfig
from functools import lru_cache
from pathlib import Path

import jax

STAND_IN = "__remat_magic_choose__"
"""A variable of code that stands in for a function of the user's, while an edit of that is traced."""

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep


@lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    """Folders whose code is not the user's: the standard library, installed packages, this package."""
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib") if key in paths}
    # A standard library reached through a symbolic link names its files by either path.
    folders |= {os.path.realpath(folder) for folder in folders}
    folders.add(os.path.dirname(os.path.realpath(os.__file__)))
    return (*(folder.rstrip(os.sep) + os.sep for folder in sorted(folders)), *_jax_folders(), _OWN)


@lru_cache(maxsize=1)
def _jax_folders() -> tuple[str, ...]:
    """Where JAX is, which a developer of JAX has outside of the installed packages."""
    folder = os.path.dirname(os.path.abspath(jax.__file__))
    return (os.path.join(folder, ""), os.path.join(os.path.dirname(folder), "jaxlib", ""))


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a code object's file is the user's own: not the standard library, an installed package or this one."""
    if file.startswith(("<frozen", "<generated_", "<attrs generated")):  # those of equinox, those of attrs
        return False
    if file.startswith("<"):  # <stdin>, <string>, <ipython-input-...>
        return True
    if any(part in file for part in (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")):
        return False
    return not os.path.abspath(file).startswith(_library_folders()) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    """Whether pip put a file where it is, in a folder that is none of Python's own: ``pip install --target``."""
    folder, top = os.path.split(os.path.abspath(file))
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder, top = os.path.split(folder)
    return top in _installed_in(folder)


@lru_cache(maxsize=256)
def _installed_in(folder: str) -> frozenset[str]:
    """The top-level modules and packages that were installed into a folder, as each package's record has them."""
    records = (path.read_text("utf-8", "replace") for path in Path(folder).glob("*.dist-info/RECORD"))
    return frozenset(re.split("[/,]", line)[0] for record in records for line in record.splitlines())


@lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Whether a file is one of an installed package other than JAX itself, the standard library and this one.

    JAX's own frames say how an operation is made, not what for: its name and the line that calls it tell more.
    """
    if is_user_file(file) or file.startswith("<") or file.startswith((*_jax_folders(), _OWN)):
        return False
    if "site-packages" in file or "dist-packages" in file or _is_installed(file):
        return True
    return os.path.abspath(file).startswith(_package_folders())


@lru_cache(maxsize=1)
def _package_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.join(paths[key], "") for key in ("purelib", "platlib") if key in paths)
