"""`warpwatch fleet` as a command: its mistakes, and the process over an agent of this one."""

import signal
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest
import yaml

from tests.daemon.http.alert_node import alert, notification
from tests.daemon.http.conftest import MemoryAgent, http_client, servers
from tests.exporters.receiver import receiver
from tests.fleet.kubernetes.api_server import CAPTURES, NODE, certificate
from tests.fleet.kubernetes.conftest import helm4, objects, parts, played, stand_in
from tests.fleet.kubernetes.stand_in import StandIn
from tests.loop.node import ROOT, poll
from tests.waiting import DEADLINE_S, eventually
from warpwatch_daemon.cli import main
from warpwatch_daemon.demo.processes import free_port

__all__ = ["helm4", "objects", "parts", "played", "stand_in"]
TOKEN = {"Authorization": "Bearer secret"}


def sources(http: httpx.Client, up: bool) -> list[str]:
    listed = http.get("/readyz").json()["sources"]
    return [one["name" if up else "reason"] for one in listed if one["up"] == up]


def test_a_fleet_shows_its_agents_and_speaks_of_them_to_its_cluster(tmp_path, stand_in, parts):
    certificate(tmp_path)
    token, pod = tmp_path / "token", tmp_path / "pod.yaml"
    token.write_text("secret")
    pod.write_text(parts)
    port, injection = free_port(), f"127.0.0.1:{free_port()}"
    agent = MemoryAgent(tmp_path)
    agent.now = replace(agent.now, hostname=NODE)
    kinds = dict.fromkeys(("events", "conditions", "taints", "captures"), True)
    webhook = {"cert_file": str(tmp_path / "tls.crt"), "key_file": str(tmp_path / "tls.key")}
    webhook |= {"listen": injection, "file": str(pod)}
    with servers(agent) as serve, receiver() as collector:
        server = serve(token_file=token)
        address = "{}:{}".format(*server.address)
        own = {
            "listen": f"127.0.0.1:{port}",
            "targets": [address],
            "token_file": str(token),
            "metrics_token": True,
            "state_dir": str(tmp_path / "fleet"),
            "agents": {"token_file": str(token), "allow_plain": True},
            "kubernetes": {
                **kinds, "injection": webhook, "service_account": str(stand_in.folder),
            },
        }  # fmt: skip
        exporters = {"otlp": {"endpoint": collector.url, "interval_s": 1}}
        whole = {"fleet": own, "node": "fleet-7", "exporters": exporters}
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(whole))
        command = [sys.executable, "-m", "warpwatch_daemon", "fleet", "--config"]
        fleet = subprocess.Popen([*command, str(tmp_path / "fleet.yaml")], cwd=ROOT)
        try:
            with http_client(f"http://127.0.0.1:{port}", headers=TOKEN) as http:
                assert poll(lambda: sources(http, up=True), "an agent is followed") == [NODE]
                fleet.send_signal(signal.SIGHUP)
                assert "warpwatch page --fleet --base http://127.0.0.1:" in http.get("/login").text
                check_answers(http)
                check_cluster(stand_in, injection)
                server.stop()
                assert poll(lambda: sources(http, up=False), "the agent is away") != [""]
                serve(listen=address, token_file=token)
                assert poll(lambda: sources(http, up=True), "the agent is back") == [NODE]
            fleet.terminate()
            assert fleet.wait(DEADLINE_S) == 0
            assert b"fleet-7" in collector.bodies("/v1/metrics")[0]
        finally:
            fleet.kill()
            fleet.wait()


def check_answers(http: httpx.Client) -> None:
    assert NODE in http.get("/").text
    for path in ("/api/v1/jobs", "/metrics"):
        assert http.get(path, headers={"Authorization": ""}).status_code == 401
    metrics = http.get("/metrics").text
    assert 'warpwatch_fleet_agents{state="up"} 1.0' in metrics
    assert 'warpwatch_fleet_partition_judged{partition="0"} 1.0' in metrics
    assert 'warpwatch_loop_failures_total{loop="triggers"} 0.0' in metrics
    assert f'warpwatch_fleet_agent_lag_seconds{{node="{NODE}"}}' in metrics
    (answer,) = http.post(
        "/api/v1/alertmanager", json=notification(alert(training_job="train", capture="torch"))
    ).json()["alerts"]
    assert (answer["outcome"], answer["detail"][:14]) == ("no_rank", "no running ran")
    # Routes of agents are absent.
    for path in ("leases", "captures/prepare"):
        assert http.post(f"/api/v1/{path}", json={}).status_code in (404, 405)
    assert "/api/v1/records" not in http.get("/openapi.json").json()["paths"]


def check_cluster(server: StandIn, injection: str) -> None:
    """A condition of the node, the outcome of a Capture object, and a webhook."""
    conditions = eventually(lambda: server.node()["status"].get("conditions"), "a condition", 0.2)
    assert [(one["type"], one["status"]) for one in conditions] == [("GpuHealthy", "True")]
    spec = {"job": "llama", "kind": "torch", "steps": 5}
    server.create(CAPTURES, "Capture", "one", spec=spec)
    path = f"{CAPTURES}/one"
    outcome = eventually(lambda: server.ask("GET", path)["status"].get("outcome"), "none", 0.2)
    assert outcome == "refused_no_rank"
    with http_client(f"https://{injection}") as http:
        assert http.get("/inject").status_code == 405


@pytest.mark.parametrize("command", ["daemon", "fleet"])
def test_a_signal_to_reload_does_not_end_a_process_that_starts(command, tmp_path):
    before = signal.getsignal(signal.SIGHUP)
    assert main([command, "--config", str(tmp_path)]) == 2
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
