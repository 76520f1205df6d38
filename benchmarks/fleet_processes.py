"""Starts fleets and simulated agents with faults, and compares what the fleet finds with them."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.processes import clean_environment, start, stop
from benchmarks.simulated_agents import Scale, SimAgent
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.demo.processes import free_port

UP_TIMEOUT_S = 120.0
HANG_TIMEOUT_S = 30.0
OPEN_FILES = 8192


@dataclass(frozen=True, slots=True)
class Faults:
    """The slow rank of each job in ``slow`` and the stuck jobs, from the time ``at`` on."""

    at: float
    slow: dict[str, int]
    stuck: list[str]


def choose_faults(nodes: list[SimAgent], at: float, slow_jobs: int, stuck_jobs: int) -> Faults:
    """Choose jobs on several nodes."""
    sizes = {node.job: node.world_size for node in nodes}
    jobs = list(dict.fromkeys(node.job for node in nodes if node.ranks.start))
    stuck = jobs[-min(stuck_jobs, len(jobs) // 2) :]
    slow = [job for job in jobs if job not in stuck][:slow_jobs]
    return Faults(at, {job: sizes[job] // 2 for job in slow}, stuck)


def delays(anomalies: list[dict[str, Any]], kind: str, faults: Faults) -> list[float]:
    """Return the delays of the anomalies that name the right job and rank, since the fault."""
    wanted: dict[str, int | None] = dict(faults.slow)
    if kind == "hang":
        wanted = dict.fromkeys(faults.stuck)
    return [
        one["time"] - faults.at
        for one in anomalies
        if one["kind"] == kind
        and one["job"] in wanted
        and wanted[one["job"]] in (None, one["rank"])
    ]


@contextlib.contextmanager
def running_agents(
    scale: Scale, faults: Faults, port: int, on_bus: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run simulated agents at the port, or on the bus there, until the end of the block."""
    settings = {"scale": scale, "on_bus": on_bus, **asdict(faults)}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.simulated_agents", str(port), json.dumps(settings)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        preexec_fn=_allow_open_files,
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        stop(process)
        process.stdout.close()


def _allow_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))


def fleet_config(folder: Path, port: int, own: dict[str, Any], **sections: Any) -> Path:
    """Write the configuration of a fleet with ``own`` keys in its section."""
    token, config = folder / "token", folder / f"fleet-{port}.yaml"
    token.write_text("bench")
    section = {"listen": f"127.0.0.1:{port}", "token_file": str(token)}
    section |= {"state_dir": str(folder / f"state-{port}"), **own}
    detection = {"hang": {"timeout_s": HANG_TIMEOUT_S}}
    config.write_text(yaml.safe_dump({"fleet": section, "detection": detection, **sections}))
    return config


def start_fleet(
    folder: Path, own: dict[str, Any], **sections: Any
) -> tuple[subprocess.Popen[bytes], ApiClient]:
    port = free_port()
    config = fleet_config(folder, port, own, **sections)
    command = ["-m", "warpwatch_daemon", "fleet", "--config", str(config)]
    process = start(command, clean_environment(), folder / f"log-{port}")
    return process, ApiClient(f"http://127.0.0.1:{port}", folder / "token")
