"""A daemon in a folder of its own, beside which something is measured."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.processes import (
    CannotMeasure,
    clean_environment,
    last_line,
    start,
    stop,
    wait_until,
)
from warpwatch_daemon.api_client import ApiClient, socket_path
from warpwatch_daemon.demo.processes import free_port


@dataclass(frozen=True, slots=True)
class LocalDaemon:
    pid: int
    port: int
    folder: Path
    api: ApiClient

    @property
    def training_environment(self) -> dict[str, str]:
        """Of a process that is to find this daemon."""
        return {
            **clean_environment(),
            "WARPWATCH_DIR": str(self.folder / "run"),
            "WARPWATCH_INBOX": str(self.folder / "inbox"),
            "WARPWATCH_ATTACH_INTERVAL_S": "0.2",
        }

    def ranks(self, job: str) -> list[dict[str, Any]]:
        return [rank for rank in self.api.get("/api/v1/ranks")["ranks"] if rank["job"] == job]


def daemon_arguments(folder: Path, port: int, **sections: Any) -> list[str]:
    """What Python runs the daemon with; ``sections`` are added to its configuration."""
    config: dict[str, Any] = {
        "http": {"listen": f"127.0.0.1:{port}"},
        "rendezvous": {"dir": str(folder / "run"), "inbox": str(folder / "inbox")},
        "store": {"url": (folder / "captures").as_uri()},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section if isinstance(section, dict) else section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["-m", "warpwatch_daemon", "daemon", "--config", str(path)]


@contextlib.contextmanager
def running_daemon(**sections: Any) -> Iterator[LocalDaemon]:
    """One that answers, until the end of the block. Raises CannotMeasure, TimeoutError."""
    with tempfile.TemporaryDirectory(prefix="warpwatch-bench-") as name:
        folder, port = Path(name), free_port()
        log = folder / "daemon.log"
        api = ApiClient(f"http://127.0.0.1:{port}", socket_path=socket_path(folder / "run"))
        process = start(daemon_arguments(folder, port, **sections), clean_environment(), log)
        try:
            wait_until(lambda: process.poll() is not None or api.get("/healthz"))
            if process.returncode is not None:
                said = last_line(log.read_text(errors="replace"))
                raise CannotMeasure(f"the daemon ended with {process.returncode}: {said}")
            yield LocalDaemon(process.pid, port, folder, api)
        finally:
            stop(process)
