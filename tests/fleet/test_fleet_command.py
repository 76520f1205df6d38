"""`warpwatch fleet` as a command: its mistakes, and the process over an agent of this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.daemon.http.alert_node import alert, notification
from tests.daemon.http.conftest import MemoryAgent, http_client, servers
from tests.loop.node import ROOT, poll
from tests.waiting import DEADLINE_S
from warpwatch_daemon import cli
from warpwatch_daemon.demo.processes import free_port

TOKEN = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{targets: [gpu-1]}", "fleet.targets.0"),
        ("{target: []}", "did you mean 'targets'"),
        ("{agents: {token_file: /t}}", "in plain text"),
        ("{agents: {token_file: /no/t, allow_plain: true}}", "/no/t: No such file"),
        ("{agents: {ca_file: /no/ca.pem}}", "cannot use /no/ca.pem"),
        ("{shard: {index: 1}}", "there is no 1 of 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "fleet.yaml").write_text(f"fleet: {text}")
    assert cli.main(["fleet", "--config", str(tmp_path / "fleet.yaml")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def up(http: httpx.Client) -> list[str]:
    return [one["name"] for one in http.get("/readyz").json()["sources"] if one["up"]]


def away(http: httpx.Client) -> str:
    (source,) = http.get("/readyz").json()["sources"]
    return "" if source["up"] else str(source["reason"])


def test_a_fleet_shows_its_agents_and_says_who_is_away(tmp_path: Path) -> None:
    port, token = free_port(), tmp_path / "token"
    token.write_text("secret")
    agent = MemoryAgent(tmp_path)
    name = agent.now.hostname
    with servers(agent) as serve:
        server = serve(token_file=token)
        address = "{}:{}".format(*server.address)
        own = {
            "listen": f"127.0.0.1:{port}",
            "targets": [address],
            "token_file": str(token),
            "state_dir": str(tmp_path / "fleet"),
            "agents": {"token_file": str(token), "allow_plain": True},
        }
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"fleet": own}))
        command = [sys.executable, "-m", "warpwatch_daemon", "fleet", "--config"]
        fleet = subprocess.Popen([*command, str(tmp_path / "fleet.yaml")], cwd=ROOT)
        try:
            with http_client(f"http://127.0.0.1:{port}", headers=TOKEN) as http:
                assert poll(lambda: up(http), "an agent is followed") == [name]
                check_answers(http, name)
                server.stop()
                assert poll(lambda: away(http), "the agent is away")
                serve(listen=address, token_file=token)
                assert poll(lambda: up(http), "the agent is back") == [name]
            fleet.terminate()
            assert fleet.wait(DEADLINE_S) == 0
        finally:
            fleet.kill()
            fleet.wait()


def check_answers(http: httpx.Client, name: str) -> None:
    assert name in http.get("/").text
    assert http.get("/api/v1/jobs", headers={"Authorization": ""}).status_code == 401
    metrics = http.get("/metrics").text
    assert 'warpwatch_fleet_agents{state="up"} 1.0' in metrics
    assert f'warpwatch_fleet_agent_lag_seconds{{node="{name}"}}' in metrics
    (answer,) = http.post(
        "/api/v1/alertmanager", json=notification(alert(training_job="train", capture="torch"))
    ).json()["alerts"]
    assert (answer["outcome"], answer["detail"][:14]) == ("no_rank", "no running ran")
    # What agents alone answer is not there.
    for path in ("leases", "captures/prepare"):
        assert http.post(f"/api/v1/{path}", json={}).status_code in (404, 405)
    assert "/api/v1/records" not in http.get("/openapi.json").json()["paths"]
