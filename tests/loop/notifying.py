"""Three agents on fake drivers, a fleet, and Prometheus and Alertmanager as examples/ has them.

All that rules and routes wait for takes a fifteenth of its time, and events stay active for a
fifteenth; detectors and daemons run as ever.
"""

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.dashboards.monitoring import alertmanager, prometheus
from tests.dashboards.monitoring.web import Web
from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.cluster import LoopCluster
from tests.loop.node import ROOT, LoopNode, poll, started
from warpwatch_dashboards import rule_files

SCALE = 15.0
EXAMPLES = ROOT / "examples" / "prometheus"
GPUS = 6
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(?<=\[)(\d+)([smhd])|(?<=:)(\d+)([smhd])(?=\])|(?<=offset )(\d+)([smhd])")
# A busy machine slows all steps of a job. The daemon reports it correctly; it is not tested here.
NOISE = [
    *("step_regression", "step_drift", "step_spikes", "comm_slow", "gc_pause", "run_regression"),
    *("memory_leak", "memory_pressure", "device_idle"),
]
CONFIG: dict[str, Any] = {
    "detection": {"disabled": NOISE, "hang": {"timeout_s": 140 / SCALE, "warmup_timeout_s": 60}},
    "anomalies": {"hold_s": 600 / SCALE, "reopen_s": 120 / SCALE},
    "triggers": {
        "recipes": dict.fromkeys(("straggler", "data_stall", "hang", "crash")),
        "baseline": {"enabled": False},
    },
    "sources": {
        "nvml": {"enabled": True},
        "simulated": {"enabled": False},
        "kernel_log": {"enabled": False},
    },
}


def shorter(duration: str) -> str:
    return f"{int(1000 * int(duration[:-1]) * _UNITS[duration[-1]] / SCALE)}ms"


def hurried_rules(folder: Path) -> list[str]:
    """Copies of all rules in which every time is shorter, but for limits of values."""
    folder.mkdir()
    for path in rule_files.FOLDER.glob("*.yaml"):
        rules = yaml.safe_load(path.read_text())
        for group in rules["groups"]:
            group["interval"] = shorter(group["interval"])
            for rule in group["rules"]:
                rule["expr"] = _SPAN.sub(lambda found: shorter(found[0]), rule["expr"])
                if "for" in rule:
                    rule["for"] = shorter(rule["for"])
        (folder / path.name).write_text(yaml.safe_dump(rules))
    return [str(folder / "*.yaml")]


class Site:
    """``tell`` lines of faults to a job; ``notes`` is what Alertmanager sent, by receiver."""

    def __init__(self, folder: Path, library: Path, **config: Any) -> None:
        self.folder = folder
        self.cluster = LoopCluster(folder, 3, **CONFIG | config)
        self.drivers = [
            FakeDriver(library, node.folder / "driver", gpus=GPUS, load=80)
            for node in self.cluster.nodes
        ]
        self.inbox = Web({})
        self._jobs: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for number in range(len(self.drivers)):
            self.start_agent(number)
        self.cluster.start_fleet()
        self.uuids = [self._uuids(node) for node in self.cluster.nodes]

    def start_agent(self, number: int) -> None:
        self.cluster.nodes[number].start_daemon(wait=True, **self.drivers[number].environment)

    @staticmethod
    def _uuids(node: LoopNode) -> list[str]:
        poll(lambda: len(node.get("devices")) == GPUS, "the GPUs are read")
        found = {device["index"]: str(device["uuid"]) for device in node.get("devices")}
        return [found[index] for index in range(GPUS)]

    def start_job(self, job: str, uid: int, nodes: tuple[int, ...], gpu: int = 0) -> None:
        """Two ranks on each of these nodes, on the GPUs from ``gpu`` on."""
        (self.folder / f"{job}.faults").write_text("")
        uuids = [self.uuids[node][gpu + local] for node in nodes for local in range(2)]
        folders = [str(self.cluster.nodes[node].folder) for node in nodes]
        program = str(Path(__file__).with_name("played_job.py"))
        arguments = [program, job, str(uid), str(self.folder / f"{job}.faults"), *folders]
        environment = {"PLAYED_GPUS": ",".join(uuids)}
        self._jobs[job] = started(arguments, self.folder / f"{job}.log", environment)

    def tell(self, job: str, *faults: str) -> None:
        new = self.folder / f"{job}.new"
        new.write_text("\n".join(faults))
        new.chmod(0o644)
        new.rename(self.folder / f"{job}.faults")

    def signal_job(self, job: str, signum: signal.Signals) -> None:
        """To all ranks, as a terminal or a scheduler does."""
        for rank in psutil.Process(self._jobs[job].pid).children():
            rank.send_signal(signum)

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        for process in self._jobs.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for rank in psutil.Process(process.pid).children():
                    rank.kill()
            process.kill()
            process.wait()
        self.cluster.close()

    # --- Prometheus and Alertmanager ---

    def alertmanager_config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load((EXAMPLES / "alertmanager.yml").read_text())
        config["route"] |= {"group_wait": shorter("30s"), "group_interval": shorter("5m")}
        for route in config["route"]["routes"]:
            if "group_wait" in route:
                route["group_wait"] = shorter(route["group_wait"])
        for receiver in config["receivers"]:
            hook = {"url": f"http://127.0.0.1:{self.inbox.port}/{receiver['name']}"}
            receiver["webhook_configs"] = [hook]
        return config

    def prometheus_config(self, port: int) -> dict[str, Any]:
        text = (EXAMPLES / "prometheus.yml").read_text()
        for number, node in enumerate(self.cluster.nodes, 1):
            text = text.replace(f"gpu-{number}:9400", f"127.0.0.1:{node.port}")
        text = text.replace("fleet:9401", f"127.0.0.1:{self.cluster.port}")
        text = text.replace("alertmanager:9093", f"127.0.0.1:{port}")
        config: dict[str, Any] = yaml.safe_load(text)
        spans = {"scrape_interval": "15s", "scrape_timeout": "15s", "evaluation_interval": "30s"}
        config["global"] = {key: shorter(value) for key, value in spans.items()}
        config["rule_files"] = hurried_rules(self.folder / "rules")
        return config


@contextlib.contextmanager
def site(folder: Path, library: Path) -> Iterator[tuple[Site, prometheus.Prometheus]]:
    found = Site(folder, library)
    with contextlib.ExitStack() as stack:
        stack.callback(found.close)
        found.start()
        stack.enter_context(found.inbox.serving())
        manager = stack.enter_context(alertmanager.configured(folder, found.alertmanager_config()))
        config = found.prometheus_config(manager.port)
        yield found, stack.enter_context(prometheus.configured(folder, config))
