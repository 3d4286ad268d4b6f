"""Quicker ways through what JAX repeats for every equation of a retrace. What they return is what JAX returns.

A retrace evaluates jaxprs that JAX made itself, over and over: thousands of equations whose operands are checked again,
whose output types are worked out again, and whose place among all others is searched for again. Each function here
stands in for one of JAX's while an inspection is traced (see ``caches``), does the same with less, and hands back to
JAX's own whatever is out of the ordinary. tests/test_quick.py holds every jaxpr made with them equal to JAX's own, the
equations' tracebacks and name stacks included.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, api_util, config, core, dtypes, effects, tree_util, util
from jax._src import source_info_util as sources
from jax._src.interpreters import ad
from jax._src.interpreters import partial_eval as pe

__all__ = ["QUICK"]

_Primitive: Any = core.Primitive
_Staged: Any = pe.DynamicJaxprTracer
_DebugInfo: Any = core.DebugInfo
# Under these names JAX does not remember output types either: their parameters have no hash.
_UNHASHED = ("custom_lin", "call_hi_primitive_linearized", "call_hi_primitive")

_eval_jaxpr: Any = core.eval_jaxpr
_record: Any = pe.JaxprTrace.default_process_primitive
_output_types: Any = pe._cached_abstract_eval
_dce_jaxpr: Any = pe._dce_jaxpr
_debug_info: Any = api_util.debug_info
_sourceinfo: Any = api_util.fun_sourceinfo
_Shim: Any = tree_util._HashableCallableShim


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any, propagate_source_info: bool = True) -> list[Any]:
    """``core.eval_jaxpr``, which checks what is bound once, and changes context only where an equation has its own."""
    trace = core.trace_ctx.trace
    context = core.current_jaxpr_eqn_context()
    invars = jaxpr.all_invars if hasattr(jaxpr, "all_invars") else (*jaxpr.constvars, *jaxpr.invars)  # 0.12, 0.10
    given = (*consts, *args)
    if (
        not propagate_source_info
        or trace.requires_low  # values are computed, or equations replaced
        or not context.cur_abstract_mesh.empty
        or config.enable_checks.value
        or config.eager_constant_folding.value
        or len(given) != len(invars)
        or not all(value._trace.is_valid() for value in given if isinstance(value, core.Tracer))
    ):
        return _eval_jaxpr(jaxpr, consts, *args, propagate_source_info=propagate_source_info)
    # JAX forgets each value after its last use, to free arrays; here are none.
    env: dict[Any, Any] = dict(zip(invars, given, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    def operand(atom: Any) -> Any:
        value = read(atom)
        return value if isinstance(value, core.Tracer) else dtypes.canonicalize_value(value)

    current = sources._source_info_context
    before = current.context
    outer = before.name_stack
    process = (
        functools.partial(_stage, trace, context) if type(trace) is pe.DynamicJaxprTrace else trace.process_primitive
    )
    try:
        with core.take_current_trace():
            for eqn in jaxpr.eqns:
                primitive, own = eqn.primitive, eqn.source_info
                stack = outer + own.name_stack if outer.stack else own.name_stack
                if eqn.ctx is context and _is_plain(primitive) and own.traceback is not None:
                    current.context = own if stack is own.name_stack else sources.SourceInfo(own.traceback, stack)
                    operands = [operand(atom) for atom in eqn.invars]
                    results = process(primitive, operands, dict(eqn.params))
                else:
                    current.context = before
                    with (
                        core.set_current_trace(trace),
                        sources.user_context(own.traceback, name_stack=stack),
                        eqn.ctx.manager,
                    ):
                        params = primitive.get_bind_params(eqn.params)
                        results = primitive.bind(*map(read, eqn.invars), **params)
                if primitive.multiple_results:
                    env.update(zip(eqn.outvars, results, strict=True))
                else:
                    env[eqn.outvars[0]] = results
    except Exception:
        here, current.context = current.context, before
        with sources.user_context(None if here is before else here.traceback):  # tells the line, as JAX's own does
            raise
    finally:
        current.context = before
    return list(map(read, jaxpr.outvars))


def _is_plain(primitive: Any) -> bool:
    """Whether a primitive is bound as most are: the trace in force is asked, and nothing else."""
    own = primitive.__dict__
    return (
        type(primitive) is _Primitive
        and "bind" not in own
        and "bind_with_trace" not in own
        and "get_bind_params" not in own
    )


def _stage(trace: Any, context: Any, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """``DynamicJaxprTrace.process_primitive`` in an equation's context, for the operations that have no rule there."""
    if (
        primitive not in pe.custom_staging_rules
        and primitive not in pe.const_fold_rules
        and primitive not in pe.forwarding_rules
        and not primitive.ref_allocating
        and primitive.name not in _UNHASHED
    ):
        source = sources.current()
        tracers = [
            value if type(value) is _Staged and value._trace is trace else trace.to_jaxpr_tracer(value, source)
            for value in operands
        ]
        avals = [tracer.aval for tracer in tracers]
        if all(type(aval) is core.ShapedArray for aval in avals):
            types, effs = _output_types(primitive, *avals, **params)
            if not effs:
                trace.frame.is_high |= primitive.is_high(*avals, **params)
                several = primitive.multiple_results
                types = types if several else (types,)
                results = trace.emit_eqn(tracers, types, primitive, params, effs, source, context)
                return results if several else results[0]
    return trace.process_primitive(primitive, operands, params)


def record(self: Any, primitive: Any, tracers: Sequence[Any], params: dict[str, Any]) -> Any:
    """``JaxprTrace.default_process_primitive``, with the output types that JAX remembers for its other traces."""
    if primitive.ref_allocating or primitive.name in _UNHASHED:
        return _record(self, primitive, tracers, params)
    traced = [self.to_jaxpr_tracer(tracer) for tracer in tracers]
    if all(tracer.pval[0] is None for tracer in traced):
        known = [tracer.pval[1] for tracer in traced]
        return primitive.bind_with_trace(self.parent_trace, known, tuple(tracer.aval for tracer in traced), params)
    if not all(type(tracer.aval) is core.ShapedArray for tracer in traced):
        return _record(self, primitive, tracers, params)
    operands = [self.instantiate_const(tracer) for tracer in traced]
    types, effs = _output_types(primitive, *(tracer.aval for tracer in operands), **params)
    source = sources.current().replace(name_stack=self._current_truncated_name_stack())
    several = primitive.multiple_results
    results = [pe.JaxprTracer(self, pe.PartialVal.unknown(aval), None) for aval in (types if several else (types,))]
    recipe = pe.new_eqn_recipe(self, operands, results, primitive, params, effs, source)
    if effects.partial_eval_kept_effects.filter_in(effs):
        self.effect_handles.append(pe.EffectHandle(operands, recipe))
    for result in results:
        result.recipe = recipe
    return results if several else results[0]


@functools.partial(util.weakref_lru_cache, maxsize=None)
def insert_reduce_precision(jaxpr: Any, residuals: int) -> Any:
    """``ad_checkpoint._insert_reduce_precision``, which finds the maker of each residual by a search of all equations.

    The time of JAX's own grows with residuals times equations: at 96 transformer blocks it is half of a retrace.
    """
    used = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, core.Var)}
    makers = {var: place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    renamed: dict[Any, Any] = {}
    ahead: list[Any] = []
    after: dict[int, list[Any]] = {}
    for var in jaxpr.outvars[len(jaxpr.outvars) - residuals :]:
        if not isinstance(var.aval, core.ShapedArray) or not dtypes.issubdtype(var.aval.dtype, np.inexact):
            continue
        if var not in used or var in renamed:
            continue
        finfo = dtypes.finfo(var.aval.dtype)
        params = {"exponent_bits": finfo.nexp, "mantissa_bits": finfo.nmant}
        place = makers.get(var)
        maker = None if place is None else jaxpr.eqns[place]
        if maker is not None and maker.primitive is jax.lax.reduce_precision_p and maker.params == params:
            continue
        renamed[var] = fresh = core.Var(var.aval)
        origin = () if maker is None else (maker.source_info, maker.ctx)
        eqn: Any = core.new_jaxpr_eqn([fresh], [var], jax.lax.reduce_precision_p, params, set(), *origin)
        # JAX puts each directly behind its maker, or first of all: the last one comes first.
        (ahead if place is None else after.setdefault(place, [])).insert(0, eqn)
    eqns = list(ahead)
    for place, eqn in enumerate(jaxpr.eqns):
        if place in after:
            eqn = eqn.replace(outvars=[renamed.get(var, var) for var in eqn.outvars])
        eqns += [eqn, *after.get(place, ())]
    inputs = {
        name: [renamed.get(var, var) if var not in makers else var for var in getattr(jaxpr, name)]
        for name in ("invars", "constvars")
    }
    return jaxpr.replace(**inputs, eqns=eqns)


@functools.partial(util.weakref_lru_cache, maxsize=None)
def dce_jaxpr(jaxpr: Any, used_outputs: Sequence[bool], instantiate: Sequence[bool], *live: Sequence[bool]) -> Any:
    """``pe._dce_jaxpr``, for the jaxprs that have no effects; ``live`` is 0.12's and tells of mutable arrays."""
    if any(eqn.effects for eqn in jaxpr.eqns) or jaxpr.effects or not all(map(all, live)):
        return _dce_jaxpr(jaxpr, used_outputs, instantiate, *live)
    used = {atom for atom, yes in zip(jaxpr.outvars, used_outputs, strict=True) if yes and type(atom) is core.Var}
    eqns: list[Any] = []
    variable, rules = core.Var, pe.dce_rules
    for eqn in reversed(jaxpr.eqns):
        rule: Any = rules.get(eqn.primitive)
        if rule is None:
            if not used.isdisjoint(eqn.outvars):
                eqns.append(eqn)
                for atom in eqn.invars:
                    if type(atom) is variable:
                        used.add(atom)
            continue
        given: list[Any] = [[True] * len(eqn.invars)] if live else []
        read, kept = rule([var in used for var in eqn.outvars], *given, eqn)
        if kept is not None:
            eqns.append(kept)
        used.update(atom for atom, yes in zip(eqn.invars, read, strict=True) if yes and type(atom) is core.Var)
    eqns.reverse()
    inputs = [kept or var in used for kept, var in zip(instantiate, jaxpr.invars, strict=True)]
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    if live and same and all(inputs) and all(used_outputs):  # 0.10 makes a new one even so
        return None, inputs
    info = jaxpr.debug_info
    names = info.filter_arg_names(inputs), info.filter_result_paths(used_outputs)
    new = jaxpr.replace(
        invars=[var for var, yes in zip(jaxpr.invars, inputs, strict=True) if yes],
        outvars=[atom for atom, yes in zip(jaxpr.outvars, used_outputs, strict=True) if yes],
        eqns=eqns,
        debug_info=_DebugInfo(info.traced_for, info.func_src_info, *names),
    )
    return new, inputs


_known_infos: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def debug_info(traced_for: str, fun: Any, args: Sequence[Any], kwargs: Any, **options: Any) -> Any:
    """``api_util.debug_info`` for the rules of primitives: the name and arguments of one are the same each time."""
    if traced_for != "linearize_prim_jvp" or options:
        return _debug_info(traced_for, fun, args, kwargs, **options)
    known = _known_infos.setdefault(fun, {})
    key = (len(args), *kwargs)
    if key not in known:
        known[key] = _debug_info(traced_for, fun, args, kwargs)
    return known[key]


def fun_sourceinfo(fun: Any) -> str:
    """``api_util.fun_sourceinfo``, which prints a whole jaxpr to find that a partial function of it has no name."""
    inner: Any = fun
    while isinstance(inner, functools.partial):
        inner = inner.func
    if type(inner) is _Shim and isinstance(inner.fun, functools.partial):
        return "<unknown>"
    return _sourceinfo(fun)


# Where each of JAX's own is found, and what stands in for it.
QUICK: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (core, "eval_jaxpr", eval_jaxpr),
    (pe.JaxprTrace, "default_process_primitive", record),
    (ad_checkpoint, "_insert_reduce_precision", insert_reduce_precision),
    (pe, "_dce_jaxpr", dce_jaxpr),
    (ad, "debug_info", debug_info),
    (api_util, "fun_sourceinfo", fun_sourceinfo),
)
