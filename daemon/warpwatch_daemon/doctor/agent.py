"""Checks the running daemon's own report, and what a daemon of this user needs."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from warpwatch import rendezvous
from warpwatch_capturing import confinement
from warpwatch_capturing.store import store_path
from warpwatch_daemon.doctor.check import BAD, NOTE, OK, Check, CheckInputs
from warpwatch_daemon.participants import py_spy
from warpwatch_daemon.ranks.folder import resolve
from warpwatch_telemetry.errors import WarpwatchError

_LEAST_FREE_BYTES = 200 << 20


def daemon_checks(inputs: CheckInputs) -> Iterator[Check]:
    api = inputs.api
    try:
        health, ready = api.get("/healthz"), api.get("/readyz", accepted=503)
    except WarpwatchError as error:
        detail, _, advice = str(error).partition("; ")
        # A node is examined with or without a daemon; a URL is of one that should be there.
        yield Check("daemon", NOTE if inputs.here else BAD, detail, advice)
    else:
        yield Check("daemon", OK, f"version {health['version']} at {api.where}")
        for missing in ready["missing"]:
            name, _, reason = missing.partition(": ")
            yield Check(name, BAD, f"the daemon cannot read it: {reason or missing}")
    if not inputs.here:
        advice = "on its node, as its user: `warpwatch doctor` without --url and WARPWATCH_URL"
        detail = f"not examined: no daemon with a socket here is the one at {api.url}"
        yield Check("this machine", NOTE, detail, advice)


def checks(inputs: CheckInputs) -> Iterator[Check]:
    config = inputs.config
    folder, inbox = resolve(config.rendezvous, os.environ, os.getuid())
    yield _platform()
    found, owner = _rendezvous(folder)
    yield found
    if owner is None or os.getuid() in (0, owner):
        yield _writable("inbox", inbox, "rendezvous.inbox")
        yield _writable("capture store", store_path(config.store), "store.url")
    else:
        detail = f"inbox and capture store are those of the daemon of uid {owner}: not examined"
        yield Check("folders", NOTE, detail, f"sudo -u '#{owner}' warpwatch doctor")
    yield trace_reader()
    if py_spy.find() is not None:
        yield Check("stacks", OK, "py-spy reads those of stopped processes, too")
    else:
        detail = "none of stopped processes, and of those that hold the GIL only what they write"
        yield Check("stacks", NOTE, detail, "install the extra warpwatch[pyspy]")


def _platform() -> Check:
    fit = sys.platform == "linux" and struct.calcsize("P") == 8 and sys.byteorder == "little"
    detail = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return Check("platform", fit, detail, "" if fit else "64-bit little-endian Linux is needed")


def _rendezvous(folder: Path) -> tuple[Check, int | None]:
    """Return the finding, and the user of the daemon that holds the folder."""
    path = folder / rendezvous.LOCK_FILE
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as lock:
            owner, holder = os.fstat(lock.fileno()).st_uid, rendezvous.lock_holder(lock.fileno())
    except FileNotFoundError:
        return _writable("rendezvous", folder, "rendezvous.dir"), None
    except OSError as error:
        detail = f"{path}: {error.strerror}"
        return Check("rendezvous", BAD, detail, _elsewhere("rendezvous.dir")), None
    if holder is None:
        advice = "start one: warpwatch daemon"
        return Check("rendezvous", NOTE, f"{folder}, no daemon", advice), None
    return Check("rendezvous", OK, f"{folder}, held by pid {holder}"), owner


def trace_reader() -> Check:
    """Try the confinement as this user; the daemon's depends on its own rights."""
    try:
        missing = confinement.shortcomings()
    except OSError as error:
        missing = (f"it cannot be started: {error.strerror}",)
    if not missing:
        return Check("trace reader", OK, "who parses traces opens nothing and talks to no one")
    advice = (
        "a kernel with seccomp filters, on x86_64 or aarch64; else capture no one's but your own"
    )
    return Check("trace reader", NOTE, f"less protected: {'; '.join(missing)}", advice)


def _writable(name: str, folder: Path, key: str) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        detail = f"{folder}: uid {os.getuid()} may not write {existing}"
        return Check(name, BAD, detail, f"sudo install -d -o $USER {folder}, or {_elsewhere(key)}")
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {free >> 20} MiB free"
    if free > _LEAST_FREE_BYTES:
        return Check(name, OK, detail)
    return Check(name, BAD, detail, f"free at least 200 MiB, or {_elsewhere(key)}")


def _elsewhere(key: str) -> str:
    return f"name another folder in {key}"
