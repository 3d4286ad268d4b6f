"""The errors that users see."""

from __future__ import annotations


class RematError(ValueError):
    """A mistake that the user can mend; its text is one sentence that says how."""
