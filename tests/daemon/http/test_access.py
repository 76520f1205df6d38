"""Who may change something, and who may read the files of captures."""

from __future__ import annotations

import os
import socket

import httpx
import pytest

from warpwatch_daemon.cli import main
from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http.peer import is_loopback
from warpwatch_daemon.http.server import Server
from warpwatch_daemon.http.socket_owner import owner
from warpwatch_telemetry.errors import UsageError

ASK = {"job": "llama-7b"}
REPORT = "/api/v1/captures/20260921T141959-3f9a1c/report.html"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("correct horse\n")
    return path


@pytest.fixture
def report(agent):
    (agent.folder / "report.html").write_text("<h1>Report</h1>")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def reason(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["reason"])


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"Host": "localhost:9400"}, None),
        ({"Host": "[::1]:9400"}, None),
        ({"Host": "evil.example"}, "foreign_host"),
        ({"Host": "127.0.0.1.evil.example"}, "foreign_host"),
        ({"Host": "localhost.evil.example:9400"}, "foreign_host"),
        ({"Forwarded": "for=10.0.0.7"}, "forwarded"),
        ({"X-Forwarded-For": "127.0.0.1"}, "forwarded"),
        ({"X-Forwarded-Proto": "https"}, "forwarded"),
        ({"X-Real-IP": "127.0.0.1"}, "forwarded"),
        ({"Via": "1.1 proxy"}, "forwarded"),
        ({"Host": "localhost", "Origin": "http://localhost"}, None),
        ({"Host": "localhost", "Origin": "https://localhost"}, "foreign_origin"),
        ({"Host": "localhost", "Origin": "http://localhost:3000"}, "foreign_origin"),
        ({"Origin": "https://evil.example"}, "foreign_origin"),
        ({"Origin": "https://ui.perfetto.dev"}, "foreign_origin"),
        ({"Origin": "null"}, "foreign_origin"),
    ],
)
def test_without_a_token_only_plain_requests_of_this_machine_read(tcp, headers, expected):
    answer = tcp.get("/api/v1/anomalies", headers=headers)
    if expected is None:
        assert answer.status_code == 200
    else:
        assert (answer.status_code, reason(answer)) == (403, expected)
        assert tcp.get("/metrics", headers=headers).status_code == 200


def test_over_tcp_nothing_changes_state_without_a_token(tcp, agent):
    for path, body in (("captures", ASK), ("alertmanager", {"alerts": []})):
        answer = tcp.post(f"/api/v1/{path}", json=body)
        assert (answer.status_code, reason(answer)) == (403, "token_needed")
    assert agent.asked == []


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_a_form_could_send_is_refused(client, agent, media_type):
    answer = client.post(
        "/api/v1/captures", content=b'{"job":"a"}', headers={"Content-Type": media_type}
    )
    assert (answer.status_code, reason(answer)) == (415, "not_json")
    assert agent.asked == []


def test_with_a_token_configured_it_is_needed_on_loopback_too(serve, token_file):
    url = serve(token_file=token_file).url + "api/v1/captures"
    missing = httpx.post(url, json=ASK)
    assert (missing.status_code, reason(missing)) == (401, "token_needed")
    assert missing.headers["www-authenticate"] == 'Bearer realm="warpwatch"'
    for wrong in ("x", "correct", "correct horse battery", "Correct horse"):
        assert httpx.post(url, json=ASK, headers=bearer(wrong)).status_code == 401
    assert httpx.post(url, json=ASK, headers={"Authorization": "correct horse"}).status_code == 401
    assert httpx.post(url, json=ASK, headers=bearer("correct horse")).status_code == 202


def test_commands_in_the_daemons_environment_know_its_token(serve, agent, token_file, monkeypatch):
    url = serve(token_file=token_file).url
    assert main(["capture", "--job", "llama-7b", "--url", url]) != 0
    monkeypatch.setenv("WARPWATCH_HTTP__TOKEN_FILE", str(token_file))
    assert main(["capture", "--job", "llama-7b", "--url", url]) == 0
    assert [asked.job for asked in agent.asked] == ["llama-7b"]


def test_the_token_vouches_for_a_request_through_a_proxy(serve, token_file):
    url = serve(token_file=token_file).url + "api/v1/captures"
    headers = bearer("correct horse") | {"Host": "gpu.example", "X-Forwarded-For": "10.0.0.7"}
    assert httpx.post(url, json=ASK, headers=headers).status_code == 202


def test_a_changed_token_file_is_read_again(serve, token_file):
    url = serve(token_file=token_file).url + "api/v1/captures"
    token_file.write_text("another one")
    os.utime(token_file, (1, 1))
    assert httpx.post(url, json=ASK, headers=bearer("correct horse")).status_code == 401
    assert httpx.post(url, json=ASK, headers=bearer("another one")).status_code == 202
    token_file.unlink()
    assert httpx.post(url, json=ASK, headers=bearer("another one")).status_code == 401


@pytest.mark.parametrize("content", [None, b"", b" \n"])
def test_a_token_file_without_a_token_is_a_usage_error(tmp_path, agent, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"http\.token_file"):
        Server(agent, HttpConfig(listen="127.0.0.1:0", token_file=path))


def test_files_of_captures_are_open_to_this_machine_alone(tcp, report):
    assert tcp.get(REPORT).status_code == 200
    for headers in ({"Host": "rebound.example"}, {"X-Forwarded-For": "10.0.0.7"}):
        assert tcp.get(REPORT, headers=headers).status_code == 403


def test_beyond_loopback_files_and_changes_need_the_token(serve, token_file, report):
    url = f"http://127.0.0.1:{serve(listen='0.0.0.0:0', token_file=token_file).address[1]}"
    assert httpx.get(url + REPORT).status_code == 401
    assert httpx.post(url + "/api/v1/captures", json=ASK).status_code == 401
    assert httpx.get(url + REPORT, headers=bearer("correct horse")).text == "<h1>Report</h1>"
    for path in ("/", "/api/v1/captures", "/api/v1/anomalies", "/openapi.json", "/nothing"):
        assert httpx.get(url + path).status_code == 401
    for path in ("/metrics", "/healthz", "/readyz"):
        assert httpx.get(url + path).status_code == 200


def test_metrics_take_the_token_where_the_configuration_says_so(serve, token_file, agent):
    url = serve(token_file=token_file, metrics_token=True).url + "metrics"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers=bearer("correct horse")).status_code == 200
    with pytest.raises(UsageError, match=r"http\.token_file is needed"):
        Server(agent, HttpConfig(listen="127.0.0.1:0", metrics_token=True))


def test_beyond_loopback_without_a_token_no_one_may(serve, report):
    url = f"http://127.0.0.1:{serve(listen=':0').address[1]}"
    for answer in (httpx.get(url + REPORT), httpx.post(url + "/api/v1/captures", json=ASK)):
        assert (answer.status_code, reason(answer)) == (403, "not_loopback")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("LOCALHOST", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::ffff:10.0.0.1", False),
        ("", False),
        ("localhost.evil.example", False),
    ],
)
def test_loopback_is_known_by_names_and_addresses(host, expected):
    assert is_loopback(host) is expected


def test_a_connection_that_its_client_has_closed_is_nobodys():
    """The kernel says UID 0 of it in /proc/net/tcp, whoever opened it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            addresses = client.getsockname(), server.getsockname()
            assert owner(*addresses) == os.getuid()
            client.close()
            assert owner(*addresses) is None
