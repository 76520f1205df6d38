"""The demo over nodes: each an agent with folders of its own, one training, a fleet over all."""

from __future__ import annotations

import secrets
from pathlib import Path

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.demo.processes import RANKS, DemoProcesses, free_port
from warpwatch_runtime import files

# More would not train on one machine.
MAX_NODES = 8


class DemoNodes(DemoProcesses):
    """``listen``: of the fleet; each node has RANKS of the training."""

    watcher = "fleet"

    def __init__(self, listen: str, store: Path | None, nodes: int) -> None:
        super().__init__(listen, store)
        self.api = ApiClient(self.url)
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
