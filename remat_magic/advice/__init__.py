"""Advice: what costs memory or has no effect."""
