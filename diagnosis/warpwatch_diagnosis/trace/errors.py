"""The one error of this part: an input that cannot be used."""

from __future__ import annotations


class TraceError(Exception):
    """A file that cannot be diagnosed. The text is one line: the file and what is wrong with it."""
