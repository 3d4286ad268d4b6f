"""XLA's own numbers: the same as of a program written by hand, on one device and on several."""

import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from remat_magic import _jax
from remat_magic.measuring import measure as module
from tests.eight_devices import eight
from tests.programs import KINDS, PROGRAMS, f32

OPTIONS = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
policies = jax.checkpoint_policies


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(jnp.sin(x @ w) @ w)
    return (x**2).sum()


LAYERS = (layers, ([jax.ShapeDtypeStruct((64, 64), "float32")] * 4, jax.ShapeDtypeStruct((32, 64), "float32")))


def by_hand(fun, args, policy=None, options=OPTIONS, argnums=(0, 1)):
    """The program that a user would write to look at XLA's numbers."""
    wrapped = fun if policy is None else jax.checkpoint(fun, policy=policy)
    return jax.jit(jax.value_and_grad(wrapped, argnums)).lower(*args).compile(compiler_options=options)


@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_bytes_and_flops_are_those_of_a_program_written_by_hand(policy, remat3):
    fun, args = LAYERS
    measured = rm.trace(fun, *args).measure(policy or "none")
    plain = by_hand(fun, args, policy and getattr(policies, policy))
    memory = plain.memory_analysis()
    assert measured.temp_bytes == memory.temp_size_in_bytes
    assert measured.output_bytes == memory.output_size_in_bytes
    assert measured.peak_bytes == memory.peak_memory_in_bytes
    assert measured.argument_bytes == memory.argument_size_in_bytes == 4 * 64 * 64 * 4 + 32 * 64 * 4
    assert measured.flops == plain.cost_analysis()["flops"]
    assert measured.bytes_accessed == plain.cost_analysis()["bytes accessed"]
    assert measured.total_bytes == measured.temp_bytes + measured.argument_bytes + measured.output_bytes


@functools.cache
def counts_of_steps(steps, outer=1):
    def fun(w, x):
        def body(x, _):
            return jnp.sin(x @ w), None

        def around(x, _):
            return jax.lax.scan(body, x, None, steps)[0], None

        return jax.lax.scan(around, x, None, outer)[0].sum()

    return rm.trace(fun, f32(64, 64), f32(32, 64)).measure("none")


def flops_of_steps(steps, outer=1):
    return counts_of_steps(steps, outer).flops


@pytest.mark.slow
def test_bytes_accessed_have_the_bodies_of_loops_as_often_as_they_run():
    """Each step writes what it saves, 32 x 64 numbers twice (the value and its cosine), and reads it again."""
    ten, eleven, thirty = (counts_of_steps(steps).bytes_accessed for steps in (10, 11, 30))
    assert eleven - ten > 2 * 2 * 32 * 64 * 4
    # Within what XLA writes otherwise for another number of steps, such as the stack of what is saved.
    assert thirty == pytest.approx(ten + 20 * (eleven - ten), rel=0.01)


@pytest.mark.slow
def test_flops_have_the_bodies_of_loops_as_often_as_they_run():
    """XLA counts them once. Each step has three products, of 2 x 32 x 64 x 64 each, and what is elementwise."""
    products = 3 * 2 * 32 * 64 * 64
    ten, step = flops_of_steps(10), flops_of_steps(11) - flops_of_steps(10)
    assert products < step < 1.1 * products
    assert flops_of_steps(30) == ten + 20 * step
    assert 0 <= ten - 10 * step < step / 2  # what is outside of the loop
    once = flops_of_steps(10, 5)
    assert flops_of_steps(10, 8) - once == flops_of_steps(10, 11) - flops_of_steps(10, 8) == pytest.approx(3 * ten, 0.1)


def test_flops_of_loops_that_run_unknown_often_are_unknown():
    def fun(w, x):
        n = jax.lax.while_loop(lambda n: n < w.sum(), lambda n: n + 1, 0.0)
        return (x @ w).sum() * n

    def branches(w, x):
        loop = lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, 10)[0]  # noqa: E731
        return jax.lax.cond(x.sum() > 0, loop, jnp.cos, x).sum()

    for function in (fun, branches):
        assert rm.trace(function, f32(64, 64), f32(32, 64), wrt="x").measure("none").flops is None


@jax.checkpoint
def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w)


def scanned_layers(ws, x):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2).sum()


@pytest.mark.slow
def test_a_checkpoint_shows_in_the_temporary_bytes_of_a_scan(remat3):
    """As in a program written by hand."""
    fun, args = scanned_layers, (jax.ShapeDtypeStruct((8, 64, 64), "float32"), LAYERS[1][1])
    trace = rm.trace(fun, *args)
    names = ("none", "dots_saveable", "nothing_saveable")
    measured = [trace.measure(name).temp_bytes for name in names]
    assert measured == sorted(measured, reverse=True)
    assert measured[0] > 2 * measured[2]
    assert measured[2] == by_hand(fun, args).memory_analysis().temp_size_in_bytes  # its sites save nothing as written


def _three():
    fun, args = PROGRAMS["three_layers"]
    return fun, *args


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_program_is_measured(name):
    fun, args = PROGRAMS[name]
    measured = rm.trace(fun, *args).measure("nothing_saveable", "function", inputs="random", runs=1)
    assert measured.error == ""
    assert measured.run_seconds > 0
    assert measured.runs == 1


def test_random_inputs_suit_every_dtype():
    def f(x, z, h, key, index, flag):
        y = jnp.where(flag, x[index] * h.astype(jnp.float32), jax.random.normal(key, (3,)))
        return (y * jnp.abs(z)).sum()

    args = (
        jnp.ones((4, 3)),
        jnp.ones(3, "complex64"),
        jnp.ones(3, "bfloat16"),
        jax.random.key(7),
        jnp.array([2, 1, 0]),
        jnp.array(True),
    )
    assert rm.trace(f, *args, wrt=(0, 1, 2)).measure("none", inputs="random").error == ""


def test_runs_of_given_arrays_and_keeps_none_of_them():
    fun, args = LAYERS
    trace = rm.trace(fun, *args)
    arrays = ([jnp.ones((64, 64)) for _ in range(4)], jnp.ones((32, 64)))
    measured = trace.measure("none", inputs=(arrays, {}), runs=2)
    assert (measured.error, measured.runs) == ("", 2)
    assert not arrays[1].is_deleted()  # nothing was donated
    held = [weakref.ref(array) for array in jax.tree.leaves(arrays)]
    del arrays
    gc.collect()
    assert [ref() for ref in held] == [None] * 5


def test_the_function_does_not_run_again():
    ran = []

    def f(x):
        ran.append(x)
        return jnp.sin(x).sum()

    trace = rm.trace(f, jnp.ones(3))
    trace.measure("none", inputs="random")
    trace.measure("nothing_saveable", inputs="random")
    assert len(ran) == 1


def loss_of_layers(params, x):
    for w in params:
        x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)
    return (x**2).mean()


def with_momentum(params, momentum, x):
    loss, gradients = jax.value_and_grad(loss_of_layers)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss


@pytest.mark.slow
@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_a_training_step_is_measured_as_compiling_it_by_hand(donated, remat3):
    """The whole of it, optimizer and donation included, as written and under a policy; on the arrays of a call."""
    step = jax.jit(with_momentum, donate_argnums=donated)
    weights = [jnp.eye(32) * (1 + number / 10) for number in range(4)]
    args = weights, jax.tree.map(jnp.zeros_like, weights), jnp.ones((64, 32))
    trace = rm.trace(step, *args)
    for policy, theirs in (
        ("as_written", step),
        ("none", jax.jit(trace.function("none"), donate_argnums=donated)),
    ):
        measured = trace.measure(policy, inputs=(args, {}), runs=2)
        memory = theirs.lower(*args).compile(compiler_options=OPTIONS).memory_analysis()
        assert measured.error == ""
        assert measured.temp_bytes == memory.temp_size_in_bytes
        assert measured.output_bytes == memory.output_size_in_bytes
        assert measured.argument_bytes == memory.argument_size_in_bytes
        assert measured.alias_bytes == memory.alias_size_in_bytes == (8 * 32 * 32 * 4 if donated else 0)
        without_alias = measured.temp_bytes + measured.output_bytes + measured.argument_bytes
        assert measured.total_bytes == without_alias - measured.alias_bytes
        assert measured.run_seconds > 0
    assert not any(array.is_deleted() for array in jax.tree.leaves(args))  # whatever the step donates


def test_static_arguments_and_auxiliary_outputs():
    def f(x, power, *, offset):
        return (x**power + offset).sum(), {"x": x, "text": "kept out"}

    trace = rm.trace(f, jnp.ones(3), 2, offset=1.5, has_aux=True, wrt=0)
    assert trace.measure("none", inputs=((jnp.ones(3), 2), {"offset": 1.5})).error == ""


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (((jnp.ones(3),), {}), "another structure"),
        (((jnp.ones(4), jnp.ones(3)), {}), "the input x is f32[4], and was f32[3] when traced."),
        (((jax.ShapeDtypeStruct((3,), "float32"), jnp.ones(3)), {}), "pass inputs='random'"),
        (((1.0, "text"), {}), "the input x is f32[], and was f32[3]"),
    ],
)
def test_inputs_that_do_not_fit_are_told(inputs, text):
    measured = rm.trace(lambda x, y: (x * y).sum(), jnp.ones(3), jnp.ones(3)).measure("none", inputs=inputs)
    assert text in measured.error
    assert measured.compile_seconds is None


@pytest.mark.parametrize(
    "options", [{"inputs": "given"}, {"inputs": (1, 2)}, {"inputs": {"x": 1}}, {"inputs": "random", "runs": 0}]
)
def test_what_cannot_be_run_is_refused(options):
    with pytest.raises(rm.RematError):
        rm.trace(*_three()).measure("none", **options)


def test_failures_are_sentences(remat2):
    def raises(prim, *args, **params):
        raise ZeroDivisionError("no")

    assert rm.trace(*_three()).measure(raises).error.startswith("the policy ")
    assert "is not a policy" in rm.trace(*_three()).measure("nonesuch").error
    looping = rm.trace(lambda x: jax.lax.while_loop(lambda x: x[0] < 5, jnp.exp, x).sum(), jnp.ones(3))
    assert "no backward pass" in looping.measure().error


def test_xla_failures_are_sentences(monkeypatch):
    def fails(text):
        def compiler(*args):
            raise RuntimeError(text)

        monkeypatch.setattr(module, "compile_for_memory", compiler)
        return rm.trace(*_three()).measure("none").error

    assert fails("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes") == (
        "out of memory: the device could not compile three_layers under none; "
        "choose a policy that saves less, or smaller inputs."
    )
    assert fails("INTERNAL: bad\n  thing. More.") == (
        "JAX could not compile three_layers under none: RuntimeError: INTERNAL: bad thing."
    )


def test_unknown_is_none(monkeypatch):
    class Silent:
        input_shardings = output_shardings = ()

        def memory_analysis(self):
            return None

        def runtime_executable(self):
            raise NotImplementedError

        def as_text(self):
            raise NotImplementedError

    monkeypatch.setattr(module, "compile_for_memory", lambda *args: Silent())
    measured = rm.trace(*_three()).measure("none")
    assert measured.error == ""
    assert (measured.temp_bytes, measured.argument_bytes, measured.output_bytes, measured.flops) == (None,) * 4
    assert measured.total_bytes is None


@pytest.mark.slow
def test_gradients_are_those_of_jax(remat3):
    """The program that is measured computes what jax.grad does."""
    fun, _ = LAYERS
    keys = jax.random.split(jax.random.key(0), 5)
    args = ([jax.random.normal(key, (64, 64)) / 8 for key in keys[:4]], jax.random.normal(keys[4], (32, 64)))
    engine = rm.trace(fun, *args).engine
    gradient = engine.retrace(engine.select("dots_saveable")).gradient()
    value, *gradients = gradient.lowered.compile()(*jax.tree.leaves(args))
    expected_value, expected = jax.value_and_grad(fun, (0, 1))(*args)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for mine, theirs in zip(gradients, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


@eight
def test_bytes_of_sharded_inputs_are_per_device():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def f(w, x):
        return jnp.tanh(jnp.sin(x @ w) @ w).sum()

    def shape(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    w, x = jax.device_put(jnp.ones((32, 32)), everywhere), jax.device_put(jnp.ones((64, 32)), rows)
    plain = rm.trace(f, jnp.ones((32, 32)), jnp.ones((64, 32)))
    measured = [
        plain.measure("none"),  # one device
        plain.measure("none", inputs=((w, x), {})),  # as the inputs lie
        rm.trace(f, w, x).measure("none"),  # as the traced arrays lay
        rm.trace(f, shape(w), shape(x)).measure("none", inputs="random"),
    ]
    with jax.default_device(jax.devices()[2]):
        elsewhere = plain.measure("none", inputs=((jnp.ones((32, 32)), jnp.ones((64, 32))), {}))
    memory = by_hand(f, (w, x)).memory_analysis()
    hand = [memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes]
    found = [
        [m.devices, m.argument_bytes, m.output_bytes, m.temp_bytes, m.runs, m.error] for m in (*measured, elsewhere)
    ]
    one, given, traced, shapes, there = found
    weights, rows = 32 * 32 * 4, 64 * 32 * 4
    assert one[:3] == [1, weights + rows, 4 + weights + rows + 3 * 8]  # XLA counts the table of three pointers
    for several in (given, traced, shapes):
        assert several[0] == 4
        assert several[1] == weights + rows // 4  # weights on each device, a quarter of the rows
        assert several[1:4] == hand
    assert given[4:] == shapes[4:] == [5, ""]
    assert there[:2] == [1, weights + rows]
    assert there[4:] == [5, ""]


def test_versions_have_the_option():
    """Where XLA drops it, temporary bytes on CPU need another look."""
    lowered = jax.jit(jnp.sin).lower(1.0)
    module.compile_for_memory(lowered, "cpu")
    with pytest.raises(Exception, match="No such compile option"):
        lowered.compile(compiler_options={"xla_cpu_no_such_option": False})
    assert _jax.default_device().platform == "cpu"


@pytest.mark.parametrize(
    ("before", "after", "told"), [(100, 250, 250), (100, 100, None), (None, 250, 250), (None, None, None)]
)
def test_what_the_allocator_had_is_told_where_the_runs_made_it_rise(before, after, told, monkeypatch):
    """It never falls: where something before needed more, it says nothing of the runs."""
    said = iter([before, after])
    monkeypatch.setattr(_jax, "most_allocated", lambda device: next(said))
    fun, args = LAYERS
    trace = rm.trace(fun, *args)
    measured = trace.measure("none", inputs="random", runs=1)
    assert measured.allocated_bytes == told
    table = trace.compare(["none"], measurements=[measured])
    assert ("allocator's peak (measured)" in table._repr_html_().replace("&#x27;", "'").replace("&#39;", "'")) == (
        told is not None
    )


def test_the_trace_is_free_while_xla_compiles(monkeypatch):
    compiler, free = module.compile_for_memory, []

    def compiling(*args):
        free.append(in_thread(lambda: trace.lock.acquire(blocking=False) and trace.lock.release() is None))
        return compiler(*args)

    fun, args = LAYERS
    trace = rm.trace(fun, *args)
    monkeypatch.setattr(module, "compile_for_memory", compiling)
    assert trace.measure("none").error == ""
    assert free == [True]


def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(600)
    return found[0]


def test_settings_are_taken_along_and_given_back():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    device = jax.devices()[0]

    def current():
        return (
            jax.config.jax_enable_x64,
            jax.config.jax_default_device,
            jax.sharding.get_abstract_mesh().axis_names,
        )

    usual = current()
    with jax.enable_x64(True), jax.default_device(device), jax.set_mesh(mesh):
        inside = current()
        assert inside == (True, device, ("data",))
        settings = _jax.thread_settings()
        assert in_thread(current) == usual  # a new thread has none of them by itself

    def there():
        with settings():
            taken = current()
        return taken, current()

    assert in_thread(there) == (inside, usual)
    assert current() == usual


def test_old_meshes_are_taken_along():
    from jax._src.mesh import thread_resources

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    thread_resources.stack.append(thread_resources.stack[-1].with_mesh(mesh))
    try:
        settings = _jax.thread_settings()
    finally:
        thread_resources.stack.pop()

    def there():
        with settings():
            taken = thread_resources.env.physical_mesh
        return taken, thread_resources.env.physical_mesh.empty

    assert in_thread(there) == (mesh, True)
