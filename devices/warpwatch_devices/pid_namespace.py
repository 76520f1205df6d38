"""Whether the PIDs that the driver gives mean anything to this process."""

from __future__ import annotations

import os
from pathlib import Path

# The number of the namespace that the kernel starts with: PROC_PID_INIT_INO in its proc_ns.h.
_HOST_PID_NAMESPACE = "pid:[4026531836]"


def sees_host_processes(proc: Path = Path("/proc")) -> bool:
    """Whether PIDs mean the same here as to the driver, which knows only those of the host.

    Elsewhere a PID of the driver is no process's, or worse, another's.
    """
    try:
        return os.readlink(proc / "self/ns/pid") == _HOST_PID_NAMESPACE
    except OSError:
        return False
