"""The diagnosis in a process of its own, which limits its own memory and never takes the daemon.

Run as ``python -m warpwatch_daemon.captures.child LIMIT_BYTES KIND FOLDER MISSING BASELINE FILE…``,
where MISSING is JSON, the ranks without a file and why, and BASELINE a JSON list of paths: writes
``diagnosis.json`` and, of traces, ``report.html`` into the folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from warpwatch_daemon import files
from warpwatch_devices.memory_groups import group_room, host_room, memory_groups

# A diagnosis that has less than this is not begun.
MIN_MEMORY_BYTES = 192 << 20
MAX_MEMORY_BYTES = 4 << 30
# What must stay for the daemon when a child takes all that it may.
RESERVE_BYTES = 32 << 20
TIMEOUT_S = 180.0
EXIT_UNREADABLE = 2
EXIT_NO_MEMORY = 5
UNREADABLE = "unreadable: "
# What a diagnosis leaves beside the traces.
FILES = ("diagnosis.json", "report.html")


def diagnose(
    kind: str,
    folder: Path,
    files: Sequence[str],
    missing: Mapping[int, str],
    baseline: Sequence[Path] = (),
) -> str:
    """Diagnose the files of a stored capture; blocks until it is done.

    ``missing``: the ranks of the capture that brought no file, and why. ``baseline``: traces of
    the same job when it was well. Answers ``ok``, ``no_memory``, ``timeout`` or one line that says
    what is wrong, behind UNREADABLE when it is the files.
    """
    limit = memory_left()
    if limit < MIN_MEMORY_BYTES:
        return "no_memory"
    lost = json.dumps(missing)
    # -P: the folder that the daemon was started in is no place to import from.
    command = [sys.executable, "-P", "-m", __name__, str(limit), kind, str(folder), lost]
    command += [json.dumps([str(path) for path in baseline]), *files]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "timeout"
    except OSError as error:
        return f"cannot start it: {error.strerror}"
    if done.returncode == 0:
        return "ok"
    if done.returncode in (EXIT_NO_MEMORY, -signal.SIGKILL):
        return "no_memory"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    said = lines[-1][:500] if lines else f"exit status {done.returncode}"
    return UNREADABLE + said if done.returncode == EXIT_UNREADABLE else said


def memory_left() -> int:
    """Bytes that a diagnosis may take: what the container leaves, half of what the host has."""
    groups = [room for room in map(group_room, memory_groups("self")) if room is not None]
    host = host_room()
    left = [MAX_MEMORY_BYTES, *(room.available - RESERVE_BYTES for room in groups)]
    left += [] if host is None else [host.available // 2]
    return max(0, min(left))


def main(arguments: Sequence[str]) -> int:
    import resource

    limit, kind, folder, lost, well, *files = arguments
    missing = {int(number): str(why) for number, why in json.loads(lost).items()}
    resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    # Should the daemon be killed, its child does not go on for ever.
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIMEOUT_S), int(TIMEOUT_S)))
    os.nice(10)
    try:
        paths = [Path(folder) / name for name in files]
        return _diagnose_here(kind, Path(folder), paths, missing, json.loads(well))
    except MemoryError:
        return EXIT_NO_MEMORY


def _diagnose_here(
    kind: str, folder: Path, paths: list[Path], missing: dict[int, str], baseline: list[str]
) -> int:
    from warpwatch_diagnosis.diagnosis import diagnose as diagnose_traces
    from warpwatch_diagnosis.report.html import render_html
    from warpwatch_diagnosis.stacks.waiting import diagnose_stacks
    from warpwatch_diagnosis.trace.errors import TraceError

    try:
        if kind == "stacks":
            content = diagnose_stacks(paths, missing=missing)
        else:
            diagnosis = diagnose_traces(paths, baseline, missing)
            content = diagnosis.to_json()
            files.write(folder / "report.html", render_html(diagnosis).encode())
    except TraceError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNREADABLE
    files.write(folder / "diagnosis.json", json.dumps(content, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
