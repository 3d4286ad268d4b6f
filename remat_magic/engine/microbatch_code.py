"""Microbatches as code: a scan around the user's own call that takes the gradient."""

from __future__ import annotations

import ast
import math
import re
import textwrap
from typing import Any

from remat_magic.engine.microbatches import Cut
from remat_magic.engine.parts import call_at, unused

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
