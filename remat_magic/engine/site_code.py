"""What to write in the source for a checkpoint at a place that has none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remat_magic import _jax, libraries
from remat_magic.engine.calls import CalledFunction
from remat_magic.user_files import is_user_file

# By the module of a library: what it has for jax.checkpoint.
_CHECKPOINTS = {
    "equinox": "eqx.filter_checkpoint",
    "flax.linen": "nn.remat",
    "flax.nnx": "nnx.remat",
    "haiku": "hk.remat",
}


@dataclass(frozen=True, slots=True)
class CallingLoop:
    """A loop that makes a call in each step."""

    length: int = 0
    function: str = ""
    module: str = ""
    kind: str = "scan"
    has_inputs: bool = True
    has_outputs: bool = False
    lower: str = ""
    is_reversed: bool = False

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
        lower = ""
        if kind == "fori_loop":
            first = eqn.invars[consts]
            lower = str(int(first.val) or "") if _jax.is_literal(first) else "lower"
        return cls(
            _jax.scan_length(eqn),
            name if name.replace(".", "_").isidentifier() else "body",
            library,
            kind,
            inputs,
            not all(map(_jax.is_dropped, eqn.outvars[carries:])),
            lower,
            _jax.is_reversed(eqn),
        )

    def code(self, size: int, policy: str = "") -> tuple[str, list[str]]:
        """What to write for a checkpoint around so many steps, and what is to be said of it.

        ``policy`` is as for ``code_of``.
        """
        size = max(1, min(size, self.length))  # a loop may have no step at all
        count, rest = divmod(self.length, size)
        options = f", policy={policy}" if policy else ""
        reverse = ", reverse=True" if self.is_reversed else ""
        comments = [f"chunks: xs reshaped to ({count}, {size}, ...)"] if self.has_inputs else []
        if self.module:
            scan = {"flax.linen": "nn.scan", "flax.nnx": "nnx.scan"}[self.module]
            inner = f"{scan}({self.function.partition('.')[0]}, ...)"
            code = f"{scan}({_CHECKPOINTS[self.module]}({inner}{options}), ...)"
            within = " by nn.map_variables, under the name that it has" if self.module == "flax.linen" else ""
            comments = [f"variables cut to ({count}, {size}, ...){within}"]
        elif self.kind == "fori_loop":
            first = f"{self.lower} + " if self.lower else ""
            step = f"lambda j, x: {self.function}({first}{size} * i + j, x)"
            code = f"jax.checkpoint(lambda i, x: jax.lax.fori_loop(0, {size}, {step}, x){options})"
            code = f"jax.lax.fori_loop(0, {count}, {code}, x)"
        elif self.kind == "map":
            code = f"jax.lax.map(jax.checkpoint(lambda chunk: jax.lax.map({self.function}, chunk){options}), chunks)"
            code = f"jax.tree.map(jax.numpy.concatenate, {code})"
        else:
            xs, chunks = ("chunk", "chunks") if self.has_inputs else (f"length={size}", f"length={count}")
            step = f"lambda carry, {'chunk' if self.has_inputs else '_'}: "
            step += f"jax.lax.scan({self.function}, carry, {xs}{reverse})"
            code = f"jax.lax.scan(jax.checkpoint({step}{options}), carry, {chunks}{reverse})"
            if self.has_outputs:
                code = f"carry, ys = {code}; ys = jax.tree.map(jax.numpy.concatenate, ys)"
        if self.has_outputs:
            comments.append(f"ys reshaped to ({count * size}, ...) again")
        if rest:
            comments.append(f"and the last {rest} under a checkpoint of their own")
        return code, comments


def code_of(callee: CalledFunction, policy: str = "") -> str:
    """What to write for a checkpoint on a function: all that is called and saved by name goes by its name then, too.

    Where the calls are to be changed for it, a comment says how: a checkpoint takes what is no array by position. Only
    an edit reads the calls, and is tried.

    Args:
        callee: the function.
        policy: the policy as code; without one, the checkpoint saves nothing.
    """
    name, file, _ = callee.who
    by_library = callee.within or callee.library in ("haiku", "class") or (callee.module and not is_user_file(file))
    static = () if callee.module == "equinox" else callee.static  # which sees for itself
    # Some have no definition to write it on, or none that it may stand on.
    if by_library or name == "<lambda>" or any(position is None for position, _ in static):
        return code_of_calls(callee, policy)
    checkpoint, options = _CHECKPOINTS.get(callee.module, "jax.checkpoint"), _options(policy, _positions(static))
    written = f"@functools.partial({checkpoint}{options})" if options else f"@{checkpoint}"
    where = f"{'above other decorators ' if callee.module == 'flax.linen' else ''}on {name}"
    # Of nnx it gives all by position, what has its default too.
    return _commented([written], [where, "" if callee.module == "flax.nnx" else _by_position(static), _leaks(callee)])


def _positions(static: Iterable[tuple[int | None, str]]) -> list[int]:
    return [position for position, _ in static if position is not None]


def _by_position(static: Iterable[tuple[int | None, str]]) -> str:
    """What is to be said of the calls of a function with static parameters."""
    names = [name for position, name in static if position is not None]
    return f"its calls give {' and '.join(names)} by position" if names else ""


def _leaks(callee: CalledFunction) -> str:
    """What is to be said of a function that leaves something unreturned."""
    if not callee.leaks:
        return ""
    return "let it return what it leaves in a list, a dict or an object: a checkpoint lets nothing else out"


def code_of_calls(callee: CalledFunction, policy: str = "", key: str = "") -> str:
    """What to write in the place of a function where it is called.

    Args:
        callee: the function.
        policy: as for ``code_of``.
        key: that of the place, if it is some of the calls.
    """
    static = () if callee.module == "equinox" else callee.static
    names = [name for position, name in static if position is None]
    function, said, shift = _in_its_place(callee, "".join(f", {name}={name}" for name in names))
    without = f"without {' and '.join(names)} in the call" if names else ""
    code = _call(function, callee, policy, [position + shift for position in _positions(static)])
    of_place = f"for {key}" if key else ""
    return _commented([code], [said, without, _by_position(static), of_place, _leaks(callee)])


def _in_its_place(callee: CalledFunction, keywords: str) -> tuple[str, str, int]:
    """A function as a checkpoint at its call is given it, what to say of that, and by how much positions shift.

    ``keywords`` are those that it is to be called with, as text.
    """
    cls, _, method = callee.who[0].rpartition(".")
    if callee.module in ("flax.linen", "flax.nnx"):  # which must see the module
        called = "module" if method == "__call__" else f"module.{method}"
        return f"lambda module, *args: {called}(*args{keywords})", f"given the {cls} before its arguments", 0
    shift = -(callee.module in ("class", "haiku"))  # whose objects are no arguments
    if callee.module == "class":
        function = f"self.{method}"
    elif callee.module:
        function = _instance(cls, method)
    else:
        function = f"lambda {', '.join(callee.parameters)}: ..." if method == "<lambda>" else method
    if callee.within == "flax.linen":
        said = "given the module that calls it (self) before its arguments"
        return f"lambda module, *args: {function}(*args{keywords})", said, shift + 1
    if keywords:
        return f"functools.partial({function}{keywords})", f"in place of {function}", shift
    return function, "", shift


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
