"""What the hooks of a process know together: who sets the step clock, and what runs between calls.

There is no monitor before a hook asks for one: a process that only loads data or evaluates is no
rank. Hooks call from the training thread; in other threads the clock ignores them.
"""

from __future__ import annotations

from warpwatch.client.attach import attach
from warpwatch.client.monitor import Monitor
from warpwatch.client.steps import OTHER


class Flow:
    """One a process, shared by all hooks. ``off``: in a forked child, for ever."""

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self.off = False

    def attach(self) -> Monitor | None:
        """The monitor from now on: the process trains. None in a forked child."""
        if self.monitor is None and not self.off:
            self.monitor = attach()
        return self.monitor

    def drop(self) -> None:
        """In a forked child."""
        self.off = True
        self.monitor = None

    def leads(self, source: str) -> bool:
        """Whether ``source`` sets the step clock: nothing stronger has claimed it."""
        monitor = self.monitor
        return monitor is not None and monitor.lead(source)

    def begin_step(self, source: str) -> None:
        """Training begins here, where ``source`` leads and no step runs."""
        if self.leads(source) and self.monitor is not None and not self.monitor.clock.open:
            self.monitor.clock.begin()

    def end_step(self, source: str) -> None:
        """A step ends where ``source`` leads, and the next one begins."""
        if self.leads(source) and self.monitor is not None:
            clock = self.monitor.clock
            clock.switch(OTHER)
            clock.end()
            clock.begin()

    def enter(self, phase: str) -> None:
        """A phase begins, up to ``leave``."""
        if self.monitor is not None:
            self.monitor.phase(phase).__enter__()

    def leave(self, phase: str) -> None:
        if self.monitor is not None:
            self.monitor.phase(phase).__exit__(None, None, None)

    def switch(self, phase: str) -> None:
        """What runs between the phases is ``phase`` from now on: ``forward``, ``eval``, ``other``.

        Until the next call or the end of the step.
        """
        if self.monitor is not None:
            self.monitor.switch(phase)
