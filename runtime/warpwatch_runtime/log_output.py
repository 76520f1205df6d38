"""Writes the daemon's log: one line per entry, and few lines of a kind per minute.

Entries hold names that training processes and requests choose. They must not forge a line, control
a terminal, or fill the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_LINE = 2_000
MAX_TRACEBACK_LINES = 60
# Each logging call writes at most this many lines per window; further lines are counted.
MAX_LINES_OF_A_KIND = 20
WINDOW_S = 60.0
# Libraries may log any text as constant; further kinds share a window.
MAX_KINDS = 1_000
REPORT_INTERVAL_S = 10.0

_Kind = tuple[str, str]


def escaped(text: str, limit: int | None = MAX_LINE) -> str:
    """Return one line: line breaks, control characters and marks of text direction as escapes.

    It is cut after ``limit`` characters.
    """
    if limit is not None and len(text) > limit:
        text = text[:limit] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class LineFormatter(logging.Formatter):
    """Formats entries as one line; traceback lines are indented, unlike an entry."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join("    " + escaped(line) for line in lines[-MAX_TRACEBACK_LINES:])


@dataclass(slots=True)
class _Window:
    began: float
    level: int
    lines: int = 0


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes the first lines of a kind, and reports the number of others once a window."""

    def __init__(
        self, stream: TextIO | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self.setFormatter(LineFormatter())
        self._monotonic = monotonic
        self._windows: dict[_Kind, _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind = (record.name, str(record.msg))
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            kind = ("", "other lines")
        at = self._monotonic()
        window = self._windows.get(kind)
        if window is None or at - window.began >= WINDOW_S:
            self._report(kind)
            window = self._windows[kind] = _Window(at, record.levelno)
        window.lines += 1
        if window.lines <= MAX_LINES_OF_A_KIND:
            super().emit(record)

    def report(self) -> None:
        """Write how many lines were left out in closed windows. Call from any thread."""
        at = self._monotonic()
        self.acquire()
        try:
            for kind, window in list(self._windows.items()):
                if at - window.began >= WINDOW_S:
                    self._report(kind)
        finally:
            self.release()

    def _report(self, kind: _Kind) -> None:
        window = self._windows.pop(kind, None)
        if window is None or window.lines <= MAX_LINES_OF_A_KIND:
            return
        name, text = kind
        left_out = window.lines - MAX_LINES_OF_A_KIND
        message = "%d more lines in %.0f s like: %s"
        super().emit(
            logging.LogRecord(
                name, window.level, __file__, 0, message, (left_out, WINDOW_S, text), None
            )
        )


class Complaint:
    """Logs a failure once, until its text changes or ``clear`` says that it is over."""

    def __init__(self, logger: logging.Logger, level: int = logging.ERROR) -> None:
        self._logger = logger
        self._level = level
        # The failure that lasts, or nothing.
        self.text = ""

    def make(self, message: str, *arguments: object) -> None:
        text = message % arguments
        if text != self.text:
            self.text = text
            self._logger.log(self._level, message, *arguments)

    def clear(self) -> None:
        self.text = ""
