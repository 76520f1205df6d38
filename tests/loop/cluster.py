"""Several nodes in folders of one machine, a fleet over them, and jobs with ranks on each."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.loop.node import ApiAnswers, LoopNode, poll, started
from tests.loop.trainings import PROGRAM, RANKS
from warpwatch_daemon.demo.processes import free_port

TOKEN = "of all agents"
# Sections that agents and fleet have in common.
FOR_FLEET = ("detection", "anomalies", "triggers", "remote_store", "exporters", "bus")


class LoopCluster(ApiAnswers):
    """``nodes`` agents, each in a folder of its own, with one token. Stopped by ``close``."""

    def __init__(self, folder: Path, nodes: int, **config: Any) -> None:
        self.folder = folder
        self._workers: list[subprocess.Popen[bytes]] = []
        token = folder / "token"
        token.write_text(TOKEN)
        self.nodes: list[LoopNode] = []
        for number in range(1, nodes + 1):
            own = folder / f"gpu-{number}"
            own.mkdir()
            self.nodes.append(
                LoopNode(own, node=own.name, http={"token_file": str(token)}, **config)
            )
        self.port = free_port()
        tree: dict[str, Any] = {
            "fleet": {
                "listen": f"127.0.0.1:{self.port}",
                "targets": [] if "bus" in config else self._targets(),
                "token_file": str(token),
                "state_dir": str(folder / "fleet"),
                "agents": {"token_file": str(token), "allow_plain": True},
            },
            **{key: config[key] for key in FOR_FLEET if key in config},
        }
        self.config = folder / "fleet.yaml"
        self.config.write_text(yaml.safe_dump(tree))
        self.fleet: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=60,
        )  # fmt: skip

    def start(self, **environment: str) -> None:
        for node in self.nodes:
            node.start_daemon(wait=True, **environment)
        self.start_fleet(None, **environment)

    def start_fleet(self, agents: int | None = None, **environment: str) -> None:
        self.fleet = self._start(self.config, "fleet", self.folder, **environment)
        poll(lambda: len(self.up()) == (agents or len(self.nodes)), self.log())

    def _targets(self) -> list[str]:
        return [f"127.0.0.1:{node.port}" for node in self.nodes]

    def start_worker(self, number: int, port: int) -> subprocess.Popen[bytes]:
        """Start another process of the fleet; its log is worker-NUMBER.log."""
        tree = yaml.safe_load(self.config.read_text())
        own = self.folder / f"worker-{number}"
        own.mkdir(exist_ok=True)
        tree["fleet"] |= {"listen": f"127.0.0.1:{port}", "state_dir": str(own)}
        file = own / "fleet.yaml"
        file.write_text(yaml.safe_dump(tree))
        worker = self._start(file, own.name, own)
        self._workers.append(worker)
        return worker

    def _start(
        self, config: Path, name: str, own: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        arguments = ["-m", "warpwatch_daemon", "fleet", "--config", str(config)]
        environment["WARPWATCH_DIR"] = str(own / "run")
        return started(arguments, self.folder / f"{name}.log", environment)

    def kill_fleet(self) -> None:
        self.fleet.kill()
        self.fleet.wait()

    def log(self) -> str:
        return (self.folder / "fleet.log").read_text(errors="replace")

    # --- a job over all nodes ---

    def train(self, job: str, **environment: str) -> Path:
        """Ranks in turn on the nodes, two and two. Returns the folder with their faults."""
        folder = self._new_folder(job)
        for rank in range(RANKS):
            node = self.nodes[rank * len(self.nodes) // RANKS]
            node.launch(job, [str(PROGRAM), str(folder)], rank, RANKS, environment)
        return folder

    def torchrun(self, job: str, ranks: int) -> Path:
        """One job, with so many ranks on each node. Returns the folder with their faults."""
        folder, port = self._new_folder(job), free_port()
        for number, node in enumerate(self.nodes):
            command = ["-m", "torch.distributed.run", f"--nnodes={len(self.nodes)}"]
            command += [f"--nproc-per-node={ranks}", f"--node-rank={number}"]
            command += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "warpwatch"]
            command += ["run", "--job", job, "--", sys.executable, str(PROGRAM), str(folder)]
            node.start("torchrun", command, node.environment)
        return folder

    def _new_folder(self, job: str) -> Path:
        folder = self.folder / job
        folder.mkdir()
        (folder / "fault").write_text("")
        return folder

    # --- what the fleet says ---

    def up(self) -> list[str]:
        sources = self.http.get("/readyz").json()["sources"]
        return [one["name"] for one in sources if one["up"]]

    def close(self) -> None:
        self.http.close()
        for node in self.nodes:
            node.close()
        for process in (*self._workers, *([self.fleet] if self.fleet else [])):
            process.kill()
            process.wait()


def loop_cluster(folder: Path, nodes: int, **config: Any) -> contextlib.closing[LoopCluster]:
    return contextlib.closing(LoopCluster(folder, nodes, **config))
