"""The one seam to what JAX does not publish, and the only place that branches on a JAX version.

What it is tested with is in ``private.TESTED``. Each branch says which version it is for and why.
"""

# pyright: reportUnusedImport=false
# What is imported here is handed on, as `_jax.bodies`.

from remat_magic._jax.bodies import (
    Body,
    bodies,
    label_of,
    map_jaxprs,
    map_rule,
    perturbed_operands,
    rearranged,
    rule_inputs,
    unchecked,
)
from remat_magic._jax.caches import Generation, tracing
from remat_magic._jax.checkpoints import (
    checkpoint_body,
    checkpoint_equation,
    checkpoint_name_of,
    checkpoint_policy,
    is_checkpoint,
    is_high_checkpoint,
    is_primal_left,
    name_equation,
    old_checkpoint,
    policy_says_of_name,
    remat3,
    replace_checkpoint,
)
from remat_magic._jax.collectives import communication
from remat_magic._jax.compile_only import ENVIRONMENT, QUICK, bytecode, calls_back, compile_program
from remat_magic._jax.frames import ELSEWHERE, equations_of, inputs_of, makers, staged, tracebacks, variables
from remat_magic._jax.gradients import Vmaps, holding, is_holding, is_staged, manual_axes, not_holding, of_one_trace
from remat_magic._jax.hlo import Instruction, Module, modules_of, read_dump, trips
from remat_magic._jax.jaxprs import (
    argument_names,
    as_function,
    closed,
    constant_keys,
    consts_of,
    do_the_same,
    fresh_rows,
    fresh_var,
    function_name,
    has_effects,
    is_dropped,
    is_jaxpr,
    is_literal,
    name_stack,
    open_jaxpr,
    part,
    pretty,
    replace_eqns,
    replace_vars,
    structure,
    telling_var,
    traceback_of,
    untransformed_scopes,
    use_of,
    with_body,
    with_outputs,
    with_traceback,
    writes_to_inputs,
)
from remat_magic._jax.primitives import (
    MATMULS,
    carried_operands,
    donated,
    has_backward_rule,
    is_addition,
    is_barrier,
    is_broadcast,
    is_call,
    is_cast,
    is_check,
    is_cond,
    is_custom_rule,
    is_exponential,
    is_jit,
    is_logarithm,
    is_matmul,
    is_one_hot,
    is_placeholder,
    is_plain,
    is_refused,
    is_reversed,
    is_rounding,
    is_scan,
    is_shard_map,
    is_sum,
    is_transparent,
    is_while,
    lanes_of_convolution,
    map_params,
    only_moves,
    params_key,
    policy_says,
    primitive_name,
    printing,
    replace_scan,
    rows_put,
    same_params,
    scan_body,
    scan_length,
    scan_split,
    takes_bfloat16,
)
from remat_magic._jax.private import JAX_VERSION, Lack, is_tested, lacks, reading, require
from remat_magic._jax.propagation import propagated
from remat_magic._jax.settings import (
    FOLLOWS_POLICIES,
    LARGEST_SHARE_OF_GPU,
    default_device,
    has_begun,
    memory_limit,
    runs_on_cpu,
    share_of_gpu,
    thread_settings,
    x64,
)
from remat_magic._jax.shardings import (
    automatic_devices,
    automatic_devices_in,
    called_whole,
    devices_of,
    equation_of_one,
    is_abstract,
    is_replicated,
    keeps_shape,
    mapped_devices,
    mapped_twice,
    mesh_devices,
    mesh_in_force,
    of_one_device,
    placed,
    sharding_text,
    spec_types,
    spread_like,
    type_in_mesh,
    untold_axes,
)
from remat_magic._jax.simulated import automatic_mesh, on_devices_here
from remat_magic._jax.stale import stale_traces
from remat_magic._jax.types import (
    is_complex,
    is_key,
    local_shape,
    memory_space,
    narrowed,
    nbytes,
    short_dtype,
    tiled_nbytes,
    type_text,
    zero_keys,
)
from remat_magic._jax.vmaps import NO_BREAK, VmapCall, has_other_bits, mapping, why_no_vmaps
from remat_magic._jax.watch import Jitted, Stopped, find, watching
from remat_magic._jax.wrappers import behind_boundary, is_boundary, is_call_of_jitted
from remat_magic._jax.xla_costs import Told, rematerialized, xla_communicated, xla_counts
