"""`warpwatch doctor`: what this machine offers to the daemon, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from warpwatch.client import rendezvous
from warpwatch.client._version import __version__
from warpwatch.daemon import config as configuration
from warpwatch.daemon.api_client import DEFAULT_URL, ApiClient
from warpwatch.daemon.captures.store import store_path
from warpwatch.daemon.cli import parsing
from warpwatch.daemon.config import Config
from warpwatch.daemon.errors import WarpwatchError
from warpwatch.daemon.rendezvous.folder import resolve

NO_NVML = (
    "install the NVIDIA driver, or in a container set NVIDIA_VISIBLE_DEVICES=all and "
    "NVIDIA_DRIVER_CAPABILITIES=utility"
)


@dataclass(frozen=True, slots=True)
class Check:
    """``ok`` None: not a problem, but worth knowing."""

    name: str
    ok: bool | None
    detail: str


def main(argv: Sequence[str]) -> int:
    command = parsing.parser(
        "doctor", "Check this machine. Exit 1 when something is wrong.", "warpwatch doctor"
    )
    parsing.add_config(command)
    parsing.add_daemon(command)
    parsing.add_json(command)
    arguments = command.parse_args(argv)
    config = configuration.load(arguments.config)
    if arguments.url == DEFAULT_URL:
        arguments.url = f"http://{config.http.listen}"
    checks = [*_checks(config), _daemon(parsing.api(arguments))]
    if arguments.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        marks = {True: "ok ", False: "BAD", None: "-  "}
        print(f"warpwatch {__version__}")
        print("\n".join(f"{marks[check.ok]} {check.name}: {check.detail}" for check in checks))
    return 1 if any(check.ok is False for check in checks) else 0


def _checks(config: Config) -> Iterator[Check]:
    yield _platform()
    yield _nvml(config)
    folder, inbox = resolve(config.rendezvous, os.environ, os.getuid())
    yield _rendezvous(folder)
    yield _writable("inbox", inbox)
    yield _writable("capture store", store_path(config.store))


def _platform() -> Check:
    fit = sys.platform == "linux" and struct.calcsize("P") == 8 and sys.byteorder == "little"
    python = platform.python_version()
    detail = f"{platform.system()} {platform.machine()}, Python {python}"
    return Check("platform", fit, detail if fit else detail + ": 64-bit little-endian Linux only")


def _nvml(config: Config) -> Check:
    import pynvml

    if not config.sources.nvml.enabled:
        return Check("NVML", None, "switched off (sources.nvml.enabled)")
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Check("NVML", False, f"{error}; {NO_NVML}")
    return Check("NVML", count > 0, f"driver {driver}, {count} devices")


def _rendezvous(folder: Path) -> Check:
    lock = folder / rendezvous.LOCK_FILE
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _writable("rendezvous", folder)
    except OSError as error:
        return Check("rendezvous", False, f"{lock}: {error.strerror}")
    holder = rendezvous.lock_holder(fd)
    os.close(fd)
    held = f"{folder}, held by pid {holder}" if holder is not None else f"{folder}, no daemon"
    return Check("rendezvous", True if holder is not None else None, held)


def _writable(name: str, folder: Path) -> Check:
    existing = _first(lambda path: path.exists(), (folder, *folder.parents))
    if not os.access(existing, os.W_OK):
        return Check(name, False, f"{folder}: uid {os.getuid()} may not write {existing}")
    free = shutil.disk_usage(existing).free
    return Check(name, free > 200 << 20, f"{folder}, {free >> 20} MiB free")


def _first(fits: Callable[[Path], bool], paths: Sequence[Path]) -> Path:
    return next(path for path in paths if fits(path))


def _daemon(api: ApiClient) -> Check:
    try:
        health = api.get("/healthz")
    except WarpwatchError as error:
        return Check("daemon", None, str(error))
    return Check("daemon", True, f"version {health['version']} at {api.url}")
