"""Elements of a trace as msgspec decodes them: what diagnosis looks at, and the rest is skipped.

What msgspec refuses although it may be a trace's (``NaN``, raw control characters, lone surrogates,
members of another type) is left to the standard library's decoder: it decides what is JSON.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from warpwatch_diagnosis.trace.json_stream import decode_json
from warpwatch_diagnosis.trace.kinds import ARGUMENTS

_REFUSALS = (msgspec.MsgspecError, UnicodeError, RecursionError)
# Of a time that an element does not have.
ABSENT_US = -1.0

# ``args``: the correlation, and as JSON what diagnosis may read beside it. That is mostly the same
# for many events, so it is decoded once.
_NAMES = {f"argument_{n}": key for n, key in enumerate(dict.fromkeys(chain(*ARGUMENTS.values())))}
_ABSENT = msgspec.Raw()
RawArguments: Any = msgspec.defstruct(
    "RawArguments",
    [("correlation", Any, None), *((name, msgspec.Raw, _ABSENT) for name in _NAMES)],
    rename=_NAMES,
    gc=False,
    omit_defaults=True,
)
arguments_json = msgspec.json.Encoder().encode


class RawEvent(msgspec.Struct, gc=False):
    """Members of an element; ``ts`` and ``dur`` are in µs."""

    ph: Any = None
    cat: str | None = None
    name: Any = None
    ts: float = ABSENT_US
    dur: float = ABSENT_US
    pid: Any = None
    tid: Any = None
    args: RawArguments | None = None


_ELEMENTS = msgspec.json.Decoder(list[RawEvent])


def decode_elements(text: str) -> list[Any]:
    """A list's RawEvents, or its elements as the standard library reads them. Raises ValueError."""
    try:
        return _ELEMENTS.decode(text)
    except _REFUSALS:
        elements: list[Any] = decode_json(text)
        return elements


def decode_value(text: bytes) -> Any:
    """None for what is beyond the decoders' limits."""
    try:
        return msgspec.json.decode(text)
    except _REFUSALS:
        pass
    try:
        return decode_json(str(text, "utf-8"))
    except (ValueError, RecursionError):
        return None
