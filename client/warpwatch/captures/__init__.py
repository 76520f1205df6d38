"""Captures that the daemon commands: a process records some of its own steps.

- control: follows commands at step boundaries and keeps the one session
- recording: one capture, from its command to its one final answer; the interface of recorders;
  the expected number of events per recorded step
- profilers, memory: the recorders; the program's own profiler has precedence
- safety: the reasons to refuse a capture
"""

from warpwatch.captures.control import Captures

__all__ = ["Captures"]
