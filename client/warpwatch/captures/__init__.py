"""Captures by command of the daemon: what a process records of itself, from step to step.

- control: follows commands at step borders and keeps the one session; the helper thread's side
- recording: one capture, from its command to its one final answer; what a recorder is
- torch_profiler, memory, nsys: the recorders, one file a kind; host_memory: what grows in the
  process, by type and line
- safety: why nothing may be recorded now, one function a reason
- program_profiler: the program's own profiler; ours gives way to it
- event_budget: how many events a recorded step is expected to hold
"""

from warpwatch.captures.control import Captures

__all__ = ["Captures"]
