"""What XLA says where memory is exhausted, read from the text of an error or of a log."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator

from remat_magic.errors import one_line, text_of
from remat_magic.jaxprs.provenance import cell_number
from remat_magic.records import Exhausted, ExhaustedBuffer, RematError, SourceSpan

# 15.75G, 384.0KiB, 112B, 6291456 bytes. With 2.99GiB (3206250496B) the exact number stands behind it.
_SIZE = r"(?P<{}>[\d.,]*\d ?(?:[KMGTP]?i?B\b|[KMGTP]\b|bytes)?(?: \([\d,]+ ?(?:B|bytes)\))?)"
_WANTED, _FREE = _SIZE.format("wanted"), _SIZE.format("available")
_NUMBER = re.compile(r"([\d.,]+) ?([KMGTP]?)")
_FACTORS = {prefix: 1024**power for power, prefix in enumerate(("", *"KMGTP"))}

# What is said, of which memory and when; what tells most comes first.
_MESSAGES = [
    (re.compile(pattern, re.IGNORECASE), memory, when)
    for pattern, memory, when in (
        (rf"out of memory in memory space (?P<memory>\w+)\W+used {_WANTED} of {_FREE}", "", "compiling"),
        (rf"required for HLO temporaries \({_WANTED}\) exceeds available HBM \({_FREE}\)", "device", "compiling"),
        (rf"Allocation \(size={_WANTED}\) would exceed memory \(size={_FREE}\)", "device", "compiling"),
        (rf"memory space (?P<memory>\w+) (?s:.*)size {_WANTED} and limit {_FREE} exceeded scoped", "", "compiling"),
        (r"out of memory in memory space (?P<memory>\w+)", "", "compiling"),
        (rf"loading program.*attempting to reserve {_WANTED}.*there are {_FREE} free", "device", "loading"),
        (rf"attempting to (?:allocate|reserve) {_WANTED}.*there are {_FREE} free", "device", "running"),
        (rf"could not allocate {_WANTED} in memory \w*HBM\w*;.* {_FREE} available", "device", "running"),
        (rf"out of memory allocating {_WANTED}", "host", "running"),
        (rf"out of memory while trying to allocate {_WANTED}", "device", "running"),
        (rf"failed to allocate (?:request for )?{_WANTED}", "device", "running"),
        (rf"ran out of memory trying to allocate {_WANTED}(?!.*not a failure)", "device", "running"),
        (rf"memory use below {_FREE} by rematerialization; only reduced to {_WANTED}", "device", "compiling"),
        (r"RESOURCE.EXHAUSTED.*\bmemory\b", "device", "running"),
    )
]
# What was free, where another line of the text says it: CUDA's, that of a statistic, and what XLA tried to keep to.
_FREE_LINES = [
    re.compile(pattern)
    for pattern in (
        r"Free memory/Total memory: (?P<available>\d+)/",
        rf"Can't reduce memory use below {_FREE} by rematerialization",
    )
]
_PARTS = re.compile(
    r"((?:parameter|constant|maybe_live_out|preallocated temp|total) allocation|reserved|program|arguments|output"
    rf"|HLO temp|global|scoped):? {{2,}}{_SIZE.format('size')}"
)
_BUFFER = re.compile(rf"\bSize: {_SIZE.format('size')}(?P<rest>(?s:.*?))(?====|\bSize: |\Z)")
_NO_BUFFER = re.compile(
    r"shape = '(?P<type>[^']*)'.*tag = '(?P<op_name>[^']*)'|for %?(?P<label>[\w.-]+) = (?P<of>\S+) "
)
_FIELDS = {
    "op_name": re.compile(r'op_name="([^"]*)"'),
    "file": re.compile(r'source_file="([^"]*)"'),
    "line": re.compile(r"source_line=(\d+)"),
    "type": re.compile(r"(?:Shape|Subshape): (.*)"),
    "label": re.compile(r"XLA label: %?([\w.-]+)", re.IGNORECASE),
    "kind": re.compile(r"Allocation type: (.*)|(Entry Parameter)"),
}
_KINDS = {"HLO temp": "temporary", "Entry Parameter": "argument", "Arguments": "argument", "Output": "output"}


def explain(error: str | BaseException) -> Exhausted:
    """Read what XLA says where memory is exhausted: how much it wanted, what there was, and the largest buffers.

    Args:
        error: the text of a ``RESOURCE_EXHAUSTED`` error, or of a log that has one in it; or the exception itself. Of a
            TPU, a GPU or a CPU, compiling or running.

    Raises:
        RematError: it is no such message.
    """
    text = error if isinstance(error, str) else text_of(error)
    found = ((match, memory, when) for pattern, memory, when in _MESSAGES if (match := pattern.search(text)))
    match, memory, when = next(found, (None, "", ""))
    if match is None:
        raise RematError(
            "this is no message of XLA's that memory is exhausted: give the whole text of the error, from the line "
            "that has RESOURCE_EXHAUSTED in it."
        )
    said = match.groupdict()
    begin = text.rfind("\n", 0, match.start()) + 1
    code = text.find("RESOURCE_EXHAUSTED: ", begin, match.start())
    sentence = text[code + len("RESOURCE_EXHAUSTED: ") if code >= 0 else match.start() :].partition("\n")[0]
    wanted = _bytes(said.get("wanted"))
    free = [match] if said.get("available") is not None else [pattern.search(text) for pattern in _FREE_LINES]
    return Exhausted(
        one_line(sentence),
        wanted,
        next((_bytes(match["available"]) for match in free if match), None),
        {"": memory, "hbm": "device"}.get(said.get("memory", ""), said.get("memory", "")),
        when,
        tuple({part[1]: _bytes(part["size"]) or 0 for part in _PARTS.finditer(text, match.end())}.items()),
        tuple(sorted(_buffers(text, match, wanted), key=lambda buffer: -buffer.nbytes)),
    )


def _bytes(size: str | None) -> int | None:
    """The exact number where there is one. XLA's G is a GiB."""
    if size is None:
        return None
    number = _NUMBER.search(size.partition("(")[2] or size)
    return None if number is None else round(float(number[1].replace(",", "")) * _FACTORS[number[2].upper()])


def _buffers(text: str, message: re.Match[str], wanted: int | None) -> Iterator[ExhaustedBuffer]:
    """Those of the list that follows the message, or the one that the message itself is about."""
    listed = [*_BUFFER.finditer(text, message.end())]
    for buffer in listed:
        yield _buffer(_bytes(buffer["size"]) or 0, _fields(buffer["rest"]))
    end = text.find("\n", message.end())
    line = text[message.start() : end if end >= 0 else len(text)]
    if not listed and wanted is not None and (one := _NO_BUFFER.search(line)):
        named = {"type": one["type"] or one["of"], "label": one["label"], "op_name": one["op_name"]}
        of_message = {name: value or "" for name, value in named.items()}
        yield _buffer(wanted, {**of_message, **_fields(line)})


def _fields(text: str) -> dict[str, str]:
    matches = {name: pattern.search(text) for name, pattern in _FIELDS.items()}
    return {name: match[match.lastindex or 0].strip() for name, match in matches.items() if match}


def _buffer(nbytes: int, fields: dict[str, str]) -> ExhaustedBuffer:
    source, file, line = None, fields.get("file"), int(fields.get("line", 0))
    if file and line:
        text = linecache.getline(file, line).rstrip("\n")
        source = SourceSpan(file, "", line, 0, line, len(text), cell_number(file), text)
    kind = fields.get("kind", "")
    type_ = re.sub(r"\{[^}]*\}", "", fields.get("type", ""))
    return ExhaustedBuffer(
        nbytes, type_, fields.get("op_name", ""), source, fields.get("label", ""), _KINDS.get(kind, kind.lower())
    )
