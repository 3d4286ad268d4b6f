"""Advice: what about a policy, or a program, costs memory or work without need, with the line, the figure, the mend."""

from remat_magic.advice.rules import advise

__all__ = ["advise"]
