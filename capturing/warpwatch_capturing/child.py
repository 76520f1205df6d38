"""The diagnosis in a process of its own, which limits its own memory and never takes the daemon.

Run as ``python -m warpwatch_capturing.child LIMIT_BYTES KIND ABOUT FILE…``, where ABOUT is JSON:
``missing``, ``nodes``, ``asked`` and ``baseline`` as ``diagnose`` has them, and ``outputs``, the
descriptors of the diagnosis as JSON and, of traces, of the report as HTML and of each trace's
reduction. The last line of the output is the error, if any.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from warpwatch_capturing.confinement import (
    READING,
    TIMEOUT_S,
    Ended,
    OpenedFile,
    Run,
    confine,
    cpu_limit_s,
    run,
)
from warpwatch_devices.memory_groups import (
    CGROUP,
    PROC,
    group_headroom,
    host_headroom,
    memory_groups,
)
from warpwatch_diagnosis.trace.files import REDUCTION, TraceError, reduction_name
from warpwatch_runtime import files
from warpwatch_telemetry.captures import CaptureRequest

# A diagnosis is not started with less than this.
MIN_MEMORY_BYTES = 192 << 20
MAX_MEMORY_BYTES = 4 << 30
# Left for the daemon if a child uses its whole limit.
RESERVE_BYTES = 32 << 20
EXIT_UNREADABLE = 2
EXIT_NO_MEMORY = 5
UNREADABLE = "unreadable: "
_DIAGNOSIS, _REPORT = "diagnosis.json", "report.html"


def made_of(kind: str, names: Sequence[str], *, for_fleet: bool = False) -> list[str]:
    """Return what a diagnosis of these files leaves beside them.

    for_fleet: only what the fleet needs for the one verdict of a multi-node capture.
    """
    traces = [name for name in names if not name.endswith(REDUCTION)]
    reads_traces = kind not in ("stacks", "memory")
    reductions = list(map(reduction_name, traces)) if reads_traces else []
    if for_fleet:
        return reductions
    return [_DIAGNOSIS, _REPORT, *reductions] if reads_traces else [_DIAGNOSIS]


def asked(request: CaptureRequest) -> dict[str, Any] | None:
    """Return the anomaly that requested the capture, as ``diagnose`` takes it, or None."""
    seen = request.anomaly_seen
    return None if seen is None else {"kind": request.anomaly_kind, **asdict(seen)}


def diagnose(
    kind: str,
    folder: Path,
    names: Sequence[str],
    missing: Mapping[int, str],
    baseline: Sequence[Path] = (),
    nodes: Mapping[int, str] | None = None,
    asked: Mapping[str, Any] | None = None,
    run: Run = run,
) -> str:
    """Diagnose these files of a stored capture; blocks until it is done.

    ``missing``: the ranks of the capture that brought no file, and why. ``baseline``: traces of
    the same job when it was well. ``nodes``: where ranks ran. ``asked``: the anomaly
    that asked. Answers ``ok``, ``no_memory`` or one line that says what is wrong, behind UNREADABLE
    when it is the files, and ``<file>: `` where it is one of them.
    """
    limit = memory_left()
    if limit < MIN_MEMORY_BYTES:
        return "no_memory"
    paths = [folder / name for name in names]
    try:
        with ExitStack() as stack:
            outputs = [
                stack.enter_context(files.replacing(folder / name)) for name in made_of(kind, names)
            ]
            fds = [output.fileno() for output in outputs]
            about: dict[str, Any] = {"missing": missing, "nodes": nodes or {}, "asked": asked}
            about |= {"baseline": [str(path) for path in baseline], "outputs": fds}
            arguments = [str(limit), kind, json.dumps(about), *map(str, paths)]
            outcome = _outcome(run(__name__, arguments, TIMEOUT_S, fds))
            if outcome != "ok":
                raise _Failed(outcome)
    except _Failed as failed:
        return str(failed)
    except OSError as error:
        return f"cannot start it: {error.strerror}"
    return "ok"


class _Failed(Exception):
    """Raised so that no output is kept."""


def _outcome(ended: Ended) -> str:
    if ended.status == 0:
        return "ok"
    if ended.status in (EXIT_NO_MEMORY, -signal.SIGKILL):
        return "no_memory"
    text = ended.lines[-1][:500] if ended.lines else f"exit status {ended.status}"
    if ended.killed_by is not None:
        # With the file that it was about, unless it ended before the first.
        return f"{UNREADABLE}{text.removeprefix(READING)}: {ended.killed_by}"
    return UNREADABLE + text if ended.status == EXIT_UNREADABLE else text


def memory_left(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the bytes that a diagnosis may use: the container's rest, half of the host's."""
    folders = memory_groups("self", proc, cgroup)
    groups = [room for room in map(group_headroom, folders) if room is not None]
    host = host_headroom(proc)
    left = [MAX_MEMORY_BYTES, *(room.available - RESERVE_BYTES for room in groups)]
    left += [] if host is None else [host.available // 2]
    return max(0, min(left))


def main(arguments: Sequence[str], confine: Callable[[int, int], None] = confine) -> int:
    # Imported before the process is confined; the daemon itself does not need them.
    from warpwatch_diagnosis.diagnosis import diagnose as diagnose_traces
    from warpwatch_diagnosis.findings import RequestingAnomaly
    from warpwatch_diagnosis.measures.reduction import pack
    from warpwatch_diagnosis.memory_growth import diagnose_memory
    from warpwatch_diagnosis.report.html import render_html
    from warpwatch_diagnosis.stacks import diagnose_stacks

    limit, kind, text, *names = arguments
    about = json.loads(text)
    missing, nodes = (
        {int(rank): of[rank] for rank in of} for of in (about["missing"], about["nodes"])
    )
    paths, healthy = list(map(Path, names)), list(map(Path, about["baseline"]))
    opened, baseline = list(map(OpenedFile, paths)), list(map(OpenedFile, healthy))
    document, *others = [os.fdopen(fd, "wb", closefd=False) for fd in about["outputs"]]
    confine(int(limit), cpu_limit_s(paths + healthy))
    asked = RequestingAnomaly(**about["asked"]) if about["asked"] else None
    try:
        if kind == "stacks":
            late = asked.rank if asked and asked.kind == "latency_regression" else None
            found = diagnose_stacks(opened, missing, nodes, late)
        elif kind == "memory":
            found = diagnose_memory(opened, nodes)
        else:
            diagnosis = diagnose_traces(opened, baseline, missing, nodes, asked)
            found = diagnosis.to_json()
            report, *reductions = others
            report.write(render_html(diagnosis).encode())
            measures = {reduction_name(one.file): one for one in diagnosis.measures}
            for path, reduction in zip(paths, reductions, strict=False):
                # The file stays empty if it is too large; its reader reports that.
                with suppress(TraceError):
                    reduction.write(pack(measures[reduction_name(path.name)]))
        document.write(json.dumps(found, indent=1).encode())
        for file in (document, *others):
            file.close()
    except TraceError as error:
        sys.stdout.write(f"{error}\n")
        return EXIT_UNREADABLE
    except MemoryError:
        return EXIT_NO_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
