"""Why a living process gives no sign: stopped from outside, or a C call that holds the GIL."""

from __future__ import annotations

from pathlib import Path

from warpwatch.protocol import Identity
from warpwatch_devices.process_tree import read_process

STOPPED = "stopped"
HOLDS_GIL = "holds the GIL"
UNKNOWN = "unknown"

# How often a silent process is looked at.
LOOK_S = 1.0

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


class Silence:
    """Since when a living process gives no sign, and why. Times are of the monotonic clock."""

    def __init__(self, at: float) -> None:
        self.reason: str | None = None
        self._sign_at = at
        self._looked_at = at

    def sign(self, at: float) -> None:
        """It gave one."""
        self._sign_at = at

    def lasts_s(self, at: float) -> float:
        return at - self._sign_at

    def look(self, identity: Identity, at: float, holder_pid: int | None, owner_uid: int) -> None:
        """Find the reason, now and then again: it may change."""
        if self.reason is None or at - self._looked_at >= LOOK_S:
            self.reason = silent_reason(identity, holder_pid, owner_uid)
            self._looked_at = at

    def over(self) -> bool:
        """It is no longer silent; whether it was."""
        was, self.reason = self.reason, None
        return was is not None


def silent_reason(
    identity: Identity,
    holder_pid: int | None,
    owner_uid: int,
    proc: Path = _PROC,
    cgroup: Path = _CGROUP,
) -> str:
    """One of STOPPED (a signal, a debugger or a frozen control group), HOLDS_GIL and UNKNOWN.

    The identity is the ring's claim: it may name any process. UNKNOWN unless the kernel says
    the same (``holder_pid``: who holds the ring's lock) and the process is the ring's owner's; in
    another PID namespace or on another kernel neither can be known. A process that runs while its
    heartbeat's thread does not is kept by its GIL.
    """
    folder = proc / str(identity.pid)
    try:
        is_owners = holder_pid == identity.pid and folder.stat().st_uid == owner_uid
    except OSError:
        return UNKNOWN
    process = read_process(identity.pid, proc) if is_owners else None
    if process is None or process.start_ticks != identity.process_start:
        return UNKNOWN
    stopped = process.state in ("T", "t") or _is_frozen(folder, cgroup)
    return STOPPED if stopped else HOLDS_GIL


def _is_frozen(folder: Path, cgroup: Path) -> bool:
    """As ``docker pause`` does it, where control groups of version 2 can be read."""
    try:
        lines = (folder / "cgroup").read_text().splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), None)
        if path is None:
            return False
        return "frozen 1" in (cgroup / path.lstrip("/") / "cgroup.events").read_text()
    except (OSError, ValueError):
        return False
