"""Every route over a real connection, what a fleet may ask for, files of captures, and commands."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cases import cases as tables
from tests.daemon.http.alert_node import WEBHOOK, notification
from tests.daemon.http.conftest import CAPTURE, NOW, TRACE, certified, socket_of
from tests.loop.other_users import STRANGER, request
from warpwatch_daemon.api_client import is_url_of
from warpwatch_daemon.cli import main
from warpwatch_telemetry.errors import Refused

CAPTURES = "/api/v1/captures"
RESOLVE = "/api/v1/anomalies/a7/resolve"
CANCEL = f"{CAPTURES}/{CAPTURE.id}/cancel"
ASK: dict[str, Any] = {"job": "llama-7b", "owner": "uid/1000", "run": "r1"}
NAME = "20261122T201500-0a1b2c"


@pytest.mark.parametrize(("name", "counts"), tables(__file__)["counts"].items())
def test_lists_are_filtered(client, name, counts):
    found = {query: client.get(f"/api/v1/{name}?{query}").json()[name] for query in counts}
    assert {query: len(listed) for query, listed in found.items()} == counts


def test_captures_are_asked_for_by_users_and_fleets(client, agent, golden):
    body = {"job": "llama-7b", "ranks": [1, 0, 1], "steps": 3, "reason": "slow"}
    answer = client.post(CAPTURES, json=body | {"options": ["stacks", "shapes", "shapes"]})
    assert (answer.status_code, answer.json()["outcome"]) == (202, None)
    assert answer.headers["location"] == f"{CAPTURES}/20260921T150000-aaaaaa"
    about = {"id": f"{NAME}-2", "start_step": 40, "anomaly_id": "a7", "anomaly_kind": "straggler"}
    about |= {"anomaly_seen": {"rank": 3, "begin_step": 12, "ratio": 1.6}}
    answer = client.post(CAPTURES, json=ASK | about)
    assert (answer.json()["id"], answer.json()["start_step"]) == (f"{NAME}-2", 40)
    golden("http/asked.json", msgspec.json.format(msgspec.json.encode(agent.asked)))


def test_requests_of_a_fleet_of_version_0_2_0_are_read(client, agent):
    """The file has them as that fleet wrote them, with fields that are ignored today."""
    kept = json.loads(Path(__file__).with_name("bodies_of_0.2.0.json").read_bytes())
    for one in kept:
        answer = client.request(one["method"], one["path"], json=one.get("body"))
        assert answer.status_code == one["status"], (one["path"], answer.text)
    assert [(asked.trigger, asked.alerts) for asked in agent.asked] == [
        ("anomaly", ()), ("alert", ('{alertname="Stuck"}',)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "status"), [("refused_no_rank", 404), ("refused_busy", 409), ("refused_disk", 503)]
)
def test_a_refusal_keeps_its_reason(client, agent, reason, status):
    agent.refusal = Refused(reason, "not now")
    answer = client.post("/api/v1/captures", json={"job": "llama-7b"})
    assert answer.status_code == status
    assert answer.json() == {"error": {"reason": reason, "detail": "not now"}}


def test_a_fault_of_the_daemon_is_logged_and_reported_without_its_insides(client, agent, caplog):
    agent.overview = lambda: int("secret path /etc/x")
    answer = client.get("/api/v1/devices")
    assert answer.status_code == 500
    assert answer.json()["error"]["reason"] == "internal"
    assert "secret" not in answer.text
    assert agent.codes[500] == 1
    assert "a request for '/api/v1/devices' failed" in caplog.messages


def test_metrics_come_as_text_and_compressed_when_asked_for(client):
    plain = client.get("/metrics", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    labels = 'training_job="llama-7b",rank="1",owner="uid/1000"'
    assert f"warpwatch_steps_total{{{labels}}} 480\n" in plain.text
    with client.stream("GET", "/metrics", headers={"Accept-Encoding": "gzip"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    assert gzip.decompress(raw).startswith(b"# HELP warpwatch_")


def test_a_scraper_gets_the_format_that_it_asks_for(client, cases):
    """The first two are what Prometheus 3 and 2 send."""

    def content_type(accept: str) -> str:
        answer = client.get("/metrics", headers={"Accept": accept})
        found: str = answer.headers["content-type"]
        assert (answer.status_code, answer.text.endswith("\n# EOF\n")) == (200, "open" in found)
        assert answer.text.count("\nwarpwatch_steps_total{") == 2
        assert "\nwarpwatch_build_info{" in answer.text
        return found

    cases("http/formats.txt", content_type)


def test_every_answer_carries_the_security_headers(client):
    for path in ("/", "/metrics", "/api/v1/devices", "/nothing"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "server" not in headers


def test_root_resolves_an_anomaly_through_the_socket(
    client: Any, shared_server: Any, capsys: Any
) -> None:
    status, text = request(os.getuid(), socket_of(shared_server), RESOLVE, {})
    assert (status, json.loads(text)["id"]) == (200, "a7")
    assert json.loads(text)["summary"].endswith(f", resolved by uid {os.getuid()}")
    assert client.post("/api/v1/anomalies/none/resolve").status_code == 404
    # A fleet has the name of the node in its ID.
    assert main(["anomalies", "resolve", "none@gpu-3"]) == 3
    assert "on gpu-3 run: sudo warpwatch anomalies resolve none\n" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_may_capture_but_not_speak_for_a_fleet(client, agent, shared_server):
    fleets: list[dict[str, Any]] = [{"id": NAME}, {"start_step": 40}, {"anomaly_seen": {"rank": 1}}]
    fleets += [{"anomaly_id": "a", "anomaly_kind": "hang"}]
    asked = [(CAPTURES, ASK | about, "not_yours") for about in fleets]
    asked += [(f"{CAPTURES}/prepare", ASK, "not_yours"), (CANCEL, ASK, "not_yours")]
    asked += [(RESOLVE, {}, "not_yours")]
    asked += [(WEBHOOK, notification(), "not_root")]
    for path, body, reason in asked:
        status, text = request(STRANGER, socket_of(shared_server), path, body)
        assert (status, json.loads(text)["error"]["reason"]) == (403, reason), path
    # Their own job, also without its owner, and nobody else's.
    for owner, expected in (("", 202), (f"uid/{STRANGER}", 202), ("uid/1", 404)):
        status, _ = request(
            STRANGER, socket_of(shared_server), CAPTURES, {"job": "a", "owner": owner}
        )
        assert status == expected
    assert [asked.owner for asked in agent.asked] == 2 * [f"uid/{STRANGER}"]


BASE = f"/api/v1/captures/{CAPTURE.id}"


@pytest.fixture(autouse=True)
def files(agent, tmp_path):
    (agent.folder / TRACE).write_bytes(bytes(range(256)) * 1000)
    (agent.folder / "report.html").write_text("<script>alert(1)</script>")
    (agent.folder / "diagnosis.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", agent.folder / "link.txt")
    os.mkfifo(agent.folder / "fifo")


def test_a_trace_is_downloaded_whole_or_in_part(client):
    answer = client.get(f"{BASE}/{TRACE}")
    assert len(answer.content) == 256_000
    assert answer.headers["content-type"] == "application/gzip"
    assert answer.headers["content-disposition"] == f'attachment; filename="{TRACE}"'
    part = client.get(f"{BASE}/{TRACE}", headers={"Range": "bytes=1-3"})
    assert (part.status_code, part.content) == (206, b"\x01\x02\x03")


def test_a_report_runs_in_a_sandbox_without_scripts(client):
    answer = client.get(f"{BASE}/report.html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none'")
    assert "script" not in policy
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "content-disposition" not in answer.headers


@pytest.mark.parametrize("path", tables(__file__)["unreachable"])
def test_nothing_else_is_reachable(client, path):
    answer = client.get(CAPTURES + path.format(id=CAPTURE.id, trace=TRACE))
    assert answer.status_code == 404
    assert "secret" not in answer.text


PEERS = "warpwatch-peers.monitoring.svc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A certificate of a name that does not resolve, and a web-config.yml that names it."""
    return certified(tmp_path_factory.mktemp("certificate"), PEERS)


@pytest.fixture
def daemon(serve, folder):
    (folder / "token").write_text("secret")
    _, port = serve(web_config=folder / "web.yml", token_file=folder / "token").address
    return f"https://127.0.0.1:{port}"


def test_in_a_pod_the_variables_of_the_chart_are_enough(daemon, folder, monkeypatch, capsys):
    monkeypatch.setenv("WARPWATCH_URL", daemon)
    monkeypatch.setenv("WARPWATCH_CA_FILE", str(folder / "tls.crt"))
    monkeypatch.setenv("WARPWATCH_SERVER_NAME", PEERS)
    monkeypatch.setenv("WARPWATCH_HTTP__TOKEN_FILE", str(folder / "token"))
    assert main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["devices"]


@pytest.mark.parametrize("wrong", ["authority", "name"])
def test_a_daemon_that_is_not_the_one_meant_is_not_talked_to(daemon, folder, wrong, capsys):
    trusted = [] if wrong == "authority" else ["--ca-file", str(folder / "tls.crt")]
    named = ["--server-name", PEERS] if wrong == "authority" else []
    assert main(["status", "--url", daemon, *trusted, *named]) == 3
    assert "certificate verify failed" in capsys.readouterr().err
    assert main(["status", "--url", daemon.replace("https", "http")]) == 3
    assert "or it has TLS: use https:// and --ca-file" in capsys.readouterr().err


def test_an_authority_that_is_no_certificate_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "empty.crt").write_text("")
    for name, said in (("none.crt", "none.crt: No such"), ("empty.crt", "empty.crt: ")):
        authority = ["--ca-file", str(tmp_path / name)]
        assert main(["status", "--url", "https://127.0.0.1:9", *authority]) == 2
        assert said in capsys.readouterr().err


def test_the_daemon_of_this_machine_is_asked_through_its_socket_also_by_its_url(
    client, agent, url, shared_server, serve, capsys, monkeypatch
):
    agent.lacks = ("nvml: library not found",)
    for host, is_here in (("localhost", True), ("192.0.2.1", False), ("", False)):
        assert is_url_of(socket_of(shared_server), url.replace("127.0.0.1", host)) is is_here
    monkeypatch.setenv("WARPWATCH_URL", url.replace("127.0.0.1", "localhost"))
    assert main(["capture", "--job", "llama-7b"]) == 0
    # If the daemon is elsewhere, the doctor has only what it reports.
    monkeypatch.setenv("WARPWATCH_URL", serve().url)
    assert main(["capture", "--job", "llama-7b"]) == 3
    assert "without --url and WARPWATCH_URL" in capsys.readouterr().err
    monkeypatch.setattr("warpwatch_devices.nvml.survey.survey", pytest.fail)
    assert main(["doctor", "--json"]) == 1
    found = [(one["name"], one["ok"]) for one in json.loads(capsys.readouterr().out)]
    assert found == [("daemon", True), ("nvml", False), ("this machine", None)]


def test_status_ends_with_1_only_where_more_than_information_is_active(client, agent, capsys):
    _, straggler = agent.now.anomalies
    for changes, status in (({}, 1), ({"severity": "info"}, 0), ({"end_time": NOW}, 0)):
        agent.now = replace(agent.now, anomalies=(replace(straggler, **changes),))
        assert main(["status"]) == status
    assert "straggler, over" in capsys.readouterr().out
