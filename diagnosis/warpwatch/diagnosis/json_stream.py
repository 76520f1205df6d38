"""Reads a trace's JSON piece by piece, so that memory does not grow with the file.

A trace is one object whose ``traceEvents`` array is nearly all of it, or the bare array. Each
element of that array is decoded, handed out and forgotten; the buffer holds one piece of the
text and at most one value.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any

CHUNK_BYTES = 1 << 20
# One value beside the events (deviceProperties, distributedInfo) may be this long.
MAX_VALUE_CHARS = 16 << 20
_SPACE = " \t\r\n"
_END_OF_VALUE = ",:]} \t\r\n"


class Malformed(Exception):
    """Not JSON, or cut short. The text says which."""


class JsonStream:
    """``read(n)`` answers the next at most n bytes, b"" at the end."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        # Old exporters wrote raw control characters into names.
        self._decoder = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._ended = False

    def members(self, events_key: str) -> Iterator[tuple[str, Any]]:
        """(key, value) of the top-level object; the array under ``events_key`` element by element.

        A bare array counts as the array under ``events_key``. Raises Malformed.
        """
        first = self._peek()
        if first == "[":
            yield from ((events_key, element) for element in self._elements())
        elif first == "{":
            yield from self._object(events_key)
        else:
            raise Malformed("is empty" if first == "" else "is not JSON")

    def _object(self, events_key: str) -> Iterator[tuple[str, Any]]:
        self._at += 1
        if self._peek() == "}":
            return
        while True:
            key = self._value()
            self._expect(":")
            if key == events_key and self._peek() == "[":
                yield from ((events_key, element) for element in self._elements())
            else:
                yield str(key), self._value()
            if not self._another("}"):
                return

    def _elements(self) -> Iterator[Any]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return
        while True:
            yield self._value()
            if not self._another("]"):
                return

    def _another(self, closing: str) -> bool:
        found = self._peek()
        self._at += 1
        if found not in {",", closing} or not found:
            raise Malformed("is cut short" if not found else "is not JSON")
        # Some exporters leave a comma before the closing bracket.
        if found == "," and self._peek() == closing:
            self._at += 1
            return False
        return found == ","

    def _expect(self, char: str) -> None:
        found = self._peek()
        if found != char:
            raise Malformed("is cut short" if not found else "is not JSON")
        self._at += 1

    def _peek(self) -> str:
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._fill():
                return ""

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
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
        self._text = self._text[self._at :] + self._decode(data, self._ended)
        self._at = 0
        return not self._ended
