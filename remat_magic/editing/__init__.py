"""A plan as an edit of the user's own source: where its values are made there, and the text with their names."""

from remat_magic.editing.editor import edit

__all__ = ["edit"]
