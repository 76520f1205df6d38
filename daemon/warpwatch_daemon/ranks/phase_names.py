"""Which names of phases a rank has: few, however many its processes think of over its life.

Each name is a series, and is kept for as long as the rank; what is beyond the limits is ``other``.
"""

from __future__ import annotations

from collections.abc import Iterable

from warpwatch.protocol import MAX_PHASES

MAX_PHASES_PER_JOB = 64
OTHER = "other"


class PhaseNames:
    """Of one rank. ``of_job``: the names of all ranks of its job, which add to it."""

    def __init__(self, of_job: set[str]) -> None:
        self.of_job = of_job
        self._own: set[str] = set()

    def admit(self, names: Iterable[str]) -> list[str]:
        """The same number of names, each as it is shown."""
        return [self._admit(name) for name in names]

    def _admit(self, name: str) -> str:
        if name in self._own or name == OTHER:
            return name
        is_new = name not in self.of_job
        if len(self._own) >= MAX_PHASES or (is_new and len(self.of_job) >= MAX_PHASES_PER_JOB):
            return OTHER
        self._own.add(name)
        self.of_job.add(name)
        return name
