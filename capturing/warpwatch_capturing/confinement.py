"""Starts a process that parses an untrusted file, and confines it before it does.

The process opens its files first. Then its memory, time and output are limited, it becomes an
unused user if the daemon is root, and its system calls are filtered.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import re
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

logger = logging.getLogger(__name__)

# By the clock, on a machine whose cores are all taken.
TIMEOUT_S = 180.0
# CPU time: about ten times as much as real traces need.
BASE_CPU_S = 15
CPU_S_PER_MIB = 15
MAX_FILE_BYTES = 16 << 20
# For a process that gives up everything and then ends.
TRIAL_S = 10.0
# The part of its output that is read.
MAX_OUTPUT_BYTES = 64 << 10
# A range that no system gives to users (systemd's "Users, Groups, UIDs and GIDs"), so that no
# process of anybody has the same; else "nobody", where a container has fewer.
_FIRST_UID, _UIDS = 1_900_000_000, 10_000_000
_NOBODY = 65534
# CAP_KILL, without which the daemon could not end it, CAP_SETGID and CAP_SETUID.
_NEEDED_CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7
# The variables that an interpreter needs; the daemon's secrets are not passed on.
_ENVIRONMENT = re.compile(r"PATH|HOME|TMPDIR|TZ|LANG|(LC|LD|PYTHON|COVERAGE)_?\w*")
READING = "reading "
_UNCONFINED = "unconfined: "


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. status: negative for a signal, None when it was not done in time.

    lines: its output.
    """

    status: int | None
    lines: tuple[str, ...]

    @property
    def killed_by(self) -> str | None:
        """The limit that ended it, as a clause; None if it ended by itself."""
        if self.status is None:
            return "not read in time"
        if self.status == -signal.SIGXCPU:
            return "it takes too long for its size"
        if self.status == -signal.SIGKILL:
            return "it takes too much memory or time"
        return f"it ended by signal {-self.status}" if self.status < 0 else None


# ``run``, or what stands for it.
Run = Callable[[str, Sequence[str], float, Sequence[int]], Ended]


def run(
    module: str,
    arguments: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    pass_fds: Sequence[int] = (),
) -> Ended:
    """Run a module that calls ``confine`` before it reads; blocks. Raises OSError."""
    ended = _run(module, arguments, timeout_s, pass_fds)
    for reason in _unconfined(ended):
        _warn(reason)
    return Ended(ended.status, tuple(x for x in ended.lines if not x.startswith(_UNCONFINED)))


def shortcomings() -> tuple[str, ...]:
    """Return the protections that a trial process lacks. Raises OSError."""
    return _unconfined(_run(__name__, (), TRIAL_S, ()))


def _run(module: str, arguments: Sequence[str], timeout_s: float, pass_fds: Sequence[int]) -> Ended:
    # -P: do not import from the folder that the daemon was started in.
    command = [sys.executable, "-P", "-m", module, *arguments]
    # A pipe could be filled faster than the limit of a file's size allows.
    with os.fdopen(os.memfd_create("output"), "w+b") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                pass_fds=pass_fds,
                env={k: v for k, v in os.environ.items() if _ENVIRONMENT.fullmatch(k)},
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        start = max(0, os.fstat(output.fileno()).st_size - MAX_OUTPUT_BYTES)
        text = os.pread(output.fileno(), MAX_OUTPUT_BYTES, start)
        return Ended(status, tuple(text.decode(errors="replace").splitlines()))


def _unconfined(ended: Ended) -> tuple[str, ...]:
    """Return the protections that the process lacks, and why."""
    lines = (line for line in ended.lines if line.startswith(_UNCONFINED))
    return tuple(line.removeprefix(_UNCONFINED) for line in lines)


@lru_cache(maxsize=8)
def _warn(reason: str) -> None:
    """Log each reason once."""
    logger.warning("traces are read without the full sandbox: %s", reason[:200])


class OpenedFile:
    """Stands for a Path whose file was opened before its process was confined.

    It prints a line when it is read, so that the last file read is known.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._opened: BinaryIO | OSError
        try:
            self._opened = path.open("rb")
        except OSError as error:
            self._opened = error

    def open(self, mode: Literal["rb"], /) -> BinaryIO:
        """Return the opened file, once. Raises OSError if it could not be opened."""
        _say(f"{READING}{self.name}")
        if isinstance(self._opened, OSError):
            raise self._opened
        return self._opened

    def __str__(self) -> str:
        return self.name


def cpu_limit_s(paths: Sequence[Path]) -> int:
    """Return the CPU seconds for reading these files."""
    size = sum(path.stat().st_size for path in paths if path.is_file())
    return min(int(TIMEOUT_S), BASE_CPU_S + (size * CPU_S_PER_MIB >> 20))


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Give up all rights but reading files that are open already.

    Nothing can be imported any more.
    """
    # Counter.most_common imports it when it is first called.
    import heapq  # noqa: F401

    # The soft limit of the time ends it; the hard one is for who ignores the signal.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
    for give_up in (_become_no_one, deny_system_calls):
        try:
            give_up()
        except OSError as error:
            _say(f"{_UNCONFINED}{give_up.__name__.strip('_')}: {error.strerror}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _become_no_one() -> None:
    """Become an unused user, if root may; root without capabilities has few rights left."""
    if os.geteuid() != 0 or _capabilities() & _NEEDED_CAPABILITIES != _NEEDED_CAPABILITIES:
        return
    os.setgroups([])
    try:
        _become(_FIRST_UID + os.getpid() % _UIDS)
    except OSError:
        _become(_NOBODY)


def _become(uid: int) -> None:
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff")), 0)


# By name, the numbers on x86_64 and aarch64; None where a machine does not have it.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # Files: all that are needed are open.
    "open": (2, None), "creat": (85, None), "openat": (257, 56), "openat2": (437, 437),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "truncate": (76, 45),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "unlink": (87, None),
    "unlinkat": (263, 35), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "mknod": (133, None), "mknodat": (259, 33), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54),
    # Others, near and far.
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206),
    "sendmsg": (46, 211), "sendmmsg": (307, 269), "recvfrom": (45, 207), "recvmsg": (47, 212),
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    # Processes.
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None),
    "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "setuid": (105, 146),
    "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147),
    "setresgid": (119, 149), "setgroups": (116, 159), "setrlimit": (160, 164),
    "prlimit64": (302, 261), "personality": (135, 92),
    # The machine, and parts of the kernel with many faults.
    "mount": (165, 40), "umount2": (166, 39), "move_mount": (429, 429), "open_tree": (428, 428),
    "fsopen": (430, 430), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "swapon": (167, 224), "reboot": (169, 142), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "bpf": (321, 280), "perf_event_open": (298, 241),
    "fanotify_init": (300, 262), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "io_setup": (206, 0),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}  # fmt: skip
# AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64, with the column of the table.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# From this number on, x86_64 has the calls of the x32 ABI.
_FIRST_X32 = 0x4000_0000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ALLOW, _REFUSE = 0x7FFF_0000, 0x0005_0000 | errno.EPERM
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def deny_system_calls() -> None:
    """Filter the calls of this thread and its children. Raises OSError without kernel support."""
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}")
    instructions = _filter(*_MACHINES[platform.machine()])
    program = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program)),
    ):
        if libc.prctl(*arguments):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def _filter(architecture: int, column: int) -> bytes:
    """Return instructions of eight bytes: code, jumps if true and false, operand."""
    refuse = _instruction(_RETURN, 0, 0, _REFUSE)
    parts = [
        _instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _instruction(_EQUAL, 1, 0, architecture) + refuse,
        _instruction(_LOAD, 0, 0, _NUMBER),
        _instruction(_AT_LEAST, 0, 1, _FIRST_X32) + refuse,
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            parts.append(_instruction(_EQUAL, 0, 1, number) + refuse)
    return b"".join([*parts, _instruction(_RETURN, 0, 0, _ALLOW)])


def _instruction(code: int, jump_true: int, jump_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, operand)


if __name__ == "__main__":
    confine(1 << 30, BASE_CPU_S)
