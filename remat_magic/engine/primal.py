"""The primal program: the user's function, run once as Python, and the settings of JAX that it was traced under."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from remat_magic import _jax, policies
from remat_magic.engine.signature import Signature
from remat_magic.engine.sites import SiteTable, find_sites, identity
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.values import abstract, flatten_outputs, is_inexact
from remat_magic.jaxprs.walk import walk
from remat_magic.records import RematError

__all__ = ["Primal"]


class Primal:
    """A function traced once for some arguments.

    Args:
        fun: the function.
        signature: its arguments.
        has_aux: whether it returns a pair of output and auxiliary data.

    Attributes:
        closed: the closed jaxpr, from the array leaves to the outputs and then the auxiliary outputs that are arrays.
        outputs: how many outputs it has.
        auxiliary: how many auxiliary ones.
        types: the types of the array leaves.
        arguments: their names.
        has_aux: as given.
        provenances: where its operations stand.
        table: its checkpoint sites.
        function: one function object that evaluates it, for as long as it is held: JAX caches by identity.

    Raises:
        RematError: an output is no array, or none can be differentiated.
        Exception: whatever ``fun`` itself raises.
    """

    def __init__(self, fun: Callable[..., Any], signature: Signature, has_aux: bool) -> None:
        self.signature = signature
        _jax.require()
        self.remat3 = _jax.remat3()
        self.has_aux = has_aux
        self._x64 = _jax.x64()
        # What `with` blocks set is a thread's own, and a widget retraces in another thread.
        self._settings = _jax.thread_settings()
        self._generation = _jax.Generation()
        self.types = tuple(leaf.value for leaf in signature.arrays)
        self.arguments = tuple(leaf.name for leaf in signature.arrays)
        self.outputs = self.auxiliary = 0
        with self.tracing():
            self.closed = signature.jaxpr(fun, self._flat)
        self._check_outputs()
        self.stale = tuple(dict.fromkeys(name for _, name in _jax.stale_traces(self._generation, fun, self.closed)))
        with _jax.reading():
            self.provenances = Provenances(self.closed, self.name)
            self.table: SiteTable = find_sites(self.closed, self.provenances.spans, policies.describe)
        self.function = _jax.as_function(self.closed)

    def _flat(self, output: Any) -> list[Any]:
        leaves, aux, _ = flatten_outputs(output, self.has_aux, self.name)
        kept = [leaf for leaf in aux if abstract(leaf) is not None or isinstance(leaf, (bool, int))]
        self.outputs, self.auxiliary = len(leaves), len(kept)
        return [*leaves, *kept]

    def _check_outputs(self) -> None:
        types = self.output_types
        if not any(is_inexact(aval) for aval in types):
            returned = ", ".join(map(_jax.type_text, types)) or "nothing"
            raise RematError(
                f"{self.name} cannot be differentiated: it returns {returned}, and only floating-point outputs "
                "have a derivative."
            )

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.signature.function

    @property
    def output_types(self) -> tuple[Any, ...]:
        """The types of the outputs, auxiliary ones left out."""
        return tuple(self.closed.out_avals[: self.outputs])

    @contextlib.contextmanager
    def tracing(self, remat3: bool | None = None) -> Iterator[None]:
        """Trace as this program was traced: with the settings of its thread, apart from the user's cached traces.

        Args:
            remat3: jax_remat3, where it is to be other than it was.
        """
        used = self.remat3 if remat3 is None else remat3
        try:
            with self._settings(), _jax.tracing(self._generation, used, self._x64):
                yield
        except (KeyboardInterrupt, MemoryError, RecursionError):
            # What is broken off can stay in JAX's caches as begun (jaxlib of 0.10 and 0.12), and asking for the same
            # again then raises "RecursionError: Recursively calling": ask other caches from now on.
            self._generation = _jax.Generation()
            raise

    def tracing_again(self) -> contextlib.AbstractContextManager[None]:
        """Trace the function for other arguments, with the settings of whoever calls it but for jax_remat3."""
        return _jax.tracing(self._generation, self.remat3, _jax.x64())

    def site_of(self, eqn: Any) -> str:
        """The key of the site that a checkpoint equation of the program belongs to; empty for none."""
        return self.table.keys.get(identity(eqn, self.provenances.spans), "")

    @functools.cached_property
    def takes_gradient(self) -> bool:
        """Whether the function differentiates inside."""
        return any("transpose(" in _jax.name_stack(eqn) for _, eqn in walk(self.closed, once=True))

    @functools.cached_property
    def has_custom_rules(self) -> bool:
        """Whether a custom derivative rule, which is Python and may hold names of its own, is called."""
        return any(_jax.is_custom_rule(eqn) for _, eqn in walk(self.closed, once=True))
