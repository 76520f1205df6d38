"""Who may change something, who may read the files of captures, and who is at the socket."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import bcrypt
import httpx
import pytest

from tests.daemon.http.alert_node import WEBHOOK, notification
from tests.daemon.http.conftest import (
    CAPTURE,
    STRAGGLER,
    TIMEOUT_S,
    around_straggler,
    http_client,
    node_in_trouble,
)
from warpwatch_daemon import api_client
from warpwatch_daemon.cli import main
from warpwatch_serving.access import NO_OWNER, visible
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.peer import Peer, _is_of_this_machine, identify, is_loopback
from warpwatch_serving.server import Server
from warpwatch_serving.socket_owner import owner
from warpwatch_telemetry.captures import Decision
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.state import Sensitivity

ASK = {"job": "llama-7b"}
CAPTURES = "/api/v1/captures"
REPORT = f"{CAPTURES}/{CAPTURE.id}/report.html"
REQUESTS = (
    *(("GET", path, None) for path in ("/healthz", "/metrics", "/api/v1/jobs", REPORT, "/nothing")),
    *(("GET", "/api/v1/records", None), ("POST", CAPTURES, ASK)),
    *(("POST", f"{CAPTURES}/{CAPTURE.id}/cancel", None), ("POST", WEBHOOK, notification())),
)


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("correct horse\n")
    return path


@pytest.fixture
def secured(serve, token_file):
    """Starts a server with the token and returns a client of it."""
    with ExitStack() as stack:

        def start(**section):
            _, port = serve(token_file=token_file, **section).address
            return stack.enter_context(http_client(f"http://127.0.0.1:{port}"))

        yield start


@pytest.fixture
def report(agent):
    (agent.folder / "report.html").write_text("<h1>Report</h1>")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def basic(user: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


GIVEN = {
    "nothing": {},
    "proxy": {"X-Forwarded-For": "10.0.0.7"},
    "token": bearer("correct horse"),
    "token through a proxy": bearer("correct horse") | {"Host": "gpu.example", "Via": "1.1 x"},
    "wrong token": bearer("correct horse battery"),
    "password": basic("ali:open sesame"),
    "wrong password": basic("ali:open"),
}


def reason(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["reason"])


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        *((host, None) for host in ({}, {"Host": "localhost:9400"}, {"Host": "[::1]:9400"})),
        ({"Host": "evil.example"}, "foreign_host"),
        ({"Host": "127.0.0.1.evil.example"}, "foreign_host"),
        ({"Host": "localhost.evil.example:9400"}, "foreign_host"),
        *(
            ({name: "127.0.0.1"}, "forwarded")
            for name in ("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via")
        ),
        ({"Host": "localhost", "Origin": "http://localhost"}, None),
        ({"Host": "localhost", "Origin": "https://localhost"}, "foreign_origin"),
        ({"Host": "localhost", "Origin": "http://localhost:3000"}, "foreign_origin"),
        *(
            ({"Origin": origin}, "foreign_origin")
            for origin in ("https://evil.example", "https://ui.perfetto.dev", "null")
        ),
    ],
)
def test_without_a_token_only_plain_requests_of_this_machine_read(tcp, report, headers, expected):
    status = 200 if expected is None else 403
    answer = tcp.get("/api/v1/anomalies", headers=headers)
    assert answer.status_code == status
    assert expected is None or reason(answer) == expected
    assert tcp.get("/metrics", headers=headers).status_code == 200
    # A page of Perfetto may read what is below a capture.
    may_read = expected is None or "perfetto" in headers.get("Origin", "")
    assert tcp.get(REPORT, headers=headers).status_code == (200 if may_read else 403)


def test_who_may_do_what_is_the_golden_table(serve, token_file, tmp_path, report, agent, golden):
    """Each configuration of the server, what comes with a request, and the request."""
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
    web_config = tmp_path / "web.yml"
    web_config.write_text(f"basic_auth_users: {{ali: '{hashed}'}}\n")
    configurations = {
        "loopback": {},
        "loopback, token": {"token_file": token_file},
        "loopback, token for metrics": {"token_file": token_file, "metrics_token": True},
        "beyond loopback": {"listen": ":0"},
        "beyond loopback, token": {"listen": "0.0.0.0:0", "token_file": token_file},
        "password": {"web_config": web_config},
        "password, token": {"web_config": web_config, "token_file": token_file},
    }
    lines = []
    for configured, section in configurations.items():
        _, port = serve(**section).address
        with http_client(f"http://127.0.0.1:{port}") as client:
            for given, headers in GIVEN.items():
                for method, path, body in REQUESTS:
                    answer = client.request(method, path, json=body, headers=headers)
                    refused = "" if answer.is_success else f" {reason(answer)}"
                    asked = answer.headers.get("www-authenticate", "")
                    outcome = f"{answer.status_code}{refused} {asked}".rstrip()
                    lines.append(f"{configured}; {given}; {method} {path}: {outcome}")
    golden("http/access.txt", "\n".join(lines).encode())


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_a_form_could_send_is_refused(client, agent, media_type):
    headers = {"Content-Type": media_type}
    answer = client.post(CAPTURES, content=b'{"job":"a"}', headers=headers)
    assert (answer.status_code, reason(answer)) == (415, "not_json")
    assert agent.asked == []


def test_commands_in_the_daemons_environment_know_its_token(
    secured, agent, token_file, monkeypatch
):
    command = ["capture", "--job", "llama-7b", "--url", str(secured().base_url)]
    assert main(command) != 0
    monkeypatch.setenv("WARPWATCH_HTTP__TOKEN_FILE", str(token_file))
    assert main(command) == 0
    assert [asked.job for asked in agent.asked] == ["llama-7b"]


def test_a_command_sends_its_token_to_no_stranger(secured, agent, token_file, monkeypatch, capsys):
    url = str(secured().base_url)
    port = int(url.rpartition(":")[2])
    assert api_client.listeners(port) == {os.geteuid()}
    monkeypatch.setattr(api_client, "listeners", lambda port: {0, os.geteuid(), 4242})
    command = ["capture", "--job", "llama-7b", "--token-file", str(token_file), "--url"]
    assert main([*command, url]) == 2
    assert f"uid 4242 listens on port {port}" in capsys.readouterr().err
    assert main([*command, "http://gpu-1.invalid:9400"]) == 2
    assert "a token goes to gpu-1.invalid only over TLS" in capsys.readouterr().err
    assert agent.asked == []


def test_what_a_daemon_says_reaches_no_terminal_as_it_is(serve, agent, capsys):
    hostile = (replace(one, job="\x1b[2J\u202e") for one in agent.now.ranks)
    agent.now = replace(agent.now, ranks=tuple(hostile))
    url = serve().url
    main(["status", "--url", url])
    assert all(c == "\n" or c.isprintable() for c in capsys.readouterr().out)
    assert "\x1b" not in str(api_client.ApiClient(url).get("/api/v1/ranks"))


def test_only_the_token_in_the_file_is_the_token(secured, token_file):
    client = secured()

    def status(token: str, scheme: str = "Bearer ") -> int:
        headers = {"Authorization": scheme + token}
        return int(client.get(CAPTURES, headers=headers).status_code)

    assert status("correct horse") == status("correct horse", "bearer ") == 200
    for wrong in ("x", "correct", "Correct horse", "correct horse battery"):
        assert status(wrong) == 401
    assert status("correct horse", "") == status("correct horse", "Basic ") == 401
    # A changed file is read again.
    token_file.write_text("another one")
    os.utime(token_file, (1, 1))
    assert (status("correct horse"), status("another one")) == (401, 200)
    token_file.unlink()
    assert status("another one") == 401


@pytest.mark.parametrize("content", [None, b"", b" \n"])
def test_a_token_file_without_a_token_is_a_usage_error(tmp_path, agent, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"http\.token_file"):
        Server(agent, HttpConfig(listen="127.0.0.1:0", token_file=path))
    with pytest.raises(UsageError, match=r"http\.token_file is needed"):
        Server(agent, HttpConfig(listen="127.0.0.1:0", metrics_token=True))


def test_a_user_sees_what_is_of_devices_and_of_their_own_jobs():
    now = node_in_trouble()
    theirs: dict[str, Any] = {"owner": "uid/7"}
    capture, sight = now.captures[0], Sensitivity("hang", "llama-7b", "uid/1000", False, "")
    capture = replace(capture, request=replace(capture.request, owner="uid/1000"))
    ours = replace(STRAGGLER, owner="uid/1000")
    state = replace(
        now,
        ranks=(now.ranks[0], replace(now.ranks[0], **theirs)),
        jobs=(now.jobs[0], replace(now.jobs[0], **theirs)),
        captures=(capture, replace(capture, request=replace(capture.request, **theirs))),
        sensitivities=(sight, replace(sight, **theirs)),
        anomalies=(ours, replace(ours, id="xid", kind="xid"), replace(ours, id="b", **theirs)),
        contexts={"a7": around_straggler(), "b": around_straggler()},
        decisions=(Decision(1.0, "a7", "captured", ""), Decision(1.0, "b", "captured", "")),
    )
    seen = visible(state, "uid/1000")
    for part in ("ranks", "jobs", "captures", "sensitivities", "decisions"):
        assert getattr(seen, part) == getattr(state, part)[:1], part
    assert ([one.id for one in seen.anomalies], list(seen.contexts)) == (["a7", "xid"], ["a7"])
    assert visible(state, None) == state
    assert [one.id for one in visible(state, NO_OWNER).anomalies] == ["xid"]


def test_loopback_is_known_by_names_and_addresses():
    ours = ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "::ffff:127.0.0.1", "LOCALHOST")
    others = ("10.0.0.1", "0.0.0.0", "::ffff:10.0.0.1", "", "localhost.evil.example")
    assert [host for host in (*ours, *others) if is_loopback(host)] == list(ours)


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


POD = "0b7c4f9e-3a2d-4c5e-8f1a-6d7e8f9a0b1c"
CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
input()
"""
CGROUPS = {
    "in no pod": "0::/system.slice/sshd.service\n",
    "in a pod": f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/x.scope\n",
}


class Transport:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def get_extra_info(self, name: str) -> object:
        return self._connection if name == "socket" else None


@pytest.fixture
def listener(open_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(open_path / "api.sock"))
        (open_path / "api.sock").chmod(0o777)
        listening.listen()
        yield listening


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of others")
@pytest.mark.parametrize(
    ("uid", "expected"),
    [
        (0, Peer("uid 0", 0, privileged=True, on_socket=True)),
        (1234, Peer("uid 1234", 1234, on_socket=True)),
        # Whom the kernel cannot name: a process of another user namespace has this UID too.
        (65534, Peer("unknown user", on_socket=True)),
    ],
)
def test_the_kernel_says_whose_process_asks(listener, uid, expected):
    command = [sys.executable, "-c", CONNECT, listener.getsockname(), str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        connection, _ = listener.accept()
        with connection:
            assert identify(Transport(connection)) == expected
        child.communicate(b"\n", timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("theirs", "ours", "is_ours"),
    [
        ("in no pod", "in no pod", True),
        ("in a pod", "in no pod", False),
        ("in a pod", "in a pod", True),
        (None, "in no pod", False),
    ],
)
def test_root_of_another_pod_or_of_an_invisible_process_is_not_root_here(
    tmp_path, theirs, ours, is_ours
):
    for pid, where in ((4242, theirs), (os.getpid(), ours)):
        if where is not None:
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "cgroup").write_text(CGROUPS[where])
            (tmp_path / str(pid) / "comm").write_text("python\n")
    assert _is_of_this_machine(4242, tmp_path) is is_ours
    assert not _is_of_this_machine(0, tmp_path)
