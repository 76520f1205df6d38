"""What a daemon of this user needs: a platform it knows, and folders it may write."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from warpwatch import rendezvous
from warpwatch_capturing.children import confinement
from warpwatch_capturing.store import store_path
from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_daemon.participants.stacks import py_spy
from warpwatch_daemon.ranks.folder import resolve

_LEAST_FREE_BYTES = 200 << 20


def checks(inputs: CheckInputs) -> Iterator[Check]:
    config = inputs.config
    folder, inbox = resolve(config.rendezvous, os.environ, os.getuid())
    yield _platform()
    yield _rendezvous(folder)
    other = _other_user(folder)
    if other is None:
        yield _writable("inbox", inbox, "rendezvous.inbox")
        yield _writable("capture store", store_path(config.store), "store.url")
    else:
        detail = f"inbox and capture store are those of the daemon of uid {other}: not examined"
        yield Check("folders", None, detail, f"sudo -u '#{other}' warpwatch doctor")
    yield trace_reader()
    yield _stacks()


def _platform() -> Check:
    fit = sys.platform == "linux" and struct.calcsize("P") == 8 and sys.byteorder == "little"
    detail = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return Check("platform", fit, detail, "" if fit else "64-bit little-endian Linux is needed")


def _other_user(folder: Path) -> int | None:
    """Return the user of the daemon here; None without one, for root, and for that user."""
    try:
        with (folder / rendezvous.LOCK_FILE).open("rb") as lock:
            uid = os.fstat(lock.fileno()).st_uid
            is_held = rendezvous.lock_holder(lock.fileno()) is not None
    except OSError:
        return None
    return uid if is_held and os.getuid() not in (0, uid) else None


def _rendezvous(folder: Path) -> Check:
    lock = folder / rendezvous.LOCK_FILE
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _writable("rendezvous", folder, "rendezvous.dir")
    except OSError as error:
        return Check("rendezvous", False, f"{lock}: {error.strerror}", _elsewhere("rendezvous.dir"))
    holder = rendezvous.lock_holder(fd)
    os.close(fd)
    if holder is None:
        return Check("rendezvous", None, f"{folder}, no daemon", "start one: warpwatch daemon")
    return Check("rendezvous", True, f"{folder}, held by pid {holder}")


def trace_reader() -> Check:
    """A process tries, as this user: what the daemon's may do depends on the daemon's rights."""
    try:
        missing = confinement.shortcomings()
    except OSError as error:
        missing = (f"it cannot be started: {error.strerror}",)
    if not missing:
        return Check("trace reader", True, "who parses traces opens nothing and talks to no one")
    advice = (
        "a kernel with seccomp filters, on x86_64 or aarch64; else capture no one's but your own"
    )
    return Check("trace reader", None, f"less protected: {'; '.join(missing)}", advice)


def _stacks() -> Check:
    if py_spy.find() is not None:
        return Check("stacks", True, "py-spy reads those of stopped processes, too")
    detail = "none of stopped processes, and of those that hold the GIL only what they write"
    return Check("stacks", None, detail, "install the extra warpwatch[pyspy]")


def _writable(name: str, folder: Path, key: str) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        detail = f"{folder}: uid {os.getuid()} may not write {existing}"
        return Check(
            name, False, detail, f"sudo install -d -o $USER {folder}, or {_elsewhere(key)}"
        )
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {free >> 20} MiB free"
    if free > _LEAST_FREE_BYTES:
        return Check(name, True, detail)
    return Check(name, False, detail, f"free at least 200 MiB, or {_elsewhere(key)}")


def _elsewhere(key: str) -> str:
    return f"name another folder in {key}"
