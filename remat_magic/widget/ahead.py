"""Computing, between cells, the policies that nobody has asked for yet."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from typing import Any

from remat_magic.records import Report

__all__ = ["Ahead"]

# Looking ahead stops when one retrace takes longer than this many seconds: it would be felt.
UNIT = 0.1


class Ahead:
    """What one widget has tried ahead of time."""

    def __init__(self) -> None:
        self._tried: set[tuple[str, str]] = set()
        self._slow = False

    def step(
        self, trace: Any, at: str, known: Container[tuple[str, str]], namespace: Mapping[str, Any]
    ) -> tuple[Report | None, bool]:
        """One retrace at most.

        Args:
            trace: the inspected function.
            at: the place whose policies are computed.
            known: policies and places that are rendered already.
            namespace: where a policy that is no key is looked up.

        Returns:
            The report, if one was made, and whether to go on: not when all are known or one took longer than is felt.
        """
        if self._slow:
            return None, False
        if not trace.lock.acquire(blocking=False):
            return None, True  # the worker is tracing what the reader asked for
        try:
            keys = [(choice.key, at) for choice in trace.choices()]
            key = next((key for key in keys if key not in self._tried and key not in known), None)
            if key is None:
                return None, False
            self._tried.add(key)
            start = time.perf_counter()
            report: Report = trace.report(*key, namespace)
            self._slow = time.perf_counter() - start > UNIT
        except Exception:  # noqa: BLE001 -- nobody asked for it yet; whoever does will be told
            return None, True
        finally:
            trace.lock.release()
        return report, not self._slow
