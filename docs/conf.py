"""How the pages here are built: ``sphinx-build -W docs build/docs``, with the extra ``docs``."""

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
