"""System calls that a process which parses strangers' files gives up, for good.

A filter of classic BPF (seccomp(2)) that answers EPERM to what opens files, talks to anybody,
starts or touches processes, or changes the machine; everything else is allowed. For x86_64 and
aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

# By name, the numbers on x86_64 and aarch64; None where a machine does not have it.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # Files: whatever is needed was opened before.
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
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def deny_system_calls() -> None:
    """Of this thread and what it starts. Raises OSError where the kernel does not filter."""
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
    """Instructions of eight bytes: code, where to jump if so and if not, operand."""
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
