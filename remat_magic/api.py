"""The public ``Trace``: all that can be asked about a function, each question answered by the layer that knows.

It holds no logic. A layer that only some questions need is imported when one of them is asked: importing takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from remat_magic import devices
from remat_magic.engine.catching import Watch
from remat_magic.engine.engine import Engine
from remat_magic.errors import printable
from remat_magic.facts.facts import Facts
from remat_magic.records import (
    Advice,
    Choice,
    Edit,
    Effort,
    Fit,
    FitChoice,
    GradientCall,
    GradientDifference,
    Listed,
    Measurement,
    Note,
    Plan,
    Report,
    Site,
    SourceText,
    StepMemory,
    Timeline,
    WhatIf,
)

if TYPE_CHECKING:
    from remat_magic.devices import Device
    from remat_magic.engine.signature import Leaf
    from remat_magic.records.comparison import Comparison, Places

Policy = str | Plan | FitChoice | Callable[..., Any]
"""A key (see :mod:`remat_magic.policies`), a plan, a choice of ``fit``, or a policy object of JAX's or your own."""

At = str | Mapping[str, Policy] | None
"""``"function"``, ``"sites"`` (all of them), a site's key, or a mapping of site key to policy; None: ``default_at``."""

Inputs = Literal["random"] | tuple[tuple[Any, ...], Mapping[str, Any]]
"""What to run on: ``"random"`` (normal numbers, zeros in place of integers), or a call's pair ``(args, kwargs)``."""


def trace(
    fun: Callable[..., Any],
    /,
    *args: Any,
    wrt: int | str | Sequence[int | str] | None = None,
    has_aux: bool = False,
    gradient: str | None = None,
    **kwargs: Any,
) -> Trace:
    """Trace ``fun(*args, **kwargs)`` for inspection. Nothing runs on a device or is allocated there.

    The Python code of ``fun`` runs exactly once, or twice where it takes gradients inside and is differentiated itself.
    If ``fun`` has parameters named ``wrt``, ``has_aux`` or ``gradient``, pass a ``functools.partial``.

    A training step takes a gradient by itself (``jax.grad``, ``value_and_grad``, ``vjp``, or what flax,
    equinox and optax make of these): the trace is then of that gradient, and ``Trace.function`` gives the step back.
    What is taken for a step gives back something like what it differentiates, or nothing that depends on the gradient;
    other functions that take gradients inside, such as a loss with a penalty, are differentiated themselves.

    The object of a bound method, a model that is called and what a partial holds are arguments like the others; but for
    the partial's they are differentiated too.

    Args:
        fun: the function to differentiate, or a training step.
        *args: arrays, ``jax.ShapeDtypeStruct``, pytrees of them, or static values (strings, callables, modules, None,
            bools and ints), which stay as they are.
        wrt: the arguments to differentiate, by number or name: one or a sequence. Default: every floating-point leaf,
            but for Python numbers inside objects of a class (configs, models), which are settings.
        has_aux: whether ``fun`` returns a pair of output and auxiliary data, as for ``jax.grad``. Default: no.
        gradient: the key of one of ``Trace.gradients``, or ``"none"`` to differentiate ``fun`` itself. Default: of a
            training step the gradient that saves most; ``fun`` itself where ``wrt`` or ``has_aux`` is given, or where
            it is no step.
        **kwargs: keyword arguments, of the same kinds as ``args``.

    Raises:
        RematError: nothing can be differentiated, ``wrt`` asks for what cannot be, or there is no such ``gradient``.
        Exception: whatever ``fun`` itself raises.
    """
    return Trace(Engine(fun, args, kwargs, wrt, has_aux, gradient))


def catch(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
    """Run ``fun(*args, **kwargs)``, such as ``main()``, until it calls its training step, and trace that call.

    The step does not run, nor does what comes after it; see ``catching``, which has options.

    Args:
        fun: the function to run.
        *args: its arguments.
        **kwargs: its arguments by name.

    Raises:
        RematError: it took no gradient and ran to its end, or its step cannot be traced.
        Exception: whatever ``fun`` itself raises before.
    """
    with catching() as caught:
        fun(*args, **kwargs)
    return caught.trace


def catching(step: str | None = None, *, also_threads: bool = False) -> Caught:
    """Run the code of a ``with`` block until it calls its training step, and trace that call.

    What takes a gradient first is the step, jitted or not. It does not run; what came before it did, and ``finally``
    and ``__exit__`` run on the way out. What was run before stays compiled, and so does what runs here.

    Args:
        step: the name of the function that is the step, where others take gradients before it: these then run.
        also_threads: whether threads that were there before are stopped too. Default: this thread and those that the
            block starts.

    Raises:
        RematError: something is being caught already, or this JAX cannot be asked (the sentence says what it lacks).
    """
    return Caught(
        lambda call: Trace(Engine(call.function, call.args, dict(call.kwargs), None, False)), step, also_threads
    )


class Caught(Watch):
    """What ``catching`` has caught, as soon as it has."""

    @property
    def trace(self) -> Trace:
        """The trace of the call.

        Raises:
            RematError: nothing took a gradient, or what did cannot be traced; one sentence says why.
        """
        return self.answer()

    @property
    def function(self) -> Callable[..., Any] | None:
        """The step, the very object that was called; None as long as nothing is caught."""
        return None if self.call is None else self.call.function

    @property
    def args(self) -> tuple[Any, ...]:
        """What it was called with."""
        return () if self.call is None else self.call.args

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """What it was called with by name."""
        return {} if self.call is None else self.call.kwargs


class Trace:
    """A function, traced once. Every policy after that is a retrace of its jaxpr. :func:`trace` makes it.

    Any thread may use it. ``report`` explains the arguments that most methods share: ``policy`` (what decides), ``at``
    (the place that it goes to), ``namespace`` (where your own policies are looked up by name) and ``device`` (as on
    which the peak is, and whose data sheet times in seconds are estimated by; by default the device that JAX runs on,
    if it is known, and peaks as on its CPU). The attributes ``engine``, ``facts`` and ``lock`` are for the package
    itself, and may change.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.facts = Facts(engine)
        self.lock = engine.lock

    def __repr__(self) -> str:
        return f"<Trace of {printable(self.signature)}>"

    # -------------------------------------------------------------------------------------------------- what it is of

    @property
    def function_name(self) -> str:
        """The function's own name."""
        return self.engine.primal.name

    @property
    def signature(self) -> str:
        """One line: ``loss(params: 3 leaves 192 B, x f32[4]) -> f32[]``."""
        return self.engine.primal.text

    @property
    def wrt(self) -> tuple[str, ...]:
        """What is differentiated: arguments by name, or leaves where only some of an argument's are."""
        return self.engine.primal.signature.wrt

    @property
    def arguments(self) -> tuple[Leaf, ...]:
        """The array leaves of the arguments, as types."""
        return self.engine.primal.signature.arrays

    @property
    def sites(self) -> tuple[Site, ...]:
        """The places where the function applies ``jax.checkpoint``, and then those where it could.

        Those that are ``possible`` are functions called without a checkpoint: helpers, bodies of loops, methods of
        modules, jitted functions. ``code`` is what to write there, with a comment where calls must change for it. Every
        ``at`` takes their keys too, and ``"block[::2]"`` for every second call of ``block``, ``"block[:8]"`` for the
        first eight, ``"block/3"`` for one checkpoint around each three calls after one another: three steps of a
        ``scan``, ``map`` or ``fori_loop`` that makes one in each step. Each kind is in the order of the first call.
        """
        return (*self.engine.primal.table.sites, *self.engine.primal.possible.sites)

    @property
    def groups(self) -> tuple[Site, ...]:
        """Steps of loops that are worth one checkpoint around several, as places.

        For each loop of four steps or more one, of about the square root of all its steps; ``code`` is what to write.
        Other numbers of steps work as ``at`` too: see ``sites``.
        """
        return self.engine.primal.possible.groups

    @property
    def parts(self) -> tuple[Site, ...]:
        """What can be done in parts, as places: ``"vmap(render) in 16"`` is that call in 16 parts of its examples.

        Each part is under a checkpoint, whose policy is that of the place; ``"none"`` is parts without one.
        ``"batch in 8"`` is the gradient of a training step in 8 microbatches, a scan over parts of the batch that adds
        up their gradients: only where the loss is known to be a sum or a mean over the examples. A policy there is one
        around the loss of each part. Any number that divides the examples works as ``at``; ``code`` is what to write
        for this one. ``"head in 4"`` is each call of a function ``head`` in 4 parts, which is not listed here: what it
        returns is to be a sum, a mean or values of each example.
        """
        return (*self.vmaps, *self.engine.cut_batch)

    @property
    def vmaps(self) -> tuple[Site, ...]:
        """Those of ``parts`` that are calls of ``vmap``, which are known without another trace."""
        return tuple(vmap.site for vmap in self.engine.vmaps.values() if vmap.divisors)

    @property
    def gradients(self) -> tuple[GradientCall, ...]:
        """The gradients that the function takes inside, as a training step does; the one that saves most first."""
        return self.engine.gradients

    @property
    def gradient(self) -> GradientCall | None:
        """The one of ``gradients`` that the trace is of; None where it is of the function's own derivative."""
        return self.engine.inside and self.engine.inside.call

    @property
    def step_name(self) -> str:
        """The name of the training step that takes the gradient; empty where the trace is of no gradient in one."""
        called = any(note.kind == "gradient-of-step" for note in self.notes)
        return self.engine.given.name if called else ""

    def of_gradient(self, key: str) -> Trace:
        """The trace of another gradient that the function takes inside, or of the function's own derivative.

        Args:
            key: of one of ``gradients``, or ``"none"``.

        Raises:
            RematError: there is no such gradient, or the function itself cannot be differentiated.
        """
        return Trace(self.engine.of_gradient(key))

    @property
    def postponed(self) -> bool:
        """Whether figures are of all devices together only since XLA would take long: ``of_one_device`` asks it."""
        return self.engine.postponed

    def of_one_device(self) -> Trace:
        """The same trace with every figure of one device, for which XLA is asked how values are spread.

        That is asked at once where it takes a second or two. Of more operations than that figures are of all devices
        together until this is called (``postponed`` says so): about a second for each thousand operations, and as long
        again for each choice of a policy. Plans and what was compiled hold for both.

        Returns:
            A new trace, or this one where figures are one device's already.

        Raises:
            RematError: XLA cannot be asked; the sentence says why.
        """
        engine = self.engine.of_one_device()
        return self if engine is self.engine else Trace(engine)

    @property
    def names(self) -> tuple[str, ...]:
        """Every checkpoint name of the function, in the order of its equations, nested jaxprs included.

        So are names inside the rules of custom derivatives, which show only when these are differentiated.
        """
        return self.engine.names

    @property
    def stale(self) -> tuple[str, ...]:
        """The functions of which JAX still holds an older trace than this one."""
        return self.engine.stale

    @property
    def mesh_devices(self) -> int:
        """How many devices the mesh has that the function's arguments are on; 1 for no mesh."""
        return self.engine.given.mesh_devices

    @property
    def notes(self) -> tuple[Note, ...]:
        """Sentences about the function that a reader of any report must know."""
        return self.engine.notes

    @property
    def sources(self) -> tuple[SourceText, ...]:
        """The source text of what ran, cells and functions, as it was when it was traced."""
        return self.engine.sources

    @property
    def default_at(self) -> str:
        """What ``at=None`` means: the function's own decorator, else its sites, else the whole function."""
        return self.engine.default_at

    def choices(self) -> tuple[Choice, ...]:
        """The policies to choose from for this function; those that take names are filled with its checkpoint names."""
        return self.engine.choices()

    # ----------------------------------------------------------------------------------------------- what a policy does

    def report(
        self,
        policy: Policy = "as_written",
        at: At = None,
        namespace: Mapping[str, Any] | None = None,
        *,
        device: str | Device | None = None,
    ) -> Report:
        """What a policy does: residuals, recomputation, both jaxprs as text.

        Args:
            policy: what decides: a key such as ``"dots_saveable"`` (see :mod:`remat_magic.policies`), a plan, or a
                policy object of JAX's or your own. Default: what the function itself says.
            at: the place that it goes to: ``"function"`` (around the whole function, or instead of its own decorator's
                policy), the key of a site, ``"sites"`` (all of them), or a mapping of site keys to policies. Default:
                ``default_at``.
            namespace: where names in a key that are no policies of JAX's are looked up. Default: nowhere.
            device: a name of ``remat_magic.devices.names()`` or a ``Device``, as on which the estimated peak is, as for
                ``timeline``. Default: as on this machine's CPU.

        Raises:
            RematError: no such policy, site, name or device; or JAX cannot trace the function under it.
        """
        return self.facts.under(policy, at, namespace).report(_device(device))

    def preview(
        self, policy: Policy = "as_written", at: At = None, namespace: Mapping[str, Any] | None = None
    ) -> Report:
        """The report of the forward half alone, which is quicker; the full report where it is already known.

        Its ``complete`` says which of the two it is.
        """
        return self.facts.under(policy, at, namespace).preview

    def timeline(
        self,
        policy: Policy = "as_written",
        at: At = None,
        namespace: Mapping[str, Any] | None = None,
        *,
        device: str | Device | None = None,
    ) -> Timeline:
        """The estimated device memory in bytes from equation to equation, its peak, and what is held there.

        Its highest moment is the ``peak_bytes`` of the report as on the same device. Of a training step it goes through
        the update to the end.

        Args:
            device: as on which device: a name of ``remat_magic.devices.names()`` or a ``Device``. On a GPU and a TPU
                results have their memory from the beginning, and what is written twice is computed once. On a TPU
                besides what its compiler fuses is not held, arrays are padded, and what only matmuls read is held in
                bfloat16; what XLA keeps in VMEM counts as if it were held. Default: as on this machine's CPU.

        Raises:
            RematError: as ``report``, or the function has no backward half; no such device.
        """
        return self.facts.under(policy, at, namespace).timeline(_device(device))

    @property
    def step(self) -> StepMemory | None:
        """What the training step that takes the gradient holds at its peak, as it is written; see ``step_under``."""
        return self.facts.under().step()

    def step_under(
        self,
        policy: Policy = "as_written",
        at: At = None,
        namespace: Mapping[str, Any] | None = None,
        *,
        device: str | Device | None = None,
    ) -> StepMemory | None:
        """What the whole training step holds at the peak of its memory under a policy, by estimate, in bytes.

        None where the trace is of a function itself, and where the step is not known: the gradient writes to
        references, is differentiated itself, or is part of another one, and ``notes`` say which.

        Raises:
            RematError: as ``report``, or a gradient of the step has no backward half.
        """
        return self.facts.under(policy, at, namespace).step(_device(device))

    def forward(self, policy: Policy = "as_written", at: At = None) -> Any:
        """The closed jaxpr of the forward half: the arrays in, the function's outputs and then the residuals out."""
        return self.facts.under(policy, at).retrace.forward.closed

    def backward(self, policy: Policy = "as_written", at: At = None) -> Any:
        """The closed jaxpr of the backward half: residuals and cotangents in, gradients out.

        Raises:
            RematError: as ``report``, or the function has no backward half (a ``while_loop`` of unknown length).
        """
        return self.facts.under(policy, at).retrace.backward

    def function(
        self,
        policy: Policy = "as_written",
        at: At = None,
        namespace: Mapping[str, Any] | None = None,
        of: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """A callable like the traced function, with a policy applied.

        It computes the same values and gradients, also under ``jit``, ``grad``, ``vmap`` and ``jvp``. Each call traces,
        for whatever shapes it is given, so wrap it in ``jax.jit``.

        Args:
            of: the function to apply it to instead, such as the loss itself where the trace is of a training step.
                Default: the one that was traced.
        """
        variant = self.facts.under(policy, at, namespace)
        return variant.engine.function(variant.selection, of)

    def compare(
        self,
        policies: Iterable[Policy] | None = None,
        at: At = None,
        device: str | Device | None = None,
        measurements: Iterable[Measurement] = (),
        namespace: Mapping[str, Any] | None = None,
        besides: Iterable[Policy] = (),
    ) -> Comparison:
        """What each policy costs, side by side.

        Args:
            policies: keys, plans or policy objects. Default: all that ``choices`` offers; those that do just the same
                share a row.
            measurements: what ``measure`` gave, shown beside the estimates (``ComparisonRow.measurement``): of the
                device rather than of others. Default: none.
            besides: policies to compare with those that ``choices`` offers. Default: none.

        Raises:
            RematError: no such device. A policy that fails is a row with its error.
        """
        from remat_magic.compare import compare, offered

        merge = policies is None
        chosen = offered(self.facts, namespace or {}) if policies is None else policies
        choices = self.facts.choose_each([*chosen, *besides], at, namespace)
        return compare(self.facts, choices, device, measurements, merge=merge)

    def places(self, *, device: str | Device | None = None, most: int = 40) -> Places:
        """Where a checkpoint should go, and with which policy: what each of many choices costs, the best first.

        Every row was applied, and has the figures of the report that JAX gives for it: ``trace.report(row.policy,
        row.at)``, with the peak of ``trace.timeline(row.policy, row.at, device=device)``.
        ``Places.best(peak_bytes="2 GiB")`` is the row that adds least within a peak. ``plan`` goes by what was found
        here, with the same device: peaks differ between devices, as do the best places.

        Args:
            most: how many choices are tried at most, besides what has no checkpoint and what is as written;
                ``Places.not_tried`` says what was left out. Default: 40.

        Raises:
            RematError: no such device, or ``most`` is no choice. A choice that fails is a row with its error.
        """
        from remat_magic.planning.places import places

        return places(self.facts, device, most)

    def fit(self, device_or_bytes: str | float | Device | None = None, compile: bool = True) -> Fit:  # noqa: A002
        """Whether the function fits a device as it is written, and what would make it fit.

        Policies at every place, checkpoints around several calls and plans are tried, each as JAX traces it. A choice
        stands wherever a policy can: ``trace.report(choice)``, ``trace.function(choice)``, ``trace.edit(choice)``.

        Args:
            device_or_bytes: a ``Device`` or its name; or how many bytes there are, a number or a text like
                ``"24 GiB"``: then peaks are as on a GPU, nothing is compiled and no time is estimated. Default: the
                accelerator that is here.
            compile: whether the device's own compiler is asked where it is installed, after the estimates: about the
                program as written, and about the cheapest choices until one fits, twelve programs at most. What is
                called fitting then has its word. Default: yes.

        Raises:
            RematError: no such device or size; no accelerator is here; JAX cannot trace the function.
        """
        *_, fit = self.fitting(device_or_bytes, compile)
        return fit

    def fitting(
        self,
        device_or_bytes: str | float | Device | None = None,
        compile: bool = True,  # noqa: A002
    ) -> Generator[Fit, None, None]:
        """The same bit by bit: what ``fit`` knows at first, before each choice that it tries, and at the end.

        While a compiler runs the same answer comes again, a few times each second; to close the iterator ends it.

        Args:
            device_or_bytes: as for ``fit``.
            compile: as for ``fit``.
        """
        from remat_magic.planning.fit import Fitting, Target

        def attempt(facts: Facts, choice: FitChoice) -> Edit | str:
            from remat_magic.editing import editor  # which takes long to import

            return editor.attempt(facts, choice)

        target = Target.of(device_or_bytes)
        found, device = Fitting(self.facts, target, attempt), target.device
        if not compile or device is None or device.target is None or not device.compiles_here:
            return found.stages()
        from remat_magic.measuring.fit import fit_by_compiler

        return fit_by_compiler(self.facts, found.stages(), device, found.settled, found.with_batch)

    def fit_choice(
        self,
        policy: Policy = "as_written",
        at: At = None,
        device_or_bytes: str | float | Device | None = None,
        namespace: Mapping[str, Any] | None = None,
    ) -> FitChoice:
        """What one policy needs and the time that it adds, by estimate, as ``fit`` has it of those that it tries.

        Args:
            device_or_bytes: as for ``fit``.
        """
        from remat_magic.planning.fit import fit_choice

        return fit_choice(self.facts, self.facts.under(policy, at, namespace), device_or_bytes)

    def plan(
        self,
        budget: float | str | None = None,
        at: str | None = None,
        *,
        saved: float | str | None = None,
        peak: float | str | None = None,
        of: Literal["saved", "peak"] = "saved",
        cost: Literal["flops", "seconds"] = "flops",
        device: str | Device | None = None,
        offload: float | str | bool | None = None,
        gap: float = 0.01,
        compile: bool = True,  # noqa: A002
    ) -> Plan:
        """What to save within a budget so that recomputation costs least.

        Every intermediate value gets a checkpoint name, in the rules of custom derivatives and in ``shard_map`` too;
        an integer program chooses among the names. The choice is then applied and traced, so that what the plan says is
        what JAX does. Where one of JAX's own policies fits the budget and costs less (it can keep what no name reaches,
        such as the cosine of a sine), the plan is that policy. Values inside the branches of a ``lax.cond`` are no
        choices; ``Plan.unreached`` and ``Plan.status`` tell what a policy may keep and is no choice here.
        Every method that takes a policy takes the plan: ``trace.report(plan)``, ``trace.function(plan)``.

        What runs out is the peak, so ``peak`` is the budget to give as a rule: less may be saved and the peak no lower.
        ``Plan.status`` says where that is so. Where the compiler of ``device`` is installed, a plan for a peak is
        compiled before it is offered, and what has no checkpoint; one that XLA does not confirm is not offered, and the
        next is tried, of four at most. So it is where JAX runs on a CPU and what XLA allocates follows policies: on the
        newest JAX, and in scans.

        Args:
            budget: in bytes: a number, or a text like ``"2 GiB"``. A float from 0 to 1, or a text like ``"30%"``, is a
                share of what there is without a checkpoint there. Default: ``saved`` or ``peak`` is it.
            at: one place: ``"function"``, ``"sites"`` or the key of a site. Default: the plan chooses it. For a budget
                of the peak it is the better of ``default_at`` and the place where ``places`` adds least within it, and
                nothing whose figures are known by then, as it was tried or asked for before, costs less; for one of
                saved bytes it is ``default_at``, unless no plan fits there, or its peak is hardly lower than
                without a checkpoint and elsewhere it is. ``Plan.status`` tells of another place.
            saved: a budget of saved bytes, as ``budget``. Default: none.
            peak: a budget of the estimated peak (``Report.peak_bytes``, or as on ``device`` if that is named), as
                ``budget``; plans of several saved bytes are tried for it. Default: none.
            of: what ``budget`` is of: ``"saved"`` bytes or the ``"peak"``. Default: ``"saved"``.
            cost: what is to be least: recomputed ``"flops"``, or the estimated ``"seconds"`` of recomputing on
                ``device``, the time on its links for collectives in a ``shard_map`` or ``pmap`` included; to
                communicate is no FLOP. Default: ``"flops"``.
            device: a ``Device`` or its name. Default: the one that JAX runs on, and a peak as on its CPU.
            offload: whether values may also go to the host's pinned memory and come back: True, over the device's own
                link, or the link's bytes/s, a number or a text like ``"32 GB/s"``. What is least is then seconds.
                Default: no.
            gap: how far from its bound a plan may be for the solver to stop, as a share of the cost. It also stops
                after some hundred nodes of its tree. Default: 0.01.
            compile: whether a plan for a peak is compiled, as above. Default: yes.

        Raises:
            RematError: no budget or two, or it is no size, or less is never needed at this place; no such site, device
                or option; no backward half; no plan for a peak that was compiled keeps to it, with what each needs.
        """
        from remat_magic.measuring.measure import compiler_of
        from remat_magic.planning.plan import plan
        from remat_magic.planning.search import Request

        facts = self.facts.under("none", at).facts if isinstance(at, str) else self.facts
        budgets = (of, budget), ("saved", saved), ("peak", peak)
        request = Request.of_options(facts, at, budgets, cost, device, offload, gap)
        ask = compiler_of(facts, device) if compile and request.of == "peak" else None
        return plan(facts, request, at, ask)

    def what_if(
        self,
        policy: Policy = "as_written",
        at: str | None = None,
        *,
        device: str | Device | None = None,
        namespace: Mapping[str, Any] | None = None,
    ) -> Listed[WhatIf]:
        """What changes if one residual is recomputed instead, or one recomputed value is saved.

        What could be saved comes first, what spares most for each byte leading; then what could be recomputed, that
        whose bytes spare least leading. Each row has the plan that does what it says.

        Args:
            at: as for ``plan``.

        Raises:
            RematError: no such policy, place or device; no backward half; or JAX does otherwise than is computed here
                (a checkpoint inside another under jax_remat3), so that nothing can be said.
        """
        from remat_magic.planning.what_if import what_if

        policy, at = policy.chosen if isinstance(policy, FitChoice) else (policy, at)
        plan = policy if isinstance(policy, Plan) else None
        return what_if(self.facts.under(policy, plan.at if plan else at, namespace), _device(device), plan)

    # ------------------------------------------------------------------------------------------------ advice and edits

    def advice(
        self,
        policy: Policy = "as_written",
        at: At = None,
        namespace: Mapping[str, Any] | None = None,
        *,
        device: str | Device | None = None,
        quick: bool = False,
    ) -> Listed[Advice]:
        """What about a policy, or the function, costs memory or has no effect; what has most at stake first.

        Args:
            quick: whether only that is told for which no other choices have to be traced.

        Raises:
            RematError: as ``report``; no such device.
        """
        from remat_magic.advice.rules import advise

        return advise(self.facts.under(policy, at, namespace), _device(device), quick=quick)

    def edit(self, choice: Policy, at: At = None) -> Edit:
        """A plan, or a policy, as an edit of your own source, verified by tracing the edited text.

        Args:
            choice: a plan, the key of a policy or an object of JAX's.
            at: as for ``plan``, also the key of a possible site, where a checkpoint is then written: on the definition,
                around the lambda or at the calls; or a mapping of places to policies, each of which is then written. Of
                some calls or several at once there is the nearest edit (``best``). A plan has its own place.

        Raises:
            RematError: the source of what ran is not available or has changed, or cannot be executed apart from the
                session; no such place.
        """
        from remat_magic.editing.editor import edit

        return edit(self.facts, choice, at)

    # ------------------------------------------------------------------------------------------------------- measuring

    def measure(
        self,
        policy: Policy = "as_written",
        at: At = None,
        *,
        inputs: Inputs | None = None,
        runs: int = 5,
        namespace: Mapping[str, Any] | None = None,
        device: str | Device | None = None,
        effort: Effort = "full",
        seconds: float = 600.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> Measurement:
        """Compile the value and the gradients under a policy, and run them if there are inputs.

        With ``device`` they are compiled for an accelerator that need not be here, which gives its own bytes and
        whether they fit in what a program can have of it (``remat_magic.devices.usable_bytes``): too big is an answer
        (``fits`` is False), no error. That happens in a process of its own, and what was compiled once is kept in the
        user's cache folder and not compiled again. Without it, ``fits`` tells of a GPU that is here.

        What is compiled is made from the jaxpr that the report is of, so your Python code does not run again. The
        cotangent of every output is one. Where ``step`` is known it is the whole training step that is compiled, which
        is traced once more for that, and that donates what yours does. Your arrays are neither donated nor kept. On CPU
        it is compiled with
        ``xla_cpu_enable_concurrency_optimized_scheduler=False``, so that temporary memory follows the policy as far as
        XLA lets it: on jax 0.10.2 only under ``lax.scan``.

        Args:
            inputs: ``"random"``, or the pair ``(args, kwargs)`` of a call like the traced one, since a trace keeps no
                arrays. Their shardings are compiled for; without inputs, those that the traced arguments had. Default:
                compile, do not run.
            runs: how many runs to time, after one to warm up. Default: 5.
            device: a name of ``remat_magic.devices.names()`` or a ``Device``, such as "TPU v5e" or "H100 SXM"; or so
                many of it, connected: "TPU v5e:2x4", "H100 SXM x8". Arguments on a mesh are compiled for as many
                devices as it has, which several that are named must be; what is on no mesh for one, also of several.
                Inputs are run on those that are here. Default: what JAX runs on.
            effort: ``"full"``, as in production, or for such a device ``"quick"``, with less optimization: several
                times as fast for a TPU, and its bytes are not those of production. ``Measurement.effort`` says which it
                was. Default: ``"full"``.
            seconds: how long to wait for such a device's compiler at most; 0 starts none, and only an answer that is
                kept is one. Default: 600.
            stop: called while such a device's compiler runs, which is ended where this returns True: ``error`` then
                says so. Default: it runs to its end.

        Returns:
            What was measured, in bytes, seconds and FLOPs. Where a step failed, ``error`` says so, and what came before
            it stays.

        Raises:
            RematError: ``inputs`` or ``effort`` is of no known form, or ``runs`` is not positive; no such device, its
                compiler is not installed, or not so many are here to run the inputs.
        """
        from remat_magic.measuring.measure import MeasureRequest, measure

        request = MeasureRequest(inputs, runs, device, effort, seconds)
        return measure(self.facts.choose(policy, at, namespace), request, stop)

    def check_gradients(
        self,
        policies: Iterable[Policy],
        *,
        inputs: Inputs = "random",
        at: At = None,
        namespace: Mapping[str, Any] | None = None,
    ) -> tuple[GradientDifference, ...]:
        """Run the value and the gradients under each policy on the same inputs, and compare them with policy "none".

        Both are compiled, so differences in the last bits are usual: XLA fuses them differently. The cotangent of every
        output is one. Where ``step`` is known and ``inputs`` are a call's, all that the training step returns is
        compared; random numbers are given to the gradient alone.

        Args:
            policies: the policies, as for ``report``.
            inputs: ``"random"``, or the pair ``(args, kwargs)`` of a call like the traced one. Default: ``"random"``.
            at: the place of the policies, and of "none"; as for ``report``.

        Returns:
            One difference for each policy, in their order. Failures are sentences in ``error``.

        Raises:
            RematError: ``inputs`` is of no known form, or None.
        """
        from remat_magic.measuring.measure import check_gradients

        return check_gradients(self.facts, policies, inputs, at, namespace)

    def close(self) -> None:
        """Drop all that is held: jaxprs, reports and what was computed from them."""
        self.facts.close()


check_gradients = Trace.check_gradients


def assert_fits(trace: Trace, device_or_bytes: str | float | Device | None = None) -> None:
    """Fail, as a test of your own, unless the function fits a device as it is written; see ``Trace.fit``.

    That it fits is looked at first, and what would make it fit only where it does not. Where the device's compiler is
    installed, that is what says so.

    Args:
        trace: of the function.
        device_or_bytes: as for ``Trace.fit``.

    Raises:
        AssertionError: it does not fit, or by its range may not; it says what takes the memory, and what to change.
        RematError: as ``Trace.fit``.
    """
    __tracebackhide__ = True
    fit: Fit | None = None
    for fit in trace.fitting(device_or_bytes):
        if fit.fits and (fit.compiled or not fit.device or not devices.get(fit.device).compiles_here):
            return
    if fit is None or not fit.fits:
        raise AssertionError(f"{trace.function_name} may not fit as it is written.\n\n{fit}")


def _device(device: str | Device | None) -> Device | None:
    return None if device is None else devices.get(device)
