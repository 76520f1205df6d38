"""Shows the progress of a long command on standard error: bars on a terminal, else some lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from warpwatch_runtime.command_line import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

# Without a terminal; a shorter command prints nothing.
LINE_INTERVAL_S = 5.0
MAX_BARS = 16


class Progress:
    """Prints lines at intervals; call ``show`` at any progress."""

    def __init__(
        self,
        interval_s: float = LINE_INTERVAL_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._said_at = monotonic()
        self._said = ""

    def show(self, name: str, done: float, total: float, note: str = "") -> None:
        """Show the progress of ``name``; ``note``: the current work."""
        now = self._monotonic()
        share = f"{min(1.0, done / total):.0%}" if total > 0 else ""
        line = " ".join(filter(None, (f"{name}:", share, note)))
        if now - self._said_at >= self._interval_s and line != self._said:
            say(line, sys.stderr)
            self._said_at, self._said = now, line

    def done(self) -> None:
        """Hide the progress before the result."""


class _OnTerminal(Progress):
    def __init__(self, bars: Bars) -> None:
        super().__init__()
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, done: float, total: float, note: str = "") -> None:
        if name not in self._tasks:
            if len(self._tasks) >= MAX_BARS:
                return
            self._tasks[name] = self._bars.add_task(name, total=total, note=note)
        self._bars.update(self._tasks[name], completed=done, total=total, note=note)

    def done(self) -> None:
        self._bars.stop()


@contextmanager
def progress() -> Iterator[Progress]:
    """Yield bars if standard error is a terminal and rich is installed, else lines."""
    try:
        from rich import progress as rich_progress
        from rich.console import Console
    except ModuleNotFoundError:
        yield Progress()
        return
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield Progress()
        return
    bars = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(24),
        rich_progress.TaskProgressColumn(),
        rich_progress.TextColumn("{task.fields[note]}", markup=False),
        rich_progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        # Output comes above the bars, but must not go into a pipe.
        redirect_stdout=sys.stdout.isatty(),
    )
    with bars:
        yield _OnTerminal(bars)
