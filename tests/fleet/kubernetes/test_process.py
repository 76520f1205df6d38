"""`warpwatch fleet` as a process over an agent that is one, with all that it does in a cluster."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.fleet.kubernetes.api_server import CAPTURES, NODE, ApiServer, certificate, free_port
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import poll

pytestmark = pytest.mark.deploy


@pytest.fixture
def cluster(tmp_path: Path, server: ApiServer, parts: str) -> Iterator[LoopCluster]:
    certificate(tmp_path)
    (tmp_path / "pod.yaml").write_text(parts)
    with loop_cluster(tmp_path, 1) as cluster:
        tree = yaml.safe_load(cluster.config.read_text())
        injection = {"listen": f"127.0.0.1:{free_port()}", "file": str(tmp_path / "pod.yaml")}
        injection |= {"cert_file": str(tmp_path / "tls.crt"), "key_file": str(tmp_path / "tls.key")}
        tree["fleet"]["kubernetes"] = {
            **dict.fromkeys(("events", "conditions", "taints", "captures"), True),
            "injection": injection,
            "service_account": str(server.folder),
        }
        cluster.config.write_text(yaml.safe_dump(tree))
        cluster.start(**server.environment)
        yield cluster


def test_it_speaks_of_its_nodes_and_does_what_objects_ask(
    cluster: LoopCluster, server: ApiServer, tmp_path: Path
) -> None:
    def condition() -> Any:
        listed = server.node(NODE)["status"].get("conditions", [])
        return next((one for one in listed if one["type"] == "GpuHealthy"), None)

    assert poll(condition, cluster.log())["status"] == "True"
    kind = {"apiVersion": "warpwatch.dev/v1alpha1", "kind": "Capture"}
    about = {"metadata": {"name": "one"}, "spec": {"job": "llama", "kind": "torch", "steps": 5}}
    server.ask("POST", CAPTURES, {**kind, **about})

    def outcome() -> Any:
        return (server.ask("GET", f"{CAPTURES}/one").get("status") or {}).get("outcome")

    assert poll(outcome, cluster.log()) == "refused_no_rank"
    listen = yaml.safe_load(cluster.config.read_text())["fleet"]["kubernetes"]["injection"][
        "listen"
    ]
    verify = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    assert httpx.get(f"https://{listen}/inject", verify=verify).status_code == 405
    assert cluster.fleet is not None
    cluster.fleet.terminate()
    assert cluster.fleet.wait(30) == 0
