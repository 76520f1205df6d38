"""Errors that end in one line for the user.

WarpwatchError          shown as `warpwatch: <text>`, exit 3
├── UsageError          wrong arguments, configuration or input: exit 2
└── Refused             could not be done, with a reason from captures.OUTCOMES: exit 3
"""

from __future__ import annotations


class WarpwatchError(Exception):
    exit_code = 3


class UsageError(WarpwatchError):
    exit_code = 2


class Refused(WarpwatchError):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def in_a_line(error: BaseException) -> str:
    """Return the type and the text of an error of another library, at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")
