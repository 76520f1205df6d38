"""A daemon and its ranks as real processes, for tests of the whole loop."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import logged
from tests.waiting import DEADLINE_S, eventually
from warpwatch_daemon.api_client import socket_path
from warpwatch_daemon.demo.processes import free_port
from warpwatch_runtime.http_requests import connect

ROOT = Path(__file__).resolve().parents[2]


def poll(ask: Callable[[], Any], what: object) -> Any:
    """Return the first true answer of ``ask``; an HTTP error is not an answer.

    Raises AssertionError with ``what`` when only a hang explains the wait.
    """

    def answer() -> Any:
        with contextlib.suppress(httpx.HTTPError):
            return ask()

    return eventually(answer, what, poll_s=0.1)


def started(
    arguments: list[str], log: Path, environment: dict[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start Python with these arguments; its output goes to the end of ``log``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WARPWATCH_")}
    command = [sys.executable, *arguments]
    return logged(command, log, cwd=ROOT, env=kept | environment, stdin=stdin)


class SocketTransport(httpx.HTTPTransport):
    """Through a Unix socket; of one that is not there httpcore itself leaves its own end open."""

    def __init__(self, path: Path) -> None:
        super().__init__(uds=str(path))
        self._path = path

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            connect(self._path, 5.0).close()
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return super().handle_request(request)


class ApiAnswers:
    """Jobs, anomalies and captures, as the API of an agent or a fleet shows them to ``http``."""

    http: httpx.Client

    def get(self, part: str, **query: str) -> list[Any]:
        answer: list[Any] = self.http.get(f"/api/v1/{part}", params=query).json()[part]
        return answer

    def anomalies(self, kind: str) -> list[Any]:
        return [one for one in self.get("anomalies") if one["kind"] == kind]

    def captures(self, **request: object) -> list[Any]:
        """Return the captures whose requests have these values."""
        return [c for c in self.get("captures") if request.items() <= c["request"].items()]

    def ended(self, **request: object) -> list[Any]:
        """Return those of these captures that have an outcome."""
        return [capture for capture in self.captures(**request) if capture["outcome"]]

    def steps(self, job: str) -> list[int]:
        """Return the number of steps of each rank of the job."""
        return [rank["steps_total"] for rank in self.get("ranks") if rank["job"] == job]

    def metric(self, name: str, **labels: str) -> float | None:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [one for family in families for one in family.samples if one.name == name]
        found = [one for one in samples if labels.items() <= one.labels.items()]
        assert len(found) <= 1, found
        return found[0].value if found else None

    def have_trained(self, job: str, ranks: int, steps: int) -> None:
        """Wait until all these ranks of the job have taken so many steps."""

        def all_have() -> bool:
            taken = self.steps(job)
            return len(taken) == ranks and min(taken) >= steps

        poll(all_have, lambda: f"{job} has {self.steps(job)} steps, not {steps}")


class LoopNode(ApiAnswers):
    """One node in a folder: daemon, ranks, HTTP. Everything is stopped by ``close``."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.port = free_port()
        self.run_dir = folder / "run"
        tree: dict[str, Any] = {
            "http": {"listen": f"127.0.0.1:{self.port}"},
            "rendezvous": {"dir": str(self.run_dir), "inbox": str(folder / "inbox")},
            "sources": {"nvml": {"enabled": False}, "simulated": {"enabled": True}},
            "triggers": {"cooldown_s": 0, "captures_per_hour": 100},
            "store": {"url": (folder / "captures").as_uri()},
        }
        self.config = folder / "warpwatch.yaml"
        for section in ("http", "rendezvous"):
            tree[section] |= config.pop(section, {})
        self.config.write_text(yaml.safe_dump(tree | config))
        self.daemon: subprocess.Popen[bytes] | None = None
        self._all: list[subprocess.Popen[bytes]] = []
        self.url = f"http://127.0.0.1:{self.port}"
        # Through the socket: it may do what over TCP only a token does.
        transport = SocketTransport(socket_path(self.run_dir))
        self.http = httpx.Client(
            base_url="http://localhost", transport=transport, timeout=DEADLINE_S
        )

    # --- daemon ---

    def start_daemon(self, *, wait: bool = True, **environment: str) -> subprocess.Popen[bytes]:
        arguments = ["-m", "warpwatch_daemon", "daemon", "--config", str(self.config)]
        self.daemon = self.start("daemon", arguments, environment)
        if wait:
            poll(self._is_serving, lambda: self.log("daemon"))
        return self.daemon

    def _is_serving(self) -> bool:
        assert self.daemon.poll() is None, self.log("daemon")
        return self.http.get("/healthz").status_code == 200

    def kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.wait()

    def terminate_daemon(self) -> None:
        self.daemon.terminate()
        self.daemon.wait(DEADLINE_S)

    def lets_pass(self, seconds: float) -> None:
        """Wait in which nothing is to happen: longer than what would make it happen."""
        time.sleep(seconds)

    # --- ranks ---

    def start_rank(
        self, rank: int, program: str, *arguments: str, world_size: int = 2, **environment: str
    ) -> subprocess.Popen[bytes]:
        own = self.rank_environment(rank, world_size)
        return self.start(f"rank{rank}", ["-c", program, *arguments], own | environment)

    def launch(
        self,
        job: str,
        program: list[str],
        rank: int = 0,
        world_size: int = 1,
        environment: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a rank under ``warpwatch run``; the name of its log is JOB-RANK."""
        command = ["-m", "warpwatch", "run", "--job", job, "--", sys.executable, *program]
        own = self.rank_environment(rank, world_size) | (environment or {})
        return self.start(f"{job}-{rank}", command, own, stdin)

    def rank_environment(self, rank: int, world_size: int) -> dict[str, str]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        return self.environment | place

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a launcher, which numbers its ranks itself."""
        return {
            "WARPWATCH_DIR": str(self.run_dir), "WARPWATCH_INBOX": str(self.folder / "inbox"),
            "WARPWATCH_ATTACH_INTERVAL_S": "0.2", "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def start(
        self,
        name: str,
        arguments: list[str],
        environment: dict[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        process = started(arguments, self.folder / f"{name}.log", environment, stdin)
        self._all.append(process)
        return process

    # --- what the daemon says ---

    def command(self, *arguments: str) -> str:
        """Return the output of ``warpwatch`` with these arguments, which asks this daemon."""
        command = [sys.executable, "-m", "warpwatch_daemon", *arguments]
        environ = os.environ | {"WARPWATCH_DIR": str(self.run_dir)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        self.http.close()
        for process in self._all:
            if process.poll() is None:
                # A launcher's ranks must be killed as well. SIGKILL also ends a stopped process.
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.kill()
                process.send_signal(signal.SIGKILL)
        for process in self._all:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def loop_node(folder: Path, **config: Any) -> contextlib.closing[LoopNode]:
    return contextlib.closing(LoopNode(folder, **config))
