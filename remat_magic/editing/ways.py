"""How a checkpoint can be written where there is none: on a definition or at calls, JAX's own or a library's."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax

from remat_magic import _jax
from remat_magic.editing.jax_loops import JaxLoop, LoopKind
from remat_magic.editing.lifted_loops import LiftedLoop, lifted_loops
from remat_magic.editing.parsed_text import Function, ParsedText, first_line
from remat_magic.editing.python_loops import PythonLoop, loop_around, own_counter
from remat_magic.editing.user_code import UserCode, referent
from remat_magic.engine.engine import Engine
from remat_magic.engine.sites import Identity
from remat_magic.engine.source_loops import loop_of, map_loop
from remat_magic.engine.spellings import called_from, callers, frames, position_of
from remat_magic.engine.whole_steps import RepeatedCall, repeated_call
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import module_kind
from remat_magic.user_files import is_library_file, is_user_file

__all__ = ["CHECKPOINTS", "Way", "crossed", "library_caller", "ungrouped", "ways_at", "ways_of_function"]

# By the module of a library: what it is usually called, the import of it, and what it has for jax.checkpoint.
CHECKPOINTS = {
    "equinox": ("eqx", "import equinox as eqx", "filter_checkpoint"),
    "flax.nnx": ("nnx", "from flax import nnx", "remat"),
    "flax.linen": ("nn", "import flax.linen as nn", "remat"),
    "haiku": ("hk", "import haiku as hk", "remat"),
}
_OF_ARGUMENTS = ("equinox", "flax.nnx")  # those that a plain function can need, for the arguments that it takes


_SomeLoop = tuple[ParsedText, PythonLoop] | JaxLoop | LiftedLoop


@dataclass(frozen=True, slots=True)
class Way:
    """One way to write a checkpoint.

    Attributes:
        library: whose, by its module; empty for JAX's own.
        definitions: the functions that get it, with their texts; none for the traced one, or at calls.
        calls: else the calls that get it, with their texts.
        options: the text of further arguments.
        bind: whether what is passed by keyword at these calls is bound before, by ``functools.partial``.
        as_argument: whether what these calls call is an argument of the checkpoint: a module, which it must see.
        condition: which of the times that these calls are made get it, with ``{}`` for their number; empty: all.
        counter: what has that number: a variable of the source, else a counter in this function, which begins anew in
            each call of it; None: the steps of the loop around the one call are numbered.
        through: the calls, of functions without that counter in sight, which give it to them, and these functions.
        loops: else the loops that get one around each ``size`` of their steps, with their texts.
        size: how many.
        names_kept: whether a class of flax whose checkpoint is taken off goes by the name that this gave it, by which
            its parameters are called.
    """

    library: str = ""
    definitions: tuple[tuple[ParsedText, Function], ...] = ()
    calls: tuple[tuple[ParsedText, ast.Call], ...] = ()
    options: str = ""
    bind: bool = False
    as_argument: bool = False
    condition: str = ""
    counter: str | ast.FunctionDef | None = None
    through: tuple[tuple[ParsedText, ast.Call | ast.FunctionDef], ...] = ()
    loops: tuple[_SomeLoop, ...] = ()
    size: int = 1
    names_kept: bool = False
    which: int = 0


def ways_of_function(code: UserCode, inside: Identity | None) -> list[Way]:
    """Those for the whole function: JAX's own checkpoint first, then those of the libraries that its texts use.

    Args:
        code: the user's.
        inside: the function that it differentiates inside, if that is meant.
    """
    values = [value for file in code.texts for value in code.scope(file).values()]
    modules = {getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None) for value in values}
    modules |= {kind.__module__ for value in values if isinstance(value, type) for kind in value.__mro__}
    used = [f"{name}." for name in modules if isinstance(name, str)]
    libraries = ["", *(name for name in _OF_ARGUMENTS if any(module.startswith(f"{name}.") for module in used))]
    several = 0 if inside is None else len(code.begun_at(*inside[1:]))
    return [Way(library, which=which) for library in libraries for which in range(max(1, several))]


def ways_at(code: UserCode, engine: Engine, at: str) -> list[Way]:
    """Those for a place without a checkpoint, the most usual ones first; empty where the source has no such place."""
    place = engine.place(at)
    if place is None:
        return []
    callee = place.callee
    if place.group > 1:
        loops, size, library = _loops(code, engine, at) if place.calls == slice(None) else ([], 1, "")
        if loops:
            return [Way(library, loops=tuple(loops), size=size)]
        lifted = _lifted_loops(code, engine, at) if place.calls == slice(None) else []
        several = [tuple(lifted)] if len(lifted) > 1 else []
        return [Way(lifted[0].library, loops=some, size=place.group) for some in (*zip(lifted), *several)]
    # A checkpoint of linen's that is given the module is not written yet around a function that only calls modules.
    library = callee.library if callee.library in CHECKPOINTS and not callee.in_linen else ""
    positions, bound = [position for position, _ in callee.static if position is not None], bool(callee.module)
    ways: list[Way] = []
    definitions = _definitions(code, callee.who) if place.calls == slice(None) else ()
    if definitions and library != "haiku":  # whose checkpoint can only be made during a trace
        # As few as will do: parameters that have their defaults are no arguments, and stand at the end.
        numbers = [positions[:count] for count in range(len(positions) + 1)]
        numbers = [[0, *some] for some in numbers] * (callee.module == "class") + numbers
        ways += [Way(library, definitions, options=_numbers(some)) for some in numbers if library != "equinox"]
        ways += [Way(library, definitions)] if library == "equinox" else []
    of_modules = library if library in ("flax.linen", "flax.nnx") else ""
    if library == "flax.nnx" or callee.in_haiku == "transformed":
        library = ""  # nnx's takes no objects, and JAX's holds them; haiku's cannot be around what applies a transform
    for chosen in _chosen([*_calls(code, engine, callee.who)], code, engine, at):
        if library != "flax.linen":
            static = [] if library == "equinox" else [position - bound for position in positions]
            numbers = [static[:count] for count in range(len(static) + 1)]
            ways += [replace(chosen, library=library, options=_numbers(some)) for some in numbers]
            ways += [replace(chosen, library=library, bind=True)]
        if of_modules and all(call.args for _, call in chosen.calls):
            ways += [
                replace(chosen, library=of_modules, options=_numbers(positions[:count]), bind=bind, as_argument=True)
                for bind in (False, True)[: 1 + any(call.keywords for _, call in chosen.calls)]
                for count in range(len(positions) + 1)
            ]
    return list(dict.fromkeys(ways))


def _chosen(calls: list[tuple[ParsedText, ast.Call]], code: UserCode, engine: Engine, at: str) -> Iterator[Way]:
    """How those of the calls in the source that a place is can be told from the others, as ways without options."""
    place = engine.place(at)
    assert place is not None
    if not calls:
        return
    if place.calls == slice(None):
        yield Way(calls=tuple(calls))
        return
    times = next(site.times for site in engine.possible_sites if at.startswith(f"{site.key}["))
    chosen = range(times)[place.calls]
    if len(calls) == times:
        # As they run: what is given to one before it.
        calls.sort(key=lambda call: (call[0].file, call[0].end(call[1])))
        yield Way(calls=tuple(calls[number] for number in chosen))
        return
    some = Way(calls=tuple(calls), condition=_condition(chosen, times))
    loop = loop_around(*calls[0]) if len(calls) == 1 else None
    if loop is not None and not isinstance(loop, ast.While):
        yield some
    elif loop is not None and own_counter(loop):
        yield replace(some, counter=own_counter(loop))
    text, call = calls[0]
    function = text.enclosing(call)
    while function is not None:
        inside = [*ast.walk(function)]
        if isinstance(function, ast.FunctionDef) and all(call in inside for _, call in calls):
            yield replace(some, counter=function)
        function = text.enclosing(function)
    through = _through(code, engine, place.callee.who)
    if through is not None:
        yield replace(some, counter=through[0], through=through[1])


def _through(
    code: UserCode, engine: Engine, who: tuple[str, str, int]
) -> tuple[ast.FunctionDef, tuple[tuple[ParsedText, ast.Call | ast.FunctionDef], ...]] | None:
    """The function whose loops repeat all calls of another, and the ``through`` of a counter there; else None."""
    loop_functions, through = set[Function](), dict[tuple[ParsedText, ast.Call | ast.FunctionDef], None]()
    for scope, eqn in walk(engine.provenances.closed):
        frames_around = callers(eqn, who)
        call = repeated_call(eqn, who, scope.eqn) if frames_around else None
        if frames_around and call is None:
            return None
        texts = [code.texts.get(frame.co_filename) for frame, _ in frames_around[: len(call.way) if call else 0]]
        outer = None
        for (frame, instruction), text in reversed([*zip(frames_around, texts, strict=False)]):
            number = None if text is None else code.codes.get((text.file, frame))
            if text is None or number is None:
                return None
            function = text.functions[number]
            if outer is None:
                loop_functions.add(function)
            elif not isinstance(function, ast.FunctionDef):
                return None
            else:
                through[text, function] = None
                through.update(dict.fromkeys(_calls_at(outer[0], outer[1])))
            outer = text, {(frame.co_filename, *position_of(frame, instruction))}
    (function, *others) = loop_functions or [None]
    if others or not isinstance(function, ast.FunctionDef) or not through:
        return None
    return function, tuple(through)


def _calls_at(text: ParsedText, positions: Container[tuple[Any, ...]]) -> Iterator[tuple[ParsedText, ast.Call]]:
    """The calls in a text that stand at some positions, each with its file."""
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Call) and (
            (text.file, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) in positions
        ):
            yield text, node


def _condition(chosen: range, times: int) -> str:
    start, stop, step = chosen.start, chosen.stop, chosen.step
    if step == 1:
        last = f"{{}} < {stop}"
        return last if not start else f"{{}} >= {start}" if stop == times else f"{start} <= {last}"
    return f"{{}} % {step} == 0" if not start and stop == times else f"{{}} in range({start}, {stop}, {step})"


def _loops(code: UserCode, engine: Engine, at: str) -> tuple[list[_SomeLoop], int, str]:
    """The loops that make the calls of a place, around how many of their steps one checkpoint is, and whose that is.

    There are none where some of the calls are made otherwise, or no number of steps makes as many as are asked for.
    """
    place = engine.place(at)
    assert place is not None
    library = "haiku" if place.callee.library == "haiku" else ""  # whose modules keep their parameters by it
    loops: list[_SomeLoop] = []
    scans = engine.grouped_loops(at)
    for eqn in scans:
        loop = _jax_loop(code, eqn)
        if loop is None or not loop.length:
            return [], 1, library
        before = [earlier for earlier in loops if isinstance(earlier, JaxLoop) and earlier.call is loop.call]
        if any(earlier.length != loop.length for earlier in before):
            return [], 1, library  # one text, and other groups each time
        loops += [] if before else [loop]
    if scans:
        return loops, place.group, library
    around = _repeated(code, engine, place.callee.who)
    if around is None:
        return [], 1, library
    of_loop = Counter(loop for loop, _ in around)
    calls_of_step, of_linen = {*of_loop.values()}, {_in_linen(code, *loop) for loop in of_loop}
    nested = any(inner is not loop and inner in ast.walk(loop) for _, loop in of_loop for _, inner in of_loop)
    if nested or len(calls_of_step) != 1 or len(of_linen) != 1 or place.group % min(calls_of_step):
        return [], 1, library
    in_order = sorted(of_loop, key=lambda loop: (loop[0].file, loop[0].start(loop[1])))
    return [*in_order], place.group // min(calls_of_step), "flax.linen" if True in of_linen else library


def _repeated(
    code: UserCode, engine: Engine, who: tuple[str, str, int]
) -> set[tuple[tuple[ParsedText, PythonLoop], RepeatedCall]] | None:
    """The loops that repeat the calls of a function, with each way there is to one; None where some have none."""
    around = set[tuple[tuple[ParsedText, PythonLoop], RepeatedCall]]()
    for scope, eqn in walk(engine.provenances.closed):
        if called_from(eqn, who) is None:
            continue
        call = repeated_call(eqn, who, scope.eqn)
        text = None if call is None else code.texts.get(call.code.co_filename)
        if call is None or text is None:
            return None
        around.update(((text, node), call) for node in _loops_at(text, call))
    return None if _library_caller(engine, who) else around


def _loops_at(text: ParsedText, call: RepeatedCall) -> Iterator[PythonLoop]:
    for node in ast.walk(text.tree):
        loop = loop_of(node) or map_loop(node)
        if loop is not None and (loop.body, loop.is_call) == (call.loop.body, call.loop.is_call):
            assert isinstance(node, PythonLoop)
            yield node


def ungrouped(code: UserCode, engine: Engine, at: str, by_hand: str) -> str:
    """Why no edit groups the calls of a place, where it is what repeats them; else empty.

    Args:
        code: what ran.
        engine: its engine.
        at: the place.
        by_hand: what else can be done.
    """
    place = engine.place(at)
    calls = [] if place is None or place.group == 1 else [*_calls(code, engine, place.callee.who)]
    if len(calls) != 1 or engine.grouped_loops(at):
        return ""
    text, call = calls[0]
    if loop_around(text, call) is not None:
        return ""
    where = (
        f"the call at line {text.start(call)[0]} of {text.place} stands in no loop of its function that an edit reads"
    )
    return f"{where}: group the calls of that function, make the calls in a for loop, or {by_hand}"


def crossed(way: Way) -> Iterator[str]:
    """What may keep groups of the steps of a loop from being those that were asked for."""
    for text, loop in (loop for loop in way.loops if isinstance(loop, tuple)):
        if loop_around(text, loop) is not None:
            where = f"the loop at line {loop.lineno} of {text.place} runs in another one"
            yield f"{where}, and no group goes from one run into the next: choose a number that divides a run's calls."


def _lifted_loops(code: UserCode, engine: Engine, at: str) -> list[LiftedLoop]:
    """The uses of flax's scans that can be the loops that make the calls of a place."""
    loop_of_use: dict[int, LiftedLoop] = {}
    for eqn in engine.grouped_loops(at):
        loops = lifted_loops(code, eqn, [frame for frame, _ in frames(eqn)]) if _jax.scan_length(eqn) else []
        if not loops:
            return []
        for loop in loops:
            loop_of_use.setdefault(id(loop.named), loop)
    return [*loop_of_use.values()]


def _in_linen(code: UserCode, text: ParsedText, node: ast.AST | None) -> bool:
    """Whether code is a linen module's, which may not make its parameters within a checkpoint of JAX's own."""
    while node is not None:
        if isinstance(node, ast.ClassDef):
            owner = code.scope(text.file).get(node.name)
            return isinstance(owner, type) and module_kind(owner) == "flax.linen"
        node = text.parents.get(id(node))
    return False


def _jax_loop(code: UserCode, eqn: Any) -> JaxLoop | None:
    """The call of one of JAX's loops in the source that an equation comes from."""
    frame, instruction = next(((frame, at) for frame, at in frames(eqn) if is_user_file(frame.co_filename)), (None, 0))
    text = code.texts.get(frame.co_filename) if frame is not None else None
    if frame is None or text is None:
        return None
    position = [*frame.co_positions()][instruction // 2]
    kinds: tuple[LoopKind, ...] = ("scan", "map", "fori_loop")
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Call) and (
            (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == position
        ):
            function = referent(node.func, code.scope(text.file))
            consts, carries, _ = _jax.scan_split(eqn)
            has_inputs = len(eqn.invars) > consts + carries
            for kind in kinds:
                if function is getattr(jax.lax, kind):
                    return JaxLoop(text, node, kind, _jax.scan_length(eqn), has_inputs, _jax.is_reversed(eqn))
    return None


def _numbers(positions: Sequence[int]) -> str:
    return f", static_argnums={tuple(positions)}" if positions else ""


def _definitions(code: UserCode, who: tuple[str, str, int]) -> tuple[tuple[ParsedText, Function], ...]:
    """Where the source defines a function; several lambdas can begin on one line."""
    name, file, line = who
    text = code.texts.get(file)
    nodes = [] if text is None else text.functions
    short = name.rpartition(".")[2]
    return tuple(
        (text, node)
        for node in nodes
        if text is not None and (node.lineno if isinstance(node, ast.Lambda) else first_line(node)) == line
        if short == ("<lambda>" if isinstance(node, ast.Lambda) else node.name)
    )


def _calls(code: UserCode, engine: Engine, who: tuple[str, str, int]) -> Iterator[tuple[ParsedText, ast.Call]]:
    """Where the source calls a function, as JAX's tracebacks say; nowhere where a library's module calls it too."""
    called = {place for _, eqn in walk(engine.provenances.closed) if (place := called_from(eqn, who)) is not None}
    if _library_caller(engine, who):
        return
    positions = {(frame.co_filename, *[*frame.co_positions()][instruction // 2]) for frame, instruction in called}
    for text in code.texts.values():
        yield from _calls_at(text, positions)


def library_caller(engine: Engine, at: str) -> str:
    """The place, a library's module, that calls the function of another place; empty where only users' code does."""
    place = engine.place(at)
    return "" if place is None else _library_caller(engine, place.callee.who)


def _library_caller(engine: Engine, who: tuple[str, str, int]) -> str:
    layers: dict[tuple[str, int], str] = {}
    for site in engine.possible_sites:
        place = engine.place(site.key)
        if place is not None and is_library_file(place.callee.who[1]) and place.callee.who != who:
            layers[place.callee.who[1:]] = site.key
    for _, eqn in walk(engine.provenances.closed) if layers else ():
        functions = [(code.co_filename, code.co_firstlineno) for code, _ in frames(eqn)]
        around = functions[functions.index(who[1:]) + 1 :] if who[1:] in functions else []
        to_user = itertools.takewhile(lambda frame: not is_user_file(frame[0]), around)
        callers = [layers[frame] for frame in to_user if frame in layers]
        if callers:
            return callers[-1]
    return ""
