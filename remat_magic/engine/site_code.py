"""What to write in the source for a checkpoint at a place that has none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remat_magic import _jax, libraries
from remat_magic.engine.calls import CalledFunction
from remat_magic.engine.spellings import Given, Spelling
from remat_magic.user_files import is_user_file

__all__ = ["CallingLoop", "code_of", "code_of_calls", "code_of_group"]

# By the module of a library: what it has for jax.checkpoint.
_CHECKPOINTS = {
    "equinox": "eqx.filter_checkpoint",
    "flax.linen": "nn.remat",
    "flax.nnx": "nnx.remat",
    "haiku": "hk.remat",
}
_EXAMPLE = 72  # characters of a call: longer ones are not shown
_LEAKS = "let it return what it leaves in a list, a dict or an object: a checkpoint lets nothing else out"


@dataclass(frozen=True, slots=True)
class CallingLoop:
    """A loop that makes a call in each step."""

    length: int = 0
    function: str = ""
    module: str = ""
    kind: str = "scan"
    has_inputs: bool = True
    is_reversed: bool = False
    unroll: int = 1

    @classmethod
    def of(cls, eqn: Any, callee: CalledFunction) -> CallingLoop:
        """That of a scan's equation."""
        name, file, _ = _jax.function_name(_jax.scan_body(eqn))
        kind = "fori_loop" if _jax.use_of(_jax.scan_body(eqn)) == "fori_loop" else "scan"
        consts, carries, _ = _jax.scan_split(eqn)
        if not (file and is_user_file(file)):
            name, kind = callee.who[0], "scan" if carries else "map"
        library = libraries.scan_in(file)
        inputs = len(eqn.invars) > consts + carries
        return cls(
            _jax.scan_length(eqn),
            name if name.replace(".", "_").isidentifier() else "body",
            library,
            kind,
            inputs,
            _jax.is_reversed(eqn),
            _jax.scan_unroll(eqn),
        )

    def code(self, size: int, policy: str = "") -> tuple[str, list[str]]:
        """What to write for a checkpoint around so many steps, and what is to be said of it.

        ``policy`` is as for ``code_of``.
        """
        size = max(1, min(size, self.length))  # a loop may have no step at all
        count, rest = divmod(self.length, size)
        options = f", policy={policy}" if policy else ""
        reverse = ", reverse=True" if self.is_reversed else ""
        unroll = f", unroll={min(self.unroll, size)}" if self.unroll > 1 else ""
        comments = [f"chunks: xs reshaped to ({count}, {size}, ...)"] if self.has_inputs else []
        if self.module:
            scan = {"flax.linen": "nn.scan", "flax.nnx": "nnx.scan"}[self.module]
            inner = f"{scan}({self.function.partition('.')[0]}, ...)"
            code = f"{scan}({_CHECKPOINTS[self.module]}({inner}{options}), ...)"
            within = " by nn.map_variables, under the name that it has" if self.module == "flax.linen" else ""
            comments = [f"variables cut to ({count}, {size}, ...){within}"]
        elif self.kind == "fori_loop":
            step = f"lambda j, x: {self.function}({size} * i + j, x)"
            code = f"jax.checkpoint(lambda i, x: jax.lax.fori_loop(0, {size}, {step}, x){options})"
            code = f"jax.lax.fori_loop(0, {count}, {code}, x)"
        elif self.kind == "map":
            code = f"jax.lax.map(jax.checkpoint(lambda chunk: jax.lax.map({self.function}, chunk){options}), chunks)"
        else:
            xs, chunks = ("chunk", "chunks") if self.has_inputs else (f"length={size}", f"length={count}")
            step = f"lambda carry, {'chunk' if self.has_inputs else '_'}: "
            step += f"jax.lax.scan({self.function}, carry, {xs}{reverse}{unroll})"
            code = f"jax.lax.scan(jax.checkpoint({step}{options}), carry, {chunks}{reverse})"
        if rest:
            comments.append(f"and the last {rest} under a checkpoint of their own")
        return code, comments


def code_of(callee: CalledFunction, policy: str = "") -> str:
    """What to write for a checkpoint on a function: all that is called and saved by name goes by its name then, too.

    Where the calls are to be changed for it, a comment says how: a checkpoint takes what is no array by position.

    Args:
        callee: the function.
        policy: the policy as code; without one, the checkpoint saves nothing.
    """
    name, file, _ = callee.who
    by_library = callee.in_linen or callee.library in ("haiku", "class") or (callee.module and not is_user_file(file))
    # Some have no definition to write it on, or none that it may stand on.
    static = None if by_library or name == "<lambda>" else _by_position(callee)
    if static is None:
        return code_of_calls(callee, policy)
    positions, change = static
    checkpoint, options = _CHECKPOINTS.get(callee.module, "jax.checkpoint"), _options(policy, positions)
    written = f"@functools.partial({checkpoint}{options})" if options else f"@{checkpoint}"
    where = "above other decorators " if callee.module == "flax.linen" else ""
    return f"{written}  # {where}on {name}{change}{f'; {_LEAKS}' if callee.leaks else ''}"


def _by_position(callee: CalledFunction) -> tuple[list[int], str] | None:
    """The numbers of the static parameters of a function with a checkpoint on it, and what its calls are to give.

    None where not all of them can be given by position.
    """
    if not callee.static or callee.module == "equinox":  # which sees for itself
        return [], ""
    if callee.module == "flax.nnx":  # which gives all by position, what has its default too
        positions = [position for position, _ in callee.static if position is not None]
        return (positions, "") if len(positions) == len(callee.static) else None
    ways = {
        (position, name): {_given(callee, call, position, name) for call in callee.calls} or {"unknown"}
        for position, name in callee.static
    }
    needed = [place for place, given in ways.items() if given != {"default"}]
    if not needed:
        return [], ""
    last = max(position or 0 for position, _ in needed)
    first = [*callee.parameters[: last + 1]]
    bound_by_name = any(call.bound_names & {*first} for call in callee.calls)
    if bound_by_name or any(position is None or "bound" in ways[position, name] for position, name in needed):
        return None
    positions = [position for position, _ in callee.static if position is not None and position <= last]
    names = [name for position, name in needed if ways[position, name] != {"position"}]
    if not names:
        return positions, ""
    own = first[bool(callee.module) :]
    calls = [call for call in callee.calls if {_given(callee, call, *place) for place in needed} != {"position"}]
    examples = [text for call in calls if (text := call.by_position(own, dict(callee.defaults)))]
    example = next((f": {text}" for text in examples if len(text) <= _EXAMPLE), "")
    return positions, f"; its calls give {' and '.join(names)} by position then{example}"


def _given(callee: CalledFunction, call: Spelling, position: int | None, name: str) -> Given:
    own = None if position is None else position - bool(callee.module)
    return call.given(own, name, name in dict(callee.defaults))


def code_of_calls(callee: CalledFunction, policy: str = "", key: str = "") -> str:
    """What to write in the place of a function where it is called.

    Args:
        callee: the function.
        policy: as for ``code_of``.
        key: that of the place, if it is some of the calls.
    """
    codes, comments = dict[str, None](), dict[str, None]()
    for call in callee.calls or (Spelling(""),):
        code, comment = _at_call(callee, policy, call)
        codes[code], comments[comment] = None, None
    of_haiku = "in a function that calls it and is what is transformed" if callee.in_haiku == "transformed" else ""
    return _commented(codes, [*comments, of_haiku, f"for {key}" if key else "", _LEAKS if callee.leaks else ""])


def code_of_group(
    callee: CalledFunction, size: int, loop: CallingLoop | None, is_called_besides: bool, policy: str = ""
) -> str:
    """What to write for a checkpoint around so many calls after one another.

    Args:
        callee: the function.
        size: how many.
        loop: one of JAX's that makes a call in each step.
        is_called_besides: whether there are calls that no such loop makes.
        policy: as for ``code_of``.
    """
    code, comments = ("", []) if loop is None else loop.code(size, policy)
    codes = [code] if code else []
    if loop is None or is_called_besides:
        own = "self, " if callee.library == "flax.linen" else ""
        codes.append(_call("group", callee, policy))
        comments.append(f"group({own}...): {size} of these calls with what is between them")
    return _commented(codes, comments)


def _commented(codes: Iterable[str], comments: Iterable[str]) -> str:
    """What to write at one place or another, and what is to be said of it."""
    comment = "; ".join(filter(None, comments))
    return "; ".join(codes) + (f"  # {comment}" if comment else "")


def _at_call(callee: CalledFunction, policy: str, call: Spelling) -> tuple[str, str]:
    """What to write in the place of a function in one of its calls, and what is to be said of that."""
    name = callee.who[0]
    cls, _, method = name.rpartition(".")
    positions, bound = list[int](), dict[str, str]()
    for position, parameter in callee.static if callee.module != "equinox" else ():
        match _given(callee, call, position, parameter):
            case "keyword":
                bound[parameter] = dict(call.keywords)[parameter]
            case "position" | "unknown" if position is not None:
                positions.append(position - call.bound)
            case "unknown":
                bound[parameter] = parameter
            case _:
                pass
    keywords = "".join(f", {parameter}={text}" for parameter, text in bound.items())
    without = f"without {' and '.join(bound)} in the call" if bound else ""
    if callee.module in ("flax.linen", "flax.nnx"):  # which must see the module
        called = "module" if method == "__call__" else f"module.{method}"
        function = f"lambda module, *args: {called}(*args{keywords})"
        comment = ", ".join(filter(None, (f"given the {cls} before its arguments", without)))
        return _call(function, callee, policy, positions), comment
    if callee.module == "class":
        function = f"self.{method}"
    elif callee.module:
        function = _instance(cls, method)
    elif call.function:
        function = call.function
    else:
        function = f"lambda {', '.join(callee.parameters)}: ..." if name == "<lambda>" else method
    if callee.module in ("class", "haiku"):  # whose objects are no arguments
        positions = [position - 1 for position in positions]
    if callee.in_linen:
        comment = ", ".join(filter(None, ("given the module that calls it (self) before its arguments", without)))
        positions = [position + 1 for position in positions]
        return _call(f"lambda module, *args: {function}(*args{keywords})", callee, policy, positions), comment
    comment = f"in place of {function}, {without}" if bound else ""
    if call.bound or call.bound_names:
        comment = comment or f"in place of {function}"
    function = f"functools.partial({function}{keywords})" if bound else function
    return _call(function, callee, policy, positions), comment


def _call(function: str, callee: CalledFunction, policy: str, static: Sequence[int] = ()) -> str:
    return f"{_CHECKPOINTS.get(callee.library, 'jax.checkpoint')}({function}{_options(policy, static)})"


def _options(policy: str, static: Sequence[int]) -> str:
    """The further arguments of a checkpoint."""
    options = f", policy={policy}" if policy else ""
    return f"{options}, static_argnums={tuple(static)}" if static else options


def _instance(cls: str, method: str) -> str:
    """What stands in code for an object of a class, or for a method of it."""
    variable = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls).lower()
    return variable if method == "__call__" else f"{variable}.{method}"
