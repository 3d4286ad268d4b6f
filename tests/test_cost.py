"""Costs of loops, calls and whole programs, and that nothing is left out in silence."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from remat_magic._jax.formulas import FLOPS
from remat_magic._jax.primitives import names
from remat_magic._jax.trips import trip_count
from remat_magic.facts.cost import FREE, Cost, equation_cost, jaxpr_cost
from remat_magic.records import dearest
from remat_magic.views.attribution import line_rows
from remat_magic.views.rows import recomputed_rows
from tests.cost_helpers import REMATS, S, cost_of, flops_of, only, under

# -------------------------------------------------------------------------------------------------------------- algebra


def test_costs_add_and_scale():
    one, other = Cost(3, 5, ("b", "c")), Cost(7, 11, ("a", "c"))
    assert one + other == Cost(10, 16, ("a", "b", "c"))
    assert one.scaled(4) == Cost(12, 20, ("b", "c"))
    assert sum([one, other], FREE) == one + other


# ------------------------------------------------------------------------------------------------------ loops and calls


def product(n):
    return 2 * n**3


def test_scan_is_its_body_times_its_length():
    f = lambda x, ws: lax.scan(lambda c, w: (c @ w, c), x, ws)  # noqa: E731
    cost = cost_of(f, S(8, 8), S(12, 8, 8))
    assert cost == Cost(12 * product(8), 12 * 3 * 8 * 8 * 4)


def test_scans_multiply():
    def outer(x, _):
        return lax.scan(lambda c, _: (c @ c, None), x, length=5)[0], None

    assert flops_of(lambda x: lax.scan(outer, x, length=7)[0], S(4, 4)) == 35 * product(4)
    assert flops_of(lambda x: lax.scan(outer, x, length=0)[0], S(4, 4)) == 0


def test_static_fori_loop_is_counted():
    assert flops_of(lambda x: lax.fori_loop(3, 10, lambda i, x: x @ x, x), S(4, 4)) == 7 * (product(4) + 1)


def test_conditional_costs_its_worst_branch():
    branches = [lambda x: x, lambda x: x @ x @ x, lambda x: jnp.sin(x)]
    jaxpr = jax.make_jaxpr(lambda i, x: lax.switch(i, branches, x))(S(dtype="int32"), S(8, 8))
    assert equation_cost(only(jaxpr, "cond")).flops == 2 * product(8)


def test_uncosted_in_any_branch_is_named():
    callback = lambda x: jax.pure_callback(lambda x: x, x, x)  # noqa: E731
    cost = cost_of(lambda p, x: lax.cond(p, lambda x: x @ x, callback, x), S(dtype="bool"), S(8, 8))
    assert cost.flops == product(8)
    assert cost.uncosted == ("pure_callback",)


COUNTED = {
    "up": (lambda s: s[0] < 5, lambda s: s[0] + 1, 0, 5),
    "up to": (lambda s: s[0] <= 5, lambda s: s[0] + 1, 0, 6),
    "mirrored": (lambda s: s[0] < 10, lambda s: 3 + s[0], 1, 3),
    "bound on the left": (lambda s: lax.gt(np.int32(10), s[0]), lambda s: s[0] + np.int32(4), np.int32(0), 3),
    "down": (lambda s: s[0] > 0, lambda s: s[0] - 2, 7, 4),
    "down to": (lambda s: s[0] >= 0, lambda s: s[0] - 2, 8, 5),
    "never": (lambda s: s[0] < 5, lambda s: s[0] + 1, 9, 0),
}


@pytest.mark.parametrize(("condition", "step", "start", "times"), COUNTED.values(), ids=COUNTED)
def test_trip_counts(condition, step, start, times):
    f = lambda x: lax.while_loop(condition, lambda s: (step(s), s[1] @ s[1]), (start, x))  # noqa: E731
    jaxpr = jax.make_jaxpr(f)(S(4, 4))
    assert trip_count(only(jaxpr, "while")) == times
    assert flops_of(f, S(4, 4)) == times * (product(4) + 1) + times + 1
    ran = 0
    while condition((start,)):  # the same loop, run
        start, ran = step((start,)), ran + 1
    assert ran == times


UNCOUNTED = {
    "data": lambda n, x: lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, x),
    "bound": lambda n, x: lax.fori_loop(0, n, lambda i, x: x @ x, x),
    "wrong way": lambda n, x: lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] - 1, s[1] @ s[1]), (0, x)),
    "no step": lambda n, x: lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] * 2, s[1] @ s[1]), (1, x)),
    "changing step": lambda n, x: lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + n, s[1] @ s[1]), (1, x)),
    "float": lambda n, x: lax.while_loop(lambda s: s[0] < 5.0, lambda s: (s[0] + 1.0, s[1] @ s[1]), (0.0, x)),
}


@pytest.mark.parametrize("f", UNCOUNTED.values(), ids=UNCOUNTED)
def test_loops_of_unknown_length_count_once_and_say_so(f):
    jaxpr = jax.make_jaxpr(f)(S(dtype="int32"), S(4, 4))
    assert trip_count(only(jaxpr, "while")) is None
    cost = jaxpr_cost(jaxpr)
    assert cost.uncosted == ("while",)
    assert product(4) <= cost.flops <= product(4) + 2 * 16


@jax.custom_jvp
def custom_jvp(x):
    return x @ x


custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), tangents[0]))


@jax.custom_vjp
def custom_vjp(x):
    return x @ x


custom_vjp.defvjp(lambda x: (x @ x, x), lambda x, ct: (ct,))

CALLS = {
    "jit": jax.jit(lambda x: x @ x),
    "nested jit": jax.jit(jax.jit(lambda x: x @ x)),
    "checkpoint": jax.checkpoint(lambda x: x @ x),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "linear call": lambda x: jax.custom_derivatives.linear_call(lambda r, x: r @ x, lambda r, ct: r.T @ ct, x, x),
    "named": lambda x: checkpoint_name(x @ x, "y"),
    "remat in scan": lambda x: lax.scan(lambda c, _: (jax.checkpoint(lambda c: c @ c)(c), None), x, length=1)[0],
}


@pytest.fixture(params=REMATS)
def remat(request):
    with under(request.param):
        yield request.param


@pytest.mark.parametrize("f", CALLS.values(), ids=CALLS)
def test_calls_cost_their_bodies(f, remat):
    assert flops_of(lambda x: f(x), S(8, 8)) == product(8)


def test_gradient_of_checkpoint_counts_what_runs(remat):
    f = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(x @ w) @ w))
    jaxpr = jax.make_jaxpr(jax.grad(f, (0, 1)))(S(32, 32), S(32, 32))
    assert jaxpr_cost(jaxpr).flops == pytest.approx(7 * product(32), rel=0.05)  # 2 forward, 1 again, 4 backward


def test_dead_equations_can_be_left_out():
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(lambda x: (x @ x, jnp.sin(x)))(x))(S(8, 8))
    assert jaxpr_cost(jaxpr, lambda eqn: eqn.primitive.name != "dot_general") == jaxpr_cost(
        jax.make_jaxpr(jnp.sin)(S(8, 8))
    )
    assert jaxpr_cost(jaxpr, lambda eqn: False) == FREE


def test_shard_map_counts_one_device():
    mesh = Mesh(np.array(jax.devices()[:1] * 4).reshape(2, 2), ("a", "b"))
    body = jax.make_jaxpr(lambda x: x @ x)(S(4, 4))
    eqn = SimpleNamespace(
        primitive=SimpleNamespace(name="shard_map"),
        params={"mesh": mesh, "manual_axes": frozenset("a"), "jaxpr": body},
        invars=body.jaxpr.invars,
        outvars=body.jaxpr.outvars,
    )
    assert equation_cost(eqn).flops == product(4)
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    f = jax.shard_map(lambda x: lax.psum(x @ x, "a"), mesh=mesh, in_specs=P(), out_specs=P())
    assert cost_of(f, S(4, 4)).flops - product(4) in (0, 16)  # JAX drops the psum of what is replicated


def test_linear_solve_counts_the_solver_alone():
    solve = lambda matvec, b: b @ jnp.ones((8, 8))  # noqa: E731
    f = lambda a, b: lax.custom_linear_solve(lambda x: a @ x, b, solve, solve)  # noqa: E731
    assert flops_of(f, S(8, 8), S(8)) == 2 * 8 * 8


# ------------------------------------------------------------------------------------------------------------ uncosted


@pytest.mark.filterwarnings("ignore")
def test_what_no_formula_covers_is_named():
    def f(x):
        y = jax.pure_callback(lambda x: x, x, x) + jax.ffi.ffi_call("unknown", x)(x)
        return lax.igamma(y, y) + y

    cost = cost_of(f, S(16))
    assert cost.uncosted == ("ffi_call", "igamma", "pure_callback")
    assert cost.flops == 3 * 16 - 16
    assert cost.bytes > 0


def test_pallas_kernels_cost_what_their_author_says():
    pl = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, out):
        out[...] = x[...] * 2

    def f(estimate):
        return lambda x: pl.pallas_call(kernel, out_shape=S(8), cost_estimate=estimate)(x)

    assert cost_of(f(None), S(8)) == Cost(0, 64, ("pallas_call",))
    estimate = pl.CostEstimate(flops=8, transcendentals=3, bytes_accessed=70)
    assert cost_of(f(estimate), S(8)) == Cost(11, 70)


def test_high_level_primitives_are_written_out():
    """jax 0.12 has jnp.searchsorted as one primitive, 0.10 as the loop that it stands for."""
    cost = cost_of(lambda a, x: jnp.searchsorted(a, x), S(64), S(5))
    assert cost.uncosted == ()
    assert 5 * 6 <= cost.flops <= 5 * 6 * 20
    assert cost_of(jnp.frexp, S(16)).uncosted == ()


LIST_PRIMITIVES = """
import gc, importlib, json, pkgutil, warnings
warnings.simplefilter("ignore")
import jax._src
from jax.extend.core import Primitive
for module in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
    parts = set(module.name.replace("_", ".").split("."))
    if parts & {"pallas", "test", "mosaic", "internal", "cloud", "debugger", "tpu", "clusters", "thunky"}:
        continue
    try:
        importlib.import_module(module.name)
    except Exception:  # optional dependencies
        pass
print(json.dumps(sorted({object.name for object in gc.get_objects() if isinstance(object, Primitive)})))
"""

BY_THEIR_BODIES = names(
    """
    call call_hi_primitive call_hi_primitive_linearized closed_call composite compute_on cond core_call
    custom_jvp_call custom_jvp_call_jaxpr custom_linear_solve custom_partitioning custom_vjp_call custom_vmap_call
    eval_jaxpr jaxpr_call jit linear_call mpmd_map pallas_call reduce reduce_window remat2 remat_opt run_scoped
    run_state scan scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_scatter shard_map
    while xla_metadata_call core_map
    """
)
UNCOSTED = {
    "another program, which its equation does not show": """
        buffer_callback call_exported cudnn_fusion custom_fusion fusible ffi_call io_callback pure_callback
        tpu_custom_call xla_ffi_call
    """,
    "iterates until it converges": "igamma igammac igamma_grad_a regularized_incomplete_beta random_gamma",
    "its algorithm is the backend's": "rng_bit_generator rng_uniform",
    "only within kernels, whose bodies are not entered": """
        bitcast conv delay dma_start dma_wait get_barrier_semaphore masked_load masked_swap matmul_acc_lhs
        matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs num_programs pack_elementwise program_id
        program_order roll semaphore_read semaphore_signal semaphore_wait stochastic_round unpack_elementwise
    """,
    "only while JAX traces or differentiates": """
        box_get box_set create_linear custom_lin log_extend log_read new_box new_log prng_join prng_random_bits
        prng_seed prng_split trace_value unreachable
    """,
}


def test_every_primitive_of_jax_is_covered_or_known_not_to_be():
    ran = subprocess.run(
        [sys.executable, "-c", LIST_PRIMITIVES], capture_output=True, text=True, check=True, timeout=300
    )
    registered = set(json.loads(ran.stdout.splitlines()[-1]))
    assert len(registered) > 250
    known = {name for names in UNCOSTED.values() for name in names.split()}
    thunks = {name for name in registered if name.startswith("thunky.")}  # of XLA:GPU's own instruction language
    assert registered - set(FLOPS) - BY_THEIR_BODIES - known - thunks == set()
    assert known.isdisjoint(FLOPS)


# ----------------------------------------------------------------------------------- what is repeated, and how often


def more_than_without(trace, policy):
    """The FLOPs that the backward pass has more under a policy: what it repeats."""
    backward = trace.report(policy, "function").backward_flops
    return backward - trace.report("none", "function").backward_flops


def turning(condition):
    """A product, and a loop of products whose result the derivative multiplies by."""

    def f(w, x, n):
        y = jnp.sin(x @ w)
        fixed, weights = lax.stop_gradient(y), lax.stop_gradient(w)
        turned = lax.while_loop(condition(n), lambda s: (s[0] + 1, jnp.sin(s[1] @ weights)), (0, fixed))[1]
        return jnp.sum(y * turned)

    return rm.trace(f, S(32, 32), S(8, 32), S(dtype="int32"))


PRODUCT = 2 * 8 * 32 * 32


@pytest.mark.parametrize(("turns", "condition"), [(1, lambda n: lambda s: s[0] < n), (7, lambda n: lambda s: s[0] < 7)])
def test_a_repeated_loop_costs_its_turns(remat, turns, condition):
    """One turn at least where their number is not known, so that no plan takes a loop for free."""
    trace = turning(condition)
    report = trace.report("nothing_saveable", "function")
    inside = [equation for equation in report.recomputed if "while" in equation.path]
    products = [equation for equation in inside if equation.primitive == "dot_general"]
    assert [(each.flops, each.times, each.known) for each in products] == [
        (turns * PRODUCT, None if turns == 1 else turns, turns != 1)
    ]
    assert report.recomputed_flops == more_than_without(trace, "nothing_saveable")
    assert ("while" in report.uncosted) == (turns == 1)
    plan = trace.plan(1.0, "function")
    assert plan.recomputed_flops < turns * PRODUCT


def switching(n, w, x):
    """Of one product, of two, and of none."""
    branches = [lambda x: jnp.tanh(x @ w), lambda x: jnp.tanh(jnp.tanh(x @ w) @ w), lambda x: x]
    return jnp.sum(lax.switch(n, branches, x) ** 2)


def looping_switch(n, w, x):
    return lax.scan(lambda c, i: (c + switching(i + n, w, x * c), None), 1.0, jnp.arange(5))[0]


@pytest.mark.parametrize(("fun", "times"), [(switching, 1), (looping_switch, 5)])
def test_a_repeated_conditional_costs_its_dearest_branch(remat, fun, times):
    """And so says everything that adds up what is recomputed."""
    trace = rm.trace(fun, S(dtype="int32"), S(32, 32), S(8, 32))
    report = trace.report("nothing_saveable", "function")
    products = [equation for equation in report.recomputed if equation.primitive == "dot_general"]
    assert len(products) == 3  # in two branches
    assert sum(equation.flops for equation in dearest(products)) == 2 * times * PRODUCT
    assert 2 * times * PRODUCT < report.recomputed_flops < 2.2 * times * PRODUCT
    assert report.repeated_flops + report.deferred_flops == report.recomputed_flops <= report.backward_flops
    assert sum(kernel.flops * kernel.times for kernel in report.recomputed_kernels) == report.recomputed_flops
    plan = trace.plan(0, "function")
    assert (plan.predicted_flops, plan.recomputed_flops) == (plan.recomputed_flops, report.recomputed_flops)
    rows = [row for row in recomputed_rows(report) if row.primitive == "dot_general"]
    assert all(row.flops <= 2 * times * PRODUCT for row in rows)
    assert max(row.flops for row in line_rows(report)) <= report.recomputed_flops
