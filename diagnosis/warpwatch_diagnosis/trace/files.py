"""Provides the error for an unusable input, names of files, and reading of JSON, also in pieces.

A trace is one object whose ``traceEvents`` array is nearly all of it, or the bare array. The
elements of that array are decoded many at once, handed out and forgotten; the buffer holds one
piece of the text and at most one value, so that memory does not grow with the file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Literal, Protocol

REDUCTION = ".reduction.gz"
MAX_JSON_BYTES = 16 << 20
# Larger values are not plausible as seconds or bytes.
MAX_PLAUSIBLE = 1e15
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})\.", re.IGNORECASE)


class TraceError(Exception):
    """A file that cannot be diagnosed. The text is one line: the file and what is wrong with it."""


class TraceSource(Protocol):
    """A Path, or a file that was opened before and acts as one."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"], /) -> BinaryIO: ...


def reduction_name(trace: str) -> str:
    """Return ``rank3.reduction.gz`` for ``rank3.pt.trace.json.gz``."""
    return trace.partition(".")[0] + REDUCTION


def rank_in_name(name: str) -> int | None:
    """Return the rank in the name of a file, or None."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1]) if found else None


def load_json(path: TraceSource) -> Any:
    """Return the content of a JSON file of at most MAX_JSON_BYTES. Raises TraceError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise TraceError(f"{path}: more than {MAX_JSON_BYTES:,} bytes")
        return json.loads(data)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: is cut short or not JSON") from None


def dicts(values: Any) -> list[dict[str, Any]]:
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []


def text_of(value: Any) -> str:
    return value[:300] if isinstance(value, str) else "?"


def number_of(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < MAX_PLAUSIBLE else None


# A few hundred events: the decoder's loop in C does the work, and they fit into a core's cache.
CHUNK_BYTES = 1 << 17
# The limit on one value beside the events (deviceProperties, distributedInfo).
MAX_VALUE_CHARS = 16 << 20
# Values that are decoded one by one take ten times as long. Events are decoded together, except a
# few after text that looks like the boundary between two.
MAX_SINGLE_VALUES = 1_000_000
_NO_SPACE = re.compile(r"[^ \t\r\n]")
_END_OF_VALUE = ",:]} \t\r\n"


class Malformed(Exception):
    """Raised for text that is not JSON or is cut short; the message says which."""


# A sandboxed process may not open the codec's file when it reads, so it is loaded here.
_UTF8 = codecs.getincrementaldecoder("utf-8-sig")
# Old exporters wrote raw control characters into names.
_DECODER = json.JSONDecoder(strict=False)
decode_json = _DECODER.decode


class JsonStream:
    """The values of a JSON text of which ``read(n)`` returns up to n bytes, b"" at the end.

    ``decode_list`` decodes the text of a list, or raises ValueError.
    """

    def __init__(
        self, read: Callable[[int], bytes], decode_list: Callable[[str], Any] = decode_json
    ) -> None:
        self._read = read
        self._decode_list = decode_list
        self._decode = _UTF8("replace").decode
        self._text = ""
        self._at = 0
        self._ended = False
        # The characters before the buffer, and the position before which no boundary is guessed.
        self._dropped = 0
        self._no_guess_before = 0
        self._singles = 0

    def members(self, events_key: str) -> Iterator[tuple[str, Any]]:
        """Yield (key, value) of the top-level object; for ``events_key``, lists of its elements.

        An empty array is one empty list. A bare array counts as the array under ``events_key``,
        and a value there that is not an array as its only element. Raises Malformed.
        """
        first = self._peek()
        if first == "[":
            yield from ((events_key, elements) for elements in self._elements())
        elif first == "{":
            yield from self._object(events_key)
        else:
            raise Malformed("is empty" if first == "" else "is not JSON")
        if self._peek():
            raise Malformed("is not JSON")

    def _object(self, events_key: str) -> Iterator[tuple[str, Any]]:
        self._at += 1
        if self._closes("}"):
            return
        while True:
            key = self._value()
            self._expect(":")
            if key != events_key:
                yield str(key), self._value()
            elif self._peek() == "[":
                yield from ((events_key, elements) for elements in self._elements())
            else:
                yield events_key, [self._value()]
            if not self._another("}"):
                return

    def _elements(self) -> Iterator[list[Any]]:
        self._at += 1
        if self._closes("]"):
            yield []
            return
        while True:
            yield self._several() or [self._value()]
            if not self._another("]"):
                return

    def _several(self) -> list[Any] | None:
        """Decode the elements up to the last boundary between two objects in the buffer.

        The boundary is a guess, and right if the text before it is a whole list: JSON is read from
        left to right. Returns None if the guess was wrong, for all elements before it, or if there
        is nothing to guess.
        """
        if self._dropped + self._at < self._no_guess_before:
            return None
        boundary = self._text.rfind("},", self._at) + 1
        # Without a boundary, the rest of the buffer is searched once, not for each element.
        self._no_guess_before = self._dropped + (boundary or len(self._text))
        if not boundary:
            return None
        try:
            elements = self._decode_list(f"[{self._text[self._at : boundary]}]")
        except RecursionError:
            raise Malformed("is nested too deeply") from None
        except ValueError:
            return None
        self._at = boundary
        return elements if isinstance(elements, list) else None

    def _another(self, closing: str) -> bool:
        """Return whether a value follows; some exporters end a list with a comma."""
        if self._closes(closing):
            return False
        self._expect(",")
        return not self._closes(closing)

    def _closes(self, closing: str) -> bool:
        found = self._peek() == closing
        if found:
            self._at += 1
        return found

    def _expect(self, char: str) -> None:
        found = self._peek()
        if found != char:
            raise Malformed("is cut short" if not found else "is not JSON")
        self._at += 1

    def _peek(self) -> str:
        while True:
            found = _NO_SPACE.search(self._text, self._at)
            if found:
                self._at = found.start()
                return found[0]
            self._at = len(self._text)
            if not self._fill():
                return ""

    def _value(self) -> Any:
        self._singles += 1
        if self._singles > MAX_SINGLE_VALUES:
            raise Malformed(f"has more than {MAX_SINGLE_VALUES:,} values that are not events")
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                raise Malformed("is nested too deeply") from None
            except ValueError:
                self._grow()
                continue
            # A number at the end of the buffer may go on in the next piece.
            length = end - self._at
            whole = end < len(self._text) and self._text[end] in _END_OF_VALUE
            if whole or not self._fill():
                self._at += length
                return value

    def _grow(self) -> None:
        waiting = len(self._text) - self._at
        if waiting > MAX_VALUE_CHARS:
            raise Malformed("is not JSON")
        # Doubling keeps the repeated attempts at one long value linear in its length.
        while len(self._text) - self._at < 2 * waiting + 1 and self._fill():
            pass
        if len(self._text) - self._at == waiting:
            cut = waiting == 0 or self._text[self._at] in '{["'
            raise Malformed("is cut short or not JSON" if cut else "is not JSON")

    def _fill(self) -> bool:
        if self._ended:
            return False
        data = self._read(CHUNK_BYTES)
        self._ended = not data
        self._dropped += self._at
        self._text = self._text[self._at :] + self._decode(data, self._ended)
        self._at = 0
        return not self._ended
