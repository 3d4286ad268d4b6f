"""How the pages here are built: ``sphinx-build -W docs build/docs``, with the extra ``docs``."""

import inspect
from typing import Any

from sphinx.util import logging

from remat_magic import __version__

project, author, release = "remat_magic", "the developers of remat_magic", __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks hold what they show: tests/make_demo.py
html_static_path = ["_static"]
html_theme = "sphinx_book_theme"
html_title = "remat_magic"
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_use_ivar = True


def complain(_app: Any, _what: str, name: str, member: Any, _skip: bool, _options: Any) -> None:
    """Warn of a public function, class, method or property without a docstring: autodoc leaves it out silently."""
    own = str(getattr(getattr(member, "fget", member), "__module__", "")).startswith("remat_magic")
    public = own and not name.startswith("_")
    documented = inspect.isroutine(member) or inspect.isclass(member) or isinstance(member, property)
    if public and documented and not inspect.getdoc(member):
        logging.getLogger(__name__).warning("%s has no docstring", name)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", complain)
