"""Policies side by side."""
