"""Which job and rank a process is, from its environment and command line as the kernel shows them.

Where the daemon may not read them (another PID namespace, another user), nothing is known: such
processes are the job ``kineto``, their ranks in the order in which they came.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warpwatch import identity
from warpwatch_daemon.ranks.claims import MAX_WORLD_SIZE, clean

MAX_READ_BYTES = 1 << 20
MAX_DESCRIPTORS = 4096
GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")
# Options of the interpreter that take a value.
_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """rank: None where it is not known. rank_variable: what RANK was when the process started.

    has_gpu: it holds a GPU's device open, which a process that has only begun need not do yet.
    """

    job: str
    rank: int | None = None
    world_size: int | None = None
    rank_variable: str | None = None
    pid_namespace: str = ""
    known: bool = False
    has_gpu: bool = False


UNKNOWN = ProcessFacts("kineto")


def read_facts(pid: int, uid: int) -> ProcessFacts:
    """What can be read of the process, if it is this user's; else UNKNOWN."""
    folder = Path("/proc") / str(pid)
    try:
        if pid <= 0 or folder.stat().st_uid != uid:
            return UNKNOWN
        environ = _variables(_read(folder / "environ"))
        arguments = [part.decode(errors="replace") for part in _read(folder / "cmdline")]
        namespace = os.readlink(folder / "ns/pid")
        has_gpu = _holds_gpu(folder / "fd")
    except OSError:
        return UNKNOWN
    return replace(describe(environ, arguments, namespace), has_gpu=has_gpu)


def describe(
    environ: Mapping[str, str], arguments: Sequence[str], namespace: str = ""
) -> ProcessFacts:
    job = identity.job_name(None, environ, [script(arguments)])
    said = identity.describe(job, environ)
    return ProcessFacts(
        job=clean(job) or "unnamed",
        rank=min(said["rank"], MAX_WORLD_SIZE),
        world_size=max(1, min(said["world_size"], MAX_WORLD_SIZE)),
        rank_variable=environ.get("RANK"),
        pid_namespace=namespace,
        known=True,
    )


def script(arguments: Sequence[str]) -> str:
    """What ``sys.argv[0]`` names: the script, the last part of a module, or ``-c``."""
    rest = list(arguments[1:])
    while rest:
        word = rest.pop(0)
        if word == "-m" and rest:
            return rest[0].rpartition(".")[2] + ".py"
        if word == "-c" or not word.startswith("-"):
            return word
        if word in _WITH_VALUE and rest:
            rest.pop(0)
    return arguments[0] if arguments else ""


def _holds_gpu(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        for entry in itertools.islice(entries, MAX_DESCRIPTORS):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(GPU_DEVICES):
                    return True
    return False


def _variables(parts: Sequence[bytes]) -> dict[str, str]:
    pairs = (part.decode(errors="replace").partition("=") for part in parts)
    return {name: value for name, _, value in pairs}


def _read(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return [part for part in file.read(MAX_READ_BYTES).split(b"\0") if part]
