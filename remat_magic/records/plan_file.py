"""Plans as files: JSON that is read as data, every field checked, so that a file of unknown origin does no harm."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from remat_magic.errors import RematError

VERSION = 2
_FORMAT = "remat_magic plan"
_LARGEST = 64 * 2**20  # characters of a file; a plan of ten thousand values has some five million
_MOST_SHOWN = 40  # characters of a wrong value
_HUGE = 2**63  # no count of bytes or FLOPs is larger

# Control characters (a tab apart, which source lines have), halves of surrogate pairs, and what turns the direction of
# text around: they would make a terminal, or a reader, see something else than the file says.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# A policy of JAX's, or one that saves some of the program's own names.
_POLICY = re.compile(r"[^\W\d]\w*(\('[^'\\]*'(, '[^'\\]*')*\))?")

_T = TypeVar("_T")


def is_policy(key: str) -> bool:
    """Whether a plan can have a policy of this key: one of JAX's, or one that saves some of the program's own names."""
    return bool(_POLICY.fullmatch(key))


def read_file(record: type[_T], path: str | os.PathLike[str]) -> _T:
    """The plan of a file.

    Raises:
        OSError: the file cannot be read.
        RematError: it holds no plan.
    """
    what = f"{os.fspath(path)!r}"
    with open(path, "rb") as file:
        raw = file.read(_LARGEST + 1)
    try:
        return from_json(record, raw.decode("utf-8"), what)
    except UnicodeDecodeError:
        raise RematError(f"{what} is no plan: its bytes are no UTF-8 text; save the plan anew.") from None


def to_json(record: type[Any], data: dict[str, Any]) -> str:
    """The text of a plan's file."""
    read(record, data)  # what could not be read again is not written
    return json.dumps({"format": _FORMAT, "version": VERSION, "plan": data}, indent=1, allow_nan=False) + "\n"


def from_json(record: type[_T], text: str, what: str = "the text") -> _T:
    """The plan of a file's text; ``what`` is called what in errors."""
    if not isinstance(text, str):
        raise RematError(f"{what} is no plan: a text is needed, not {type(text).__name__}.")
    if len(text) > _LARGEST:
        raise RematError(f"{what} is no plan: it is longer than {_LARGEST >> 20} MiB.")
    try:
        data = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise RematError(f"{what} is no plan: it is nested too deep.") from None
    except ValueError as error:  # also numbers of more digits than Python reads
        why = _CONTROL.sub("?", str(error))[:80]
        raise RematError(f"{what} is no plan: it is no JSON ({why}).") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise RematError(f"{what} is no plan: give a file that plan.save() wrote.")
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise RematError(
            f"{what} is a plan of version {_shown(version)}, and this remat_magic reads version {VERSION}: make the "
            "plan anew."
        )
    if data.keys() != {"format", "version", "plan"}:
        raise RematError(f"{what} is no plan: it lacks 'plan', or has more beside it.")
    return read(record, data["plan"])


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _shown(value: Any) -> str:
    """A given value, short and without what a terminal would obey."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deep, or of more digits than Python writes
        return f"a {type(value).__name__}"
    text = _CONTROL.sub("?", text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# ---------------------------------------------------------------------------------------------------------- the fields


def read(record: type[_T], data: Any) -> _T:
    """A plan of plain JSON, with every field checked against its annotation."""
    plan: Any = _read(record, data, "the plan")
    keys = [value.key for value in plan.names]
    if len(set(keys)) < len(keys):
        raise RematError("the plan names a value twice: save it anew.")
    if not keys and not is_policy(plan.policy):
        raise RematError(f"the plan saves no value, and {_shown(plan.policy)} is no policy of JAX's: save it anew.")
    for value in plan.names:
        if value.number >= value.alike:
            raise RematError(f"the plan has value {value.number} of {value.alike} alike: save it anew.")
    return plan


def _read(record: Any, data: Any, what: str) -> Any:
    if not isinstance(data, dict):
        raise RematError(f"{what} is no JSON object but {type(data).__name__}: give what Plan.to_dict() made.")
    fields = get_type_hints(record)
    wrong = sorted({*fields} ^ {str(key) for key in data})
    if wrong:
        which = ", ".join(map(_shown, wrong[:3]))
        raise RematError(f"{what} lacks, or should not have, {which}: give what Plan.to_dict() made.")
    return record(**{name: _value(data[name], kind, f"{what}'s {name}") for name, kind in fields.items()})


def _value(value: Any, kind: Any, what: str) -> Any:
    if get_origin(kind) is UnionType:  # always "or None"
        if value is None:
            return None
        (kind,) = (member for member in get_args(kind) if member is not NoneType)
    if get_origin(kind) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_value(item, get_args(kind)[0], f"{what}[{i}]") for i, item in enumerate(value))
    elif dataclasses.is_dataclass(kind):
        return _read(kind, value, what)
    elif kind is str:
        if isinstance(value, str) and _CONTROL.search(value):
            raise RematError(f"{what} holds control characters: {_shown(value)}.")
        if isinstance(value, str):
            return value
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif (
        isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool) and 0 <= value < _HUGE
    ):
        return kind(value)
    raise RematError(f"{what} is no {getattr(kind, '__name__', 'list')}: {_shown(value)}.")
