"""Protobuf's wire format, as far as XLA's modules need it: https://protobuf.dev/programming-guides/encoding/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["fields", "number", "numbers", "text"]

_TEXT = 2  # the wire type of everything that has a length


def fields(proto: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """The fields of a message: number, value (an int, or bytes), and all of its bytes."""
    at = 0
    while at < len(proto):
        start = at
        key, at = _varint(proto, at)
        kind, value = key & 7, None
        if kind == 0:
            value, at = _varint(proto, at)
        elif kind == _TEXT:
            size, at = _varint(proto, at)
            value, at = proto[at : at + size], at + size
        else:  # a fixed number of 8 or 4 bytes
            at += 8 if kind == 1 else 4
        yield key >> 3, value, proto[start:at]


def _varint(proto: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = proto[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def numbers(value: int | bytes) -> list[int]:
    """A repeated number, packed or not."""
    if isinstance(value, int):
        return [value]
    several, at = list[int](), 0
    while at < len(value):
        one, at = _varint(value, at)
        several.append(one)
    return several


def _written(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def number(field: int, value: int) -> bytes:
    """A field that is a number, as it is written."""
    return _written(field << 3) + _written(value)


def text(field: int, value: bytes) -> bytes:
    """A field that is a text or another message, as it is written."""
    return _written(field << 3 | _TEXT) + _written(len(value)) + value
