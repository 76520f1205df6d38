"""A small fleet of real processes: two nodes, a job of four ranks over both, a Prometheus.

One node has simulated devices, which fill every metric; the other the fake driver under the real
NVML source, with MIG instances and the processes of its ranks.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.fakenvml.driver import FakeDriver, build
from tests.loop.node import ROOT, LoopNode, poll
from warpwatch.daemon.demo.processes import free_port

PROGRAM = ROOT / "tests" / "dashboards" / "training.py"
NODES, RANKS = ("gpu-01", "gpu-02"), 4
DRIVER_NODE = "gpu-02"
RANKS_OF_NODE = RANKS // len(NODES)
CLUSTER = "research"
SCRAPE_S = 1


class Prometheus:
    """A real one, that scrapes the nodes each second as the chart's monitors do."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        folder.mkdir()
        self.url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(_scrape_config(ports)))
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )
        self._http = httpx.Client(base_url=self.url, timeout=30)

    def query(self, promql: str, at: float | None = None) -> list[dict[str, Any]]:
        """What an instant query answers, now or at a time."""
        moment = {} if at is None else {"time": str(at)}
        return self._ask("/api/v1/query", {"query": promql, **moment})

    def query_range(
        self, promql: str, begin: float, end: float, step_s: float
    ) -> list[dict[str, Any]]:
        window = {"start": str(begin), "end": str(end), "step": str(step_s)}
        return self._ask("/api/v1/query_range", {"query": promql, **window})

    def _ask(self, path: str, form: dict[str, str]) -> list[dict[str, Any]]:
        answer = self._http.post(path, data=form).json()
        assert answer["status"] == "success", (form["query"], answer)
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def close(self) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()


def _scrape_config(ports: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"node": node, "cluster": CLUSTER}}
        for node, port in ports.items()
    ]
    job = {"job_name": "warpwatch", "honor_labels": True, "static_configs": targets}
    interval = f"{SCRAPE_S}s"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [job],
    }


class Fleet:
    """``fault`` names the rank that is slow from now on; None: none."""

    def __init__(
        self, folder: Path, nodes: dict[str, LoopNode], driver: FakeDriver, prometheus: Prometheus
    ) -> None:
        self.nodes = nodes
        self.driver = driver
        self.prometheus = prometheus
        self._meeting = folder / "meeting"

    def start_training(self) -> None:
        for rank in range(RANKS):
            name, local = NODES[rank // RANKS_OF_NODE], rank % RANKS_OF_NODE
            process = self._start_rank(self.nodes[name], rank, local)
            if name == DRIVER_NODE:
                self.driver.processes(local, f"{process.pid}/61440")

    def _start_rank(self, node: LoopNode, rank: int, local: int) -> subprocess.Popen[bytes]:
        uuid = poll(lambda: _uuid(node, local), 30, f"{node.folder.name} reads its GPUs")
        environment = node.rank_environment(rank, RANKS)
        environment |= {"LOCAL_RANK": str(local), "WARPWATCH_GPU_UUID": uuid}
        return node.start(f"rank{rank}", [str(PROGRAM), str(self._meeting)], environment)

    def fault(self, rank: int | None) -> None:
        path = self._meeting.with_suffix(".fault")
        path.write_text("" if rank is None else str(rank))

    def wait_for(self, promql: str, timeout_s: float) -> list[dict[str, Any]]:
        """The first answer of a query that is not empty."""
        found: list[dict[str, Any]] = poll(
            lambda: self.prometheus.query(promql), timeout_s, f"{promql} says something"
        )
        return found


def _uuid(node: LoopNode, index: int) -> str | None:
    found = [device["uuid"] for device in node.get("devices") if device["index"] == index]
    return str(found[0]) if found else None


def _start_nodes(
    folder: Path, driver: FakeDriver, stack: contextlib.ExitStack
) -> dict[str, LoopNode]:
    nodes = {}
    for name in NODES:
        (folder / name).mkdir()
        nvml = name == DRIVER_NODE
        sources = {"nvml": {"enabled": nvml}, "simulated": {"enabled": not nvml}}
        log = {"jsonl": {"path": str(folder / name / "log.jsonl")}}
        node = nodes[name] = LoopNode(folder / name, sources=sources, exporters=log)
        stack.callback(node.close)
        node.start_daemon(wait=True, **(driver.environment if nvml else {}))
    return nodes


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        driver = FakeDriver(build(folder / "library"), folder / "driver", gpus=4)
        driver.mig(3, "0=3g.40gb/1/0", "1=1g.10gb/2/0")
        nodes = _start_nodes(folder, driver, stack)
        ports = {name: node.port for name, node in nodes.items()}
        prometheus = Prometheus(folder / "prometheus", ports)
        stack.callback(prometheus.close)
        yield Fleet(folder, nodes, driver, prometheus)
