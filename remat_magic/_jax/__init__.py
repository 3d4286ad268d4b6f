"""The one seam to what JAX does not publish, and the only place that branches on a JAX version.

Checked on jax 0.10.2 and 0.12.0.1. Each branch says which version it is for and why.
"""

from remat_magic._jax.caches import Generation, tracing
from remat_magic._jax.checkpoints import (
    NAME_PRIMITIVE,
    checkpoint_body,
    checkpoint_name_of,
    checkpoint_policy,
    is_checkpoint,
    is_primal_left,
    name_equation,
    old_checkpoint,
    replace_checkpoint,
)
from remat_magic._jax.equations import high_params, name_stack, primitive_name, scan_split, traceback_of, with_traceback
from remat_magic._jax.jaxprs import (
    as_function,
    consts_of,
    fresh_var,
    function_name,
    is_dropped,
    is_jaxpr,
    is_literal,
    like_tuple,
    open_jaxpr,
    pretty,
    replace_eqns,
    replace_vars,
    telling_var,
    with_body,
)
from remat_magic._jax.settings import JAX_VERSION, default_device, remat3, thread_settings, x64
from remat_magic._jax.stale import stale_traces
from remat_magic._jax.types import is_key, memory_space, short_dtype, zero_keys

__all__ = [
    "JAX_VERSION",
    "NAME_PRIMITIVE",
    "Generation",
    "as_function",
    "checkpoint_body",
    "checkpoint_name_of",
    "checkpoint_policy",
    "consts_of",
    "default_device",
    "fresh_var",
    "function_name",
    "high_params",
    "is_checkpoint",
    "is_dropped",
    "is_jaxpr",
    "is_key",
    "is_literal",
    "is_primal_left",
    "like_tuple",
    "memory_space",
    "name_equation",
    "name_stack",
    "old_checkpoint",
    "open_jaxpr",
    "pretty",
    "primitive_name",
    "remat3",
    "replace_checkpoint",
    "replace_eqns",
    "replace_vars",
    "scan_split",
    "short_dtype",
    "stale_traces",
    "telling_var",
    "thread_settings",
    "traceback_of",
    "tracing",
    "with_body",
    "with_traceback",
    "x64",
    "zero_keys",
]
