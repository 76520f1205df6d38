"""A daemon in a folder of its own on the driver of this machine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.processes import clean_environment, start, stop, wait_until
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.demo.processes import free_port

START_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Node:
    pid: int
    port: int
    folder: Path
    api: ApiClient

    @property
    def training_environment(self) -> dict[str, str]:
        """For a process that shall find this daemon."""
        return {
            **clean_environment(),
            "WARPWATCH_DIR": str(self.folder / "run"),
            "WARPWATCH_INBOX": str(self.folder / "inbox"),
            "WARPWATCH_ATTACH_INTERVAL_S": "0.2",
        }

    def devices(self) -> list[dict[str, Any]]:
        """Those that are up, with their values by series."""
        found = self.api.get("/api/v1/devices")["devices"]
        return [device for device in found if device["up"]]


@contextlib.contextmanager
def running_node(**config: Any) -> Iterator[Node]:
    """A daemon that answers; ``config`` replaces sections of its configuration."""
    with tempfile.TemporaryDirectory(prefix="warpwatch-gpu-node-") as name:
        folder, port = Path(name), free_port()
        tree: dict[str, Any] = {
            "http": {"listen": f"127.0.0.1:{port}"},
            "rendezvous": {"dir": str(folder / "run"), "inbox": str(folder / "inbox")},
            "store": {"url": (folder / "captures").as_uri()},
            "triggers": {"cooldown_s": 0, "captures_per_hour": 100},
            "exporters": {"jsonl": {"path": str(folder / "log.jsonl")}},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(tree | config))
        arguments = ["-m", "warpwatch_daemon", "daemon", "--config", str(folder / "config.yaml")]
        log = folder / "daemon.log"
        process = start(arguments, clean_environment(), log)
        try:
            api = ApiClient(f"http://127.0.0.1:{port}")
            wait_until(lambda: process.poll() is not None or api.get("/healthz"), START_TIMEOUT_S)
            if process.returncode is not None:
                raise RuntimeError(f"the daemon ended with {process.returncode}: {last_line(log)}")
            yield Node(process.pid, port, folder, api)
        finally:
            stop(process)


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:200] if lines else "nothing was said"
