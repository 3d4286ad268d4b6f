"""The inspected function, as the widget and its panels share it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from remat_magic import devices
from remat_magic.api import Policy, Trace
from remat_magic.records import Measurement, Plan, RematError, Report

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments to run on."""

_CLOSED = "this widget was closed, because its cell was run again or close() was called; take the newer one"


class LiveTrace:
    """A trace, until it is closed, and what the keys of its shown policies stand for. From any thread.

    Args:
        trace: as for ``RematWidget``, as are ``namespace`` and ``inputs``; None is closed already.
        device: the name of the accelerator that is asked for, empty for this machine; None where nothing is said of it.

    Attributes:
        device: the name of the accelerator to begin with, and later the one that the reader chose: by default the one
            that is here, empty for a machine without, or with one that is not known.
        is_asked_for: whether anything was said of it.
    """

    def __init__(
        self,
        trace: Trace | None,
        namespace: Mapping[str, Any] | None = None,
        inputs: Inputs | None = None,
        device: str | None = None,
    ) -> None:
        self._trace = trace
        self.namespace: Mapping[str, Any] = {} if namespace is None else namespace
        self.inputs = inputs
        self.is_asked_for = device is not None
        here = devices.accelerator() if device is None and trace is not None else None
        self.device = devices.get(device).name if device else here.name if here else ""
        self._policies: dict[str, Policy] = {}
        self._offered: dict[str, Plan] = {}
        self._lock = threading.Lock()
        self._measured: dict[tuple[str, str, str], Measurement] = {}
        self.on_compiled: list[Callable[[Measurement], None]] = []  # told of what has its memory over time

    @property
    def devices(self) -> tuple[str, ...]:
        """The accelerators to choose from: one of each, as many as the mesh has, and the one to begin with."""
        single_devices = (name for name in devices.names() if name != devices.THIS_CPU)
        offered = dict.fromkeys((*single_devices, *devices.meshes(self.trace.mesh_devices), self.device))
        return tuple(filter(None, offered))

    def choose_device(self, device: str) -> bool:
        """Take another device for the chosen one, if it is offered; whether it is another one."""
        changed = device != self.device and (not device or device in self.devices)
        if changed:
            self.device = device
        return changed

    @property
    def closed(self) -> bool:
        """Whether the trace is let go of."""
        return self._trace is None

    @property
    def trace(self) -> Trace:
        """The trace.

        Raises:
            RematError: it is closed.
        """
        if self._trace is None:
            raise RematError(_CLOSED)
        return self._trace

    def close(self) -> None:
        """Let go of the trace, the user's names and the inputs."""
        self._trace = self.inputs = None
        self.namespace = {}
        self.on_compiled = []

    def preview(self, policy: Policy, at: str | None) -> Report:
        """The report of the forward half; its key stands for the policy from here on.

        Raises:
            RematError: the policy or the place is of no use for this function; or it is closed.
        """
        policy = self.policy(policy) if isinstance(policy, str) else policy
        if isinstance(policy, Plan) and policy.names:
            policy = policy.apart_from(self.plans())
        report = self.trace.preview(policy, at, self.namespace)
        # The key that is shown need not be a text that the trace reads ("my_policy #2").
        if report.policy != policy:
            with self._lock:
                self._policies[report.policy] = policy
        return report

    def offer(self, plans: Mapping[str, Plan]) -> None:
        """Let keys stand for plans, so that these can be chosen by them."""
        with self._lock:
            self._offered |= plans

    def measurements(self) -> dict[tuple[str, str, str], Measurement]:
        """What was measured, or compiled, by policy, place and the chosen device."""
        with self._lock:
            return dict(self._measured)

    def add_measured(self, device: str, results: Iterable[Measurement]) -> None:
        """Let the panels know what was measured on a device, or compiled for it."""
        for result in results:
            key = result.policy, result.at, device
            with self._lock:
                before, self._measured[key] = self._measured.get(key), result
            if result.timeline is not None and result != before:
                for tell in self.on_compiled:
                    tell(result)

    def policy(self, key: str) -> Policy:
        """What a shown key stands for."""
        with self._lock:
            return self._policies.get(key, self._offered.get(key, key))

    def arguments(self, policy: str, at: str) -> tuple[Policy, str, Mapping[str, Any]]:
        """What the trace takes for a shown policy."""
        return self.policy(policy), at, self.namespace

    def plans(self, at: str | None = None) -> dict[str, Plan]:
        """The plans that were shown, of one place or of all, by their keys, oldest first."""
        with self._lock:
            policies = list(self._policies.items())
        return {key: policy for key, policy in policies if isinstance(policy, Plan) and (at is None or policy.at == at)}
