"""A step's gradient in microbatches: ``batch in 8`` is a scan over eighths of the batch that adds up their gradients.

The cut is where the step takes its gradient, so that all that it does besides stays as it is. It is made only where
the loss is known to be a sum or a mean over the examples, by ``_jax.followed``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import tree_leaves

from remat_magic import _jax
from remat_magic.engine.calls import Calls, recording
from remat_magic.engine.gradients import Differentiated, TracedGradient
from remat_magic.engine.parts import call_at, place_of, together, unused, wide
from remat_magic.engine.primal import Primal
from remat_magic.engine.retrace import on_arrays
from remat_magic.engine.signature import Signature, can_be_output
from remat_magic.engine.sites import Identity
from remat_magic.engine.steps import Step
from remat_magic.records import RematError
from remat_magic.user_files import is_user_file

_CANDIDATES = 2  # sizes that may be the batch


def batches(given: Primal, step: Step | None, axis: int = 0) -> Iterator[tuple[int, list[str]]]:
    """What may be the batch: a size, and the leaves of which that axis is as large; the likeliest first.

    Of a training step it is what the gradient reads besides the parameters. Otherwise parameters are not told apart:
    numbers that are no floating-point ones come first, then the last arguments, of those whose arrays are all alike.
    """
    arrays = [leaf for leaf in given.signature.arrays if len(leaf.value.shape) > axis and not _jax.is_key(leaf.value)]
    leaves = arrays
    roles = dict[str, str]()
    if step is not None:
        roles = {leaf.name: role for leaf, role in zip(given.signature.arrays, step.roles, strict=True)}
        leaves = [leaf for leaf in leaves if roles[leaf.name] == "batch"]
    else:
        sizes = dict[str, set[int]]()
        for leaf in leaves:
            sizes.setdefault(leaf.argument, set()).add(leaf.value.shape[axis])
        leaves = [leaf for leaf in leaves if len(sizes[leaf.argument]) == 1]
    last_first = [leaf for kind in (False, True) for leaf in reversed(leaves) if leaf.differentiated is kind]
    for size in list(dict.fromkeys(leaf.value.shape[axis] for leaf in last_first))[:_CANDIDATES]:
        alike = [leaf for leaf in last_first if leaf.value.shape[axis] == size]
        if roles or len(alike) < len(arrays):  # else nothing is left for parameters
            yield size, [leaf.name for leaf in alike]
        if not roles and len({leaf.argument for leaf in alike}) > 1:  # a square matrix of weights may be as large
            yield size, [leaf.name for leaf in alike if leaf.argument != alike[-1].argument]


class _NotStaged(Exception):  # noqa: N818 - no fault of anybody's
    """The step takes its gradient where no jaxpr is made of it alone: its own values stand there for its arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A gradient in so many ``parts``: of which function, and what its constants and leaves, and its results are.

    ``place`` is the user's code that takes it, and the instruction there.
    """

    inner: Differentiated
    given: Sequence[_jax.Share | None]
    shares: Sequence[_jax.Share | None]
    parts: int
    place: tuple[CodeType, int] | None = None


def with_microbatches(fun: Any, who: Identity, batch: Collection[str], parts: int, cuts: dict[int, Cut]) -> Any:
    """A function like ``fun`` whose gradient of ``who`` is taken in equal parts of the batch, whenever it is traced.

    Args:
        fun: the step.
        who: the function that it differentiates.
        batch: the names of the leaves of its arguments that have the examples along their first dimension.
        parts: how many.
        cuts: gets each gradient that is taken so, by its number.
    """
    generation, known = _jax.Generation(), dict[Any, tuple[Signature, list[TracedGradient]]]()

    def tracing() -> contextlib.AbstractContextManager[None]:
        # Under a policy, and where somebody looks for gradients, the step has a generation of its own already.
        own = contextlib.nullcontext() if _jax.is_holding() else None
        return own or _jax.tracing(generation, _jax.remat3(), _jax.x64())

    def small(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[TracedGradient]:
        """The gradients of a step of one part."""
        signature = Signature(fun, args, kwargs, None)
        types = tuple((leaf.name, str(leaf.value) if leaf.is_array else id(leaf.value)) for leaf in signature.leaves)
        if types in known:
            return known[types][1]
        sizes = dict[str, int]()
        for leaf in signature.arrays:
            examples = leaf.value.shape[0] if leaf.value.shape else 1
            if leaf.name in batch and examples % parts:
                raise RematError(f"{leaf.name} has {examples} examples, which are not {parts} equal parts.")
            sizes |= {leaf.name: examples // parts} if leaf.name in batch else {}
        gradients = traced_with(fun, signature.resized(sizes), who)[1]
        if not any(isinstance(leaf, Tracer) for leaf in tree_leaves((args, kwargs))):
            known[types] = signature, gradients
        return gradients

    def traced(staged: bool, *args: Any, **kwargs: Any) -> Any:
        gradients = enumerate(small(args, kwargs))

        def replaced(traceable: Any, given: tuple[Any, ...], has_aux: bool) -> Any:
            with _jax.not_holding():
                whole = TracedGradient(traceable, given, has_aux)
            if whole.inner.who != who:
                with _jax.holding_alone(before):  # what is differentiated in there stays whole
                    return whole.instead() if before is None else before(traceable, given, has_aux)
            number, part = next(gradients, (0, None))
            traces = part is not None and whole.inner.constants.keys() == part.inner.constants.keys()
            if not staged and not (traces and all(map(_jax.is_staged, whole.values)) and not whole.inner.vmaps):
                raise _NotStaged
            instead, cut = _added_up(whole, part, parts, before)
            cuts[number] = replace(cut, place=_user())
            return instead

        with tracing(), _jax.holding_alone(replaced) as before:
            return fun(*args, **kwargs)

    def run(flat: Any, arrays: list[Any]) -> list[Any]:
        with tracing():
            return _jax.as_function(jax.make_jaxpr(flat)(*arrays))(*arrays)

    @functools.wraps(fun)
    def cut(*args: Any, **kwargs: Any) -> Any:
        try:
            return traced(False, *args, **kwargs)
        except _NotStaged:
            return on_arrays(functools.partial(traced, True), run)(*args, **kwargs)

    return cut


def _user() -> tuple[CodeType, int] | None:
    """The innermost code of the user's that runs, and the instruction."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and (frame.f_code, frame.f_lasti)


def traced_with(
    fun: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]], who: Identity | None
) -> tuple[tuple[Any, Calls], list[TracedGradient]]:
    """The jaxpr of a function with other arguments, the calls that it makes, and its gradients of ``who``, in order."""
    gradients = list[TracedGradient]()

    def replaced(traceable: Any, given: tuple[Any, ...], has_aux: bool) -> Any:
        with _jax.not_holding():
            gradient = TracedGradient(traceable, given, has_aux)
        if gradient.inner.who == who:
            gradients.append(gradient)
        return gradient.as_calls(0)  # so that the equations of the function stand in its own jaxpr alone

    holding = _jax.holding_alone(None if who is None else replaced)
    with _jax.tracing(_jax.Generation(), _jax.remat3(), _jax.x64()), recording() as calls, holding:
        closed = Signature(fun, *arguments, None).jaxpr(fun, lambda out: [*filter(can_be_output, tree_leaves(out))])
    for gradient in gradients:
        gradient.calls = calls
    return (closed, calls), gradients


def _added_up(
    whole: TracedGradient, part: TracedGradient | None, parts: int, before: _jax.Hold | None
) -> tuple[Any, Cut]:
    """What to differentiate instead of a function: it is known already, by a scan over its parts, with its gradient.

    Args:
        whole: the function, of the batch.
        part: the same of one part of it.
        parts: how many there are.
        before: what takes hold of the gradient of a part.

    Raises:
        RematError: the parts do not add up to it.
    """
    name = whole.inner.who[0]
    if part is None or whole.inner.depth or whole.inner.vmaps or whole.inner.devices:
        raise RematError(f"{name} is differentiated under vmap or on each device by itself, which is not cut further.")
    try:
        given, shares = _followed(whole, part, parts)
    except _jax.Refused as refused:
        where = place_of(refused)
        raise RematError(f"{name} cannot be differentiated in microbatches: {refused}{where}.") from None
    count, types = len(_jax.consts_of(whole.inner.closed)), whole.inner.closed.out_avals
    pairs = zip(whole.values, given, strict=True)
    values = [value if share is None else _jax.cut(value, share.axis, parts) for value, share in pairs]
    kinds = [_kind(*pair) for pair in zip(shares, types, strict=True)]
    wanted = [leaf.value for leaf in whole.inner.primals if leaf.differentiated]

    def of(kind: str, values: Sequence[Any]) -> list[Any]:
        return [value for value, own in zip(values, kinds, strict=True) if own == kind]

    def microbatch(carry: Any, cut: Sequence[Any]) -> Any:
        (sums, _, grads), mine = carry, iter(cut)
        full = [value if share is None else next(mine) for value, share in zip(values, given, strict=True)]
        with _jax.holding_alone(before):
            outputs, pull, auxiliary = jax.vjp(part.of(full[:count]), *full[count:], has_aux=True)
        new = [grad for grad in pull([jnp.ones_like(outputs[0])]) if grad.dtype != jax.dtypes.float0]
        results = [*outputs, *auxiliary]
        pairs = zip(of("same", results), of("same", types), strict=True)
        same = [jnp.asarray(value, aval.dtype) for value, aval in pairs]
        return (_plus(sums, of("sum", results)), same, _plus(grads, new)), of("each", results)

    zeros = _zeros(of("sum", types)), [jnp.zeros(it.shape, it.dtype) for it in of("same", types)], _zeros(wanted)
    examples = [value for value, share in zip(values, given, strict=True) if share is not None]
    (sums, same, grads), each = jax.lax.scan(microbatch, zeros, examples)
    made = {"sum": iter(sums), "same": iter(same), "each": iter(each)}
    rows = zip(kinds, shares, types, strict=True)
    results = [together(next(made[kind]), share, aval) for kind, share, aval in rows]
    weight = shares[0].weight if shares[0] else 1.0

    @jax.custom_vjp
    def known(results: Any, _grads: Any, *_leaves: Any) -> Any:
        return results

    def forward(results: Any, grads: Any, *_leaves: Any) -> Any:
        return results, grads

    def backward(grads: Any, cotangents: Any) -> Any:
        scaled = iter((grad * (cotangents[0].astype(grad.dtype) * weight)) for grad in grads)
        own = whole.inner.primals
        return None, None, *(next(scaled).astype(leaf.value.dtype) if leaf.differentiated else None for leaf in own)

    known.defvjp(forward, backward)
    cut = Cut(whole.inner, given, shares, parts)
    return lambda *args: whole.results(known(results, grads, *tree_leaves(args))), cut


def _followed(whole: TracedGradient, part: TracedGradient, parts: int) -> tuple[list[Any], list[Any]]:
    """What the constants and inputs of a function are to those of a part, and what its results are.

    Raises:
        Refused: a gradient of parts is not known to add up to that of the whole.
    """
    inner, of_part = whole.inner, part.inner
    consts = [*zip(_jax.consts_of(inner.closed), _jax.consts_of(of_part.closed), strict=False)]
    if inner.constants.keys() != of_part.constants.keys() or len(whole.values) != len(part.values):
        raise _jax.Refused("it is another program for a part of the batch")
    for n, (pair, var) in enumerate(zip(consts, _jax.open_jaxpr(inner.closed).constvars, strict=True)):
        if n not in inner.constants and not _jax.same_value(*pair):
            readers = (eqn for eqn in _jax.open_jaxpr(inner.closed).eqns if any(atom is var for atom in eqn.invars))
            raise _jax.Refused("it reads a constant that is another one for a part of the batch", *readers)
    types = zip(map(jax.typeof, whole.values), map(jax.typeof, part.values), strict=True)
    axes = [_jax.differing(*pair) for pair in types]
    primals = zip(axes[len(consts) :], inner.primals, strict=True)
    if any(axis is not None and leaf.differentiated for axis, leaf in primals):
        raise _jax.Refused("what it is differentiated in has the batch's size")
    if all(axis is None for axis in axes):
        raise _jax.Refused("nothing that it reads has the batch's size")
    given = [None if axis is None else _jax.Share("axis", axis) for axis in axes]
    shares = _jax.followed(inner.closed, of_part.closed, given, parts)
    loss = shares[0] if shares else None
    if inner.outputs != 1 or inner.closed.out_avals[0].shape:
        raise _jax.Refused("it is no function of one number")
    if loss is None or loss.kind != "sum":
        raise _jax.Refused("its value is no sum over the examples")
    if any(share is not None and share.kind not in ("sum", "axis", "zero") for share in shares):
        raise _jax.Refused("an auxiliary value depends on the batch's size")
    return given, [None if share is not None and share.kind == "zero" else share for share in shares]


def _kind(share: Any, aval: Any) -> str:
    """Whether a result is added up, the same for all parts, or put together of what each part gives."""
    if share is None:
        return "each" if _jax.is_key(aval) else "same"
    return "sum" if share.kind == "sum" else "each"


def _zeros(avals: Sequence[Any]) -> list[Any]:
    """Where sums begin: of floating-point numbers of fewer bits in float32."""
    return [jnp.zeros(aval.shape, wide(aval)) for aval in avals]


def _plus(sums: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    return [total + value.astype(total.dtype) for total, value in zip(sums, values, strict=True)]


# ---------------------------------------------------------------------------------------------------- how it is written


_NAMES = "gradient", "add", "examples", "zeros", "sums", "own"
_CODE = """
def gradient({names}):
{body}

def add(sums, examples):
    {own} = gradient(*examples)
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, {summed}), {aux}

examples = jax.tree.map(lambda a: a.reshape({parts}, -1, *a.shape[1:]), {given})
{own} = jax.eval_shape(gradient, *jax.tree.map(lambda a: a[0], examples))
zeros = jax.tree.map(lambda a: jax.numpy.zeros(a.shape, jax.numpy.promote_types(a.dtype, "float32")), {summed})
sums, {stacked} = jax.lax.scan(add, zeros, examples)
{result} = jax.tree.map(lambda a, b: {mean}.astype(b.dtype), sums, {summed})
"""
_SUMS = {"own": "own", "summed": "own", "aux": "None", "stacked": "_"}
_STACKED = {"own": "(value, aux), grads", "summed": "(value, grads)", "aux": "aux", "stacked": "aux"}
_TOGETHER = "{target} = (value, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)), grads"


def code_of(cut: Cut, option: str | None) -> str:
    """What to write for a gradient in parts in the place of the statement that takes it; empty where it is not known.

    ``option`` are the further arguments of a checkpoint on the function; None: there is none.
    """
    who, weight = cut.inner.who, cut.shares[0].weight if cut.shares[0] else 1.0
    kinds = {share and share.kind for share in cut.shares[1:]}
    mean, stacked = math.isclose(weight * cut.parts, 1.0), kinds == {"axis"}
    same = all(share is None or share == cut.shares[0] for share in cut.shares)
    axes = {share.axis for share in (*cut.given, *cut.shares) if share is not None}
    if cut.place is None or axes != {0} or not (stacked or (same and (mean or None not in kinds))):
        return ""
    code, source, call, statement = cut.place[0], *call_at(*cut.place)
    if call is None or statement is None:
        return ""
    text, target = ast.get_source_segment(source, call) or "", "result"
    if isinstance(statement, ast.Assign) and statement.value is call:
        target = ast.get_source_segment(source, statement.targets[0]) or target
    defined, lines = who[1] == code.co_filename and code.co_firstlineno < who[2] < statement.lineno, list[str]()
    if defined and who[0] != "<lambda>":
        lines = textwrap.dedent("".join(source.splitlines(True)[who[2] - 1 : statement.lineno - 1])).splitlines()
    local = {*code.co_varnames, *code.co_cellvars} if lines or who[0] == "<lambda>" else set[str]()
    given = _examples(cut, call, local, source)
    for name, outside in given.items():
        if outside != name and text.count(outside) != 1:
            return ""
        text = text.replace(outside, name)
    if option is not None:
        text, count = re.subn(rf"\b{re.escape(who[0])}\b", lambda _: f"jax.checkpoint({who[0]}{option})", text, count=1)
        given = given if count else {}
    if not given:
        return ""
    scaled = "a" if weight == 1.0 else f"(a / {cut.parts})" if mean else f"(a * {weight!r})"

    def renamed(text: str) -> str:
        """Without the names that the user's own code has."""
        return re.sub(rf"(?<![.{{])\b({'|'.join(_NAMES)})\b(?!}})", lambda found: unused(found[0], [source]), text)

    return renamed(_CODE.strip() + stacked * f"\n{_TOGETHER}").format(
        **{key: renamed(word) for key, word in (_STACKED if stacked else _SUMS).items()},
        names=", ".join(given),
        body=textwrap.indent("\n".join([*lines, f"return {text}"]), "    "),
        parts=cut.parts,
        given=f"({', '.join(given.values())}{',' * (len(given) == 1)})",
        target=target,
        result="value, grads" if stacked else target,
        mean=scaled,
    )


def _examples(cut: Cut, call: ast.Call, local: set[str], source: str) -> dict[str, str]:
    """By name what the call is given of examples: its arguments, and local variables; empty where that is not known."""
    inner, given = cut.inner, dict[str, str]()
    numbers = [*inner.constants, *range(len(cut.given) - len(inner.primals), len(cut.given))]
    rows = [*zip((*inner.constants.values(), *inner.primals), (cut.given[n] for n in numbers), strict=True)]
    cut_arguments = {leaf.argument for leaf, share in rows if share is not None}
    by_keyword: dict[str | None, Any] = {keyword.arg: keyword.value for keyword in call.keywords}
    places = {leaf.position for leaf, _ in rows if leaf.argument not in by_keyword}
    known = max((place for place in places if place is not None), default=0) < len(call.args)
    for leaf, share in rows:
        if leaf.argument not in cut_arguments:
            continue
        node = by_keyword.get(leaf.argument)
        if node is None and leaf.position is not None and known:
            node = call.args[leaf.position]
        text = (
            leaf.argument if node is None and leaf.argument in local else ast.get_source_segment(source, node or call)
        )
        if share is None or not text or (node is None and leaf.argument not in local):
            return {}
        given[text if text.isidentifier() else leaf.argument] = text
    return given
