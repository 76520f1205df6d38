"""Who is compared: our daemon and two other exporters, each on a fake driver of its own.

The drivers are alike, but count the calls of one peer each.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks import plain_loop
from benchmarks.node import daemon_arguments
from benchmarks.processes import (
    CannotMeasure,
    clean_environment,
    last_line,
    start,
    stop,
    wait_until,
)
from tests.devices.fakenvml.driver import CannotBuild, FakeDriver, build
from warpwatch_daemon.demo.processes import free_port

GPUS = 8
PROFILE = "h100"
OURS = "warpwatch"
DISTRIBUTIONS = (OURS, "nvitop-exporter", "nvidia-ml-py", "prometheus-client")
# Of which calls are counted, those for no GPU (such as waiting for events) included.
ALL = (None, *range(GPUS))
# Values move, as those of a GPU that trains.
LOAD = {"load": 60, "load_swing": 30, "load_period_s": 20}
MEMORY_MIB = 40_960

INSTALL = "install the extra: pip install -e '.[bench]'"


@dataclass(frozen=True, slots=True)
class RunningPeer:
    name: str
    process: subprocess.Popen[bytes]
    port: int
    driver: FakeDriver

    @property
    def pid(self) -> int:
        """Raises CannotMeasure when the peer has ended by itself."""
        if self.process.poll() is not None:
            raise CannotMeasure(f"{self.name} ended with status {self.process.returncode}")
        return self.process.pid

    def calls(self, gpus: Iterable[int | None] = ALL) -> int:
        """NVML calls so far."""
        by_gpu = self.driver.calls()
        return sum(sum(by_gpu.get(gpu, {}).values()) for gpu in gpus)


def _warpwatch(port: int, folder: Path) -> list[str]:
    """Everything that is on by default, but for the kubelet, which another machine may have."""
    return daemon_arguments(folder, port, attribution={"kubelet_socket": "off"})


def _nvitop_exporter(port: int, folder: Path) -> list[str]:
    listen = ["--bind-address", "127.0.0.1", "--port", str(port), "--hostname", "localhost"]
    return ["-m", "nvitop_exporter", *listen]


def _plain_loop(port: int, folder: Path) -> list[str]:
    return [plain_loop.__file__, str(port)]


# What Python runs, for a port and a folder of the peer's own.
PEERS: dict[str, Callable[[int, Path], list[str]]] = {
    OURS: _warpwatch,
    "nvitop_exporter": _nvitop_exporter,
    "plain_loop": _plain_loop,
}


def versions() -> dict[str, str]:
    """Of what the peers are made of. Raises CannotMeasure when something is not installed."""
    try:
        return {name: metadata.version(name) for name in DISTRIBUTIONS}
    except metadata.PackageNotFoundError as error:
        raise CannotMeasure(f"{error.name} is not installed; {INSTALL}") from error


def build_driver(folder: Path) -> Path:
    """The fake driver's library. Raises CannotMeasure."""
    try:
        return build(folder)
    except CannotBuild as error:
        raise CannotMeasure(f"no fake driver: {error}; a C compiler and {INSTALL}") from error
    except subprocess.SubprocessError as error:
        raise CannotMeasure(f"the fake driver cannot be compiled: {error}") from error


@contextlib.contextmanager
def running(library: Path, folder: Path, latency_us: float) -> Iterator[tuple[RunningPeer, ...]]:
    """All peers, each serving its page; ended at the end of the block."""
    with contextlib.ExitStack() as stack:
        peers = []
        for name in PEERS:
            peers.append(_start(name, library, folder / name, latency_us))
            stack.callback(stop, peers[-1].process)
        for running_peer in peers:
            _wait(running_peer, folder / running_peer.name / "log")
        yield tuple(peers)


def _start(name: str, library: Path, folder: Path, latency_us: float) -> RunningPeer:
    folder.mkdir(parents=True)
    driver = FakeDriver(library, folder / "driver", PROFILE, GPUS, latency_us=latency_us, **LOAD)
    # A process on each GPU, as where somebody trains: one that is there, so that it has a name.
    driver.processes(None, f"{os.getpid()}/{MEMORY_MIB}")
    port = free_port()
    environment = clean_environment() | driver.environment
    process = start(PEERS[name](port, folder), environment, folder / "log")
    return RunningPeer(name, process, port, driver)


def _wait(peer: RunningPeer, log: Path) -> None:
    try:
        wait_until(lambda: peer.pid and _accepts(peer.port))
    except (TimeoutError, CannotMeasure) as error:
        said = last_line(log.read_text(errors="replace"))
        raise CannotMeasure(f"{peer.name} serves no page: {error}; it wrote: {said}") from error


def _accepts(port: int) -> bool:
    """Raises OSError while nothing listens."""
    with socket.create_connection(("127.0.0.1", port)):
        return True
