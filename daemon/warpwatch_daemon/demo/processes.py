"""Starts and stops the demo's processes, agent and ranks, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from warpwatch_daemon.api_client import FLEET, ApiClient, socket_path
from warpwatch_devices.simulated import simulated_uuid
from warpwatch_runtime import files
from warpwatch_serving.config import url_of
from warpwatch_telemetry.errors import UsageError, WarpwatchError

# The fault of a training in which nothing is wrong, and the rank that is slow or that hangs.
NONE = "none"
CULPRIT = 0
DEVICES = 8
RANKS = 2
JOB = "demo"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
# Long enough for a noisy machine, short enough to watch.
HANG_TIMEOUT_S = 8.0


class Switch:
    """A file that contains the present fault; every rank reads it once per step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, fault: str) -> None:
        files.write(self._path, fault.encode(), durable=False)

    def get(self) -> str:
        try:
            return self._path.read_text()
        except OSError:
            return NONE


class DemoProcesses:
    """The demo's processes, a context that stops them at its end.

    ranks: their number. watcher: the process with the log of findings.
    """

    ranks = RANKS
    watcher = "daemon"

    def __init__(self, listen: str, store: Path | None) -> None:
        host, _, port = listen.rpartition(":")
        self.listen = f"{host}:{port if port != '0' else free_port()}"
        self.url = url_of(self.listen)
        self.work = Path(tempfile.mkdtemp(prefix="warpwatch-demo-"))
        self.api = ApiClient(self.url, socket_path=socket_path(self.work / "run"))
        self.store = store or self.work / "captures"
        self.switch = Switch(self.work / "fault")
        self.run = ""
        self._watchers: dict[str, subprocess.Popen[bytes]] = {}
        self._ranks: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> DemoProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_training()
        stop([*self._watchers.values()], signal.SIGTERM)
        # Captures stay, to be opened later.
        for path in self.work.iterdir():
            if path == self.store and self.has_captured:
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with contextlib.suppress(OSError):
            self.work.rmdir()

    def link(self) -> str:
        """Return a link to the web page, valid once and for a minute."""
        path: str = self.api.post("/api/v1/sessions", {})["path"]
        return f"{self.url}{path}"

    @property
    def has_captured(self) -> bool:
        return any(self.store.rglob("capture.json"))

    # --- the daemon ---

    def start_daemon(self) -> None:
        """Start the daemon, or agents and fleet. Raises WarpwatchError."""
        self.watch("daemon", self.api, self.config(self.work, self.listen, DEVICES))

    def watch(self, name: str, api: ApiClient, config: dict[str, Any], command: str = "") -> None:
        """Start a process with this configuration, and wait for its API."""
        check_free(api.url.removeprefix("http://"))
        path = self.work / f"{name}.yaml"
        files.write(path, yaml.safe_dump(config).encode())
        arguments = ["warpwatch_daemon", command or name, "--config", str(path)]
        # A fleet has its socket beside that folder; an agent's configuration names another one.
        environment = {"WARPWATCH_DIR": str(self.work / "run")}
        self._watchers[name] = self._start(name, arguments, environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._watchers[name].poll() is not None:
                raise UsageError(self.log_tail(name))
            with contextlib.suppress(WarpwatchError):
                api.get("/healthz")
                return
            time.sleep(0.1)
        raise WarpwatchError(f"the {name} did not start: {self.log_tail(name)}")

    def config(self, folder: Path, listen: str, devices: int) -> dict[str, Any]:
        """Return the configuration of one node's agent."""
        return {
            "http": {"listen": listen},
            "rendezvous": {"dir": str(folder / "run"), "inbox": str(folder / "inbox")},
            "sources": {
                "nvml": {"enabled": False},
                "simulated": {"enabled": True, "devices": devices},
            },
            "store": {"url": self.store.absolute().as_uri()},
            **self.rules(),
        }

    def rules(self) -> dict[str, Any]:
        """Return the sections that agents and a fleet share."""
        return {
            # Ranks and daemon share few cores with other programs, whose short bursts are not
            # the demo's subject.
            "detection": {
                "false_alarms_per_job_day": 1e-6,
                "hang": {"timeout_s": HANG_TIMEOUT_S},
                # Its short runs with different faults cannot be compared.
                "disabled": ["run_regression"],
            },
            # The same fault again is reported again.
            "anomalies": {"reopen_s": 0},
            "triggers": {"cooldown_s": 0, "captures_per_hour": 1000, "captures_per_day": 1000},
        }

    # --- the training ---

    def folder(self, rank: int) -> Path:
        return self.work

    def start_training(self) -> None:
        self.switch.set(NONE)
        (self.work / "stop").unlink(missing_ok=True)
        self.run = f"gloo-{time.monotonic_ns()}"
        meeting = self.work / self.run
        for rank in range(self.ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % RANKS),
                "WORLD_SIZE": str(self.ranks),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "WARPWATCH_DIR": str(self.folder(rank) / "run"),
                "WARPWATCH_INBOX": str(self.folder(rank) / "inbox"),
                "WARPWATCH_JOB": JOB,
                "WARPWATCH_RUN": self.run,
                "WARPWATCH_GPU_UUID": simulated_uuid(rank % RANKS),
                "WARPWATCH_DEMO_SWITCH": str(self.work / "fault"),
                "WARPWATCH_DEMO_STOP": str(self.work / "stop"),
                "WARPWATCH_DEMO_RENDEZVOUS": str(meeting),
            }
            module = ["warpwatch_daemon.demo.training"]
            self._ranks.append(self._start(f"rank{rank}", module, environment))

    def stop_training(self) -> None:
        self.switch.set(NONE)
        (self.work / "stop").touch()
        stop(self._ranks, None)
        self._ranks = []

    def check_training(self) -> None:
        """Raise WarpwatchError if a rank has ended by itself."""
        for rank, process in enumerate(self._ranks):
            if process.poll() is not None:
                raise WarpwatchError(
                    f"rank {rank} ended with {process.returncode}: {self.log_tail(f'rank{rank}')}"
                )

    # --- both ---

    def _start(
        self, name: str, module: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("WARPWATCH_")}
        with (self.work / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *module],
                env={**kept, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log_tail(self, name: str) -> str:
        text = (self.work / f"{name}.log").read_text(errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"


def stop(processes: list[subprocess.Popen[bytes]], number: int | None) -> None:
    """Wait for the processes to end, after a signal if one is given; kill those that do not."""
    for process in processes:
        if number is not None and process.poll() is None:
            process.send_signal(number)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check_free(listen: str) -> None:
    """Raise UsageError if another process listens, which would answer for the daemon."""
    host, _, port = listen.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(
                f"cannot listen on {listen} ({error}); choose with --listen"
            ) from error


def free_port() -> int:
    """Return a port of this host for a server with SO_REUSEADDR, as nearly all have it."""
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    # It stays bound, so that no other process is given the port before the server listens.
    probe.detach()
    return port


# One machine cannot train more.
MAX_NODES = 8


class DemoNodes(DemoProcesses):
    """The processes of a fleet, at ``listen``, whose nodes have RANKS ranks each."""

    watcher = "fleet"

    def __init__(self, listen: str, store: Path | None, nodes: int) -> None:
        super().__init__(listen, store)
        self.api = ApiClient(self.url, socket_path=socket_path(self.work / "run", FLEET))
        self.ranks = nodes * RANKS

    def folder(self, rank: int) -> Path:
        return self.work / f"gpu-{rank // RANKS + 1}"

    def start_daemon(self) -> None:
        token = self.work / "token"
        files.write(token, secrets.token_hex().encode())
        addresses = []
        for rank in range(0, self.ranks, RANKS):
            folder, address = self.folder(rank), f"127.0.0.1:{free_port()}"
            config = self.config(folder, address, RANKS)
            config["http"]["token_file"] = str(token)
            config["store"] = {"url": (folder / "captures").as_uri()}
            config["node"] = folder.name
            self.watch(folder.name, ApiClient(f"http://{address}"), config, "daemon")
            addresses.append(address)
        fleet = {
            "listen": self.listen,
            "targets": addresses,
            "agents": {"token_file": str(token), "allow_plain": True},
            "state_dir": str(self.store),
        }
        self.watch("fleet", self.api, {"fleet": fleet, **self.rules()})
