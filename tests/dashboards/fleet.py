"""A small fleet of real processes: two nodes, a job of four ranks over both, a Prometheus.

One node has simulated devices, which fill every metric; the other the fake driver under the real
NVML source, with MIG instances and the processes of its ranks.
"""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dashboards.monitoring.alertmanager import Alertmanager, alertmanager
from tests.dashboards.monitoring.prometheus import Prometheus, prometheus
from tests.devices.fakenvml.driver import FakeDriver, build
from tests.loop.node import ROOT, LoopNode, poll
from tests.waiting import eventually
from warpwatch_daemon.demo.processes import free_port

PROGRAM = ROOT / "tests" / "dashboards" / "training.py"
NODES, RANKS = ("gpu-01", "gpu-02"), 4
DRIVER_NODE = "gpu-02"
RANKS_OF_NODE = RANKS // len(NODES)
CLUSTER = "research"


@dataclass
class Fleet:
    """A fleet in which ``go_wrong`` makes a rank slow, and no other. Ranks meet in ``meeting``."""

    meeting: Path
    nodes: dict[str, LoopNode]
    driver: FakeDriver
    prometheus: Prometheus
    alertmanager: Alertmanager | None

    def start_training(self) -> None:
        for rank in range(RANKS):
            name, local = NODES[rank // RANKS_OF_NODE], rank % RANKS_OF_NODE
            process = self._start_rank(self.nodes[name], rank, local)
            if name == DRIVER_NODE:
                self.driver.processes(local, f"{process.pid}/61440")

    def _start_rank(self, node: LoopNode, rank: int, local: int) -> subprocess.Popen[bytes]:
        uuid = poll(lambda: _uuid(node, local), f"{node.folder.name} reads its GPUs")
        environment = node.rank_environment(rank, RANKS)
        environment |= {"LOCAL_RANK": str(local), "WARPWATCH_GPU_UUID": uuid}
        environment |= {"WARPWATCH_FLOPS_PER_TOKEN": "2.6e11", "WARPWATCH_PRECISION": "bfloat16"}
        return node.start(f"rank{rank}", [str(PROGRAM), str(self.meeting)], environment)

    def go_wrong(self, slow: int | None = None) -> None:
        self.meeting.with_suffix(".slow").write_text("" if slow is None else str(slow))

    def wait_for(self, promql: str) -> list[dict[str, Any]]:
        """The first answer of a query that is not empty."""
        return eventually(lambda: self.prometheus.query(promql), f"{promql} says something")


def _uuid(node: LoopNode, index: int) -> str | None:
    found = [device["uuid"] for device in node.get("devices") if device["index"] == index]
    return str(found[0]) if found else None


def _start_nodes(
    folder: Path, driver: FakeDriver, config: dict[str, Any], stack: contextlib.ExitStack
) -> dict[str, LoopNode]:
    nodes = {}
    for name in NODES:
        (folder / name).mkdir()
        nvml = name == DRIVER_NODE
        sources = {"nvml": {"enabled": nvml}, "simulated": {"enabled": not nvml}}
        sources |= config.get("sources", {})
        log = {"jsonl": {"path": str(folder / name / "log.jsonl")}}
        own = {"node": name, "sources": sources, "exporters": log}
        node = nodes[name] = LoopNode(folder / name, **config | own)
        stack.callback(node.close)
        node.start_daemon(wait=True, **(driver.environment if nvml else {}))
    return nodes


@contextlib.contextmanager
def fleet(
    folder: Path,
    *,
    rules: Sequence[Path] = (),
    webhook: tuple[str, Path] | None = None,
    **config: Any,
) -> Iterator[Fleet]:
    """Run a fleet of two daemons.

    webhook: the alert that reaches the node of the driver, and the file with its token.
    config: more configuration for both daemons; ``sources`` is merged.
    """
    with contextlib.ExitStack() as stack:
        driver = FakeDriver(build(folder / "library"), folder / "driver", gpus=4)
        driver.mig(3, "0=3g.40gb/1/0", "1=1g.10gb/2/0")
        nodes = _start_nodes(folder, driver, config, stack)
        alerts = None
        if webhook is not None:
            url = f"http://127.0.0.1:{nodes[DRIVER_NODE].port}/api/v1/alertmanager"
            alert, token = webhook
            alerts = stack.enter_context(alertmanager(folder, url, token, alert))
        targets = {node.port: labels(name) for name, node in nodes.items()}
        # And one that was switched off.
        targets[free_port()] = labels("gpu-03")
        port = None if alerts is None else alerts.port
        server = prometheus(folder, targets, rules=rules, alertmanager=port)
        yield Fleet(folder / "meeting", nodes, driver, stack.enter_context(server), alerts)


def labels(node: str) -> dict[str, str]:
    """The labels that the chart's monitors add to every series of a node."""
    return {"node": node, "cluster": CLUSTER}
