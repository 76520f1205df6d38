"""The rights of requests: by socket, session, token or password; and users at the socket."""

import asyncio
import base64
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import bcrypt
import httpx
import pytest

from tests.cases import cases
from tests.daemon.http.alert_node import WEBHOOK, notification
from tests.daemon.http.conftest import (
    CAPTURE,
    TIMEOUT_S,
    http_client,
    link_to,
)
from tests.loop.other_users import OWNER, STRANGER
from tests.manual_clock import ManualClock
from warpwatch_daemon import api_client
from warpwatch_daemon.cli import main, page
from warpwatch_serving.access import SESSION_S, Access, Caller
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import Peer, _is_of_this_machine, identify
from warpwatch_serving.page.endpoint import cookie
from warpwatch_serving.server import Server
from warpwatch_telemetry.errors import WarpwatchError

ASK = {"job": "llama-7b"}
CAPTURES = "/api/v1/captures"
SESSIONS = "/api/v1/sessions"
COOKIE = r"warpwatch-[0-9a-f]{8}=[\w-]{43}; Path=/; Max-Age=43200; HttpOnly; SameSite=Lax"
REPORT = f"{CAPTURES}/{CAPTURE.id}/report.html"
REQUESTS = (
    *(("GET", path, None) for path in ("/healthz", "/metrics", "/api/v1/jobs", REPORT, "/nothing")),
    *(("GET", "/api/v1/records", None), ("POST", CAPTURES, ASK)),
    *(("POST", f"{CAPTURES}/{CAPTURE.id}/cancel", None), ("POST", WEBHOOK, notification())),
)
# What concerns the jobs of all users.
FOR_ALL_JOBS = (
    ("GET", "/api/v1/records"), ("POST", "/api/v1/leases"), ("POST", f"{CAPTURES}/prepare"),
    ("POST", f"{CAPTURES}/1/cancel"), ("POST", "/api/v1/anomalies/1/resolve"),
)  # fmt: skip


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("correct horse\n")
    return path


@pytest.fixture
def secured(serve, token_file):
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
    "proxy": {"Host": "x/healthz?", "X-Forwarded-For": "127.0.0.1", "X-Real-IP": "::1"},
    "token": bearer("correct horse"),
    "token through a proxy": bearer("correct horse") | {"Host": "gpu.example", "Via": "1.1 x"},
    "wrong token": bearer("correct horse battery"),
    "password": basic("ali:open sesame"),
    "wrong password": basic("ali:open"),
}


def reason(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["reason"])


@contextmanager
def session(server: Server, uid: int | None = None) -> Iterator[httpx.Client]:
    with http_client(server.url) as client:
        assert client.get(link_to(server, uid)).status_code == 303
        yield client


def without_port(page: str) -> bytes:
    return re.sub(r"(?<=127.0.0.1):\d+", "", page).encode()


def test_a_link_is_valid_once(serve, golden):
    server = serve()
    link = link_to(server)
    with http_client(server.url) as first, http_client(server.url) as second:
        answer = first.get(link)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert re.fullmatch(COOKIE, cookie)
        assert first.get("/api/v1/jobs").status_code == 200
        again = second.get(link)
        assert again.status_code == 401
        golden("http/login_without_token.html", without_port(again.text))
        assert second.get("/api/v1/jobs").status_code == 401


def test_a_link_lasts_a_minute_and_a_session_twelve_hours() -> None:
    clock, user = ManualClock(), Caller(1000)
    ports = (Access(HttpConfig(listen=f":{port}"), clock.monotonic) for port in (9400, 9401))
    access, other = ports

    async def test() -> None:
        late, used = await access.links.issue(user), await access.links.issue(user)
        clock.advance(59)
        assert [await access.links.end(used) for _ in range(2)] == [user, None]
        clock.advance(2)
        assert await access.links.end(late) is None
        key = await access.sessions.issue(user)
        clock.advance(12 * 3600 - 1)
        assert await access.sessions.find(key) == user
        clock.advance(2)
        assert await access.sessions.find(key) is None

    asyncio.run(test())
    # Each server of a host has a cookie of its own.
    assert access.cookie != other.cookie
    assert cookie("x", "key", SESSION_S, tls=True).endswith("; Secure")


def test_after_a_session_its_cookie_opens_nothing(serve):
    server = serve()
    with session(server) as client:
        kept = dict(client.cookies)
        own = {"Origin": server.url.rstrip("/")}
        assert client.post("/logout", headers=own).headers["location"] == "/login"
        assert not client.cookies
        client.cookies.update(kept)
        answer = client.get("/", headers={"Accept": "text/html"})
        assert answer.status_code == 401
        assert "warpwatch page --base http://127.0.0.1:" in answer.text


def test_a_session_changes_something_only_from_its_own_page(serve, agent):
    server = serve()
    own = server.url.rstrip("/")
    with session(server) as client:
        for origin in ("https://evil.example", "http://127.0.0.1:1", "null", ""):
            answer = client.post(CAPTURES, json=ASK, headers={"Origin": origin})
            assert (answer.status_code, reason(answer)) == (403, "foreign_origin")
        assert client.post(CAPTURES, json=ASK).status_code == 403
        assert agent.asked == []
        assert client.post(CAPTURES, json=ASK, headers={"Origin": own}).status_code == 202
        # Through `ssh -L` or `kubectl port-forward` both have another port.
        forwarded = {"Host": "localhost:8080", "Origin": "http://localhost:8080"}
        assert client.post(CAPTURES, json=ASK, headers=forwarded).status_code == 202
        # It makes no other session, which would last longer.
        answer = client.post(SESSIONS, headers={"Origin": own})
        assert (answer.status_code, reason(answer)) == (403, "not_on_socket")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of others")
def test_a_session_has_the_rights_of_the_user_who_made_its_link(serve, agent):
    server = serve()
    agent.now = replace(
        agent.now, jobs=tuple(replace(one, owner=f"uid/{OWNER}") for one in agent.now.jobs)
    )
    own, seen = {"Origin": server.url.rstrip("/")}, {}
    for uid in (OWNER, STRANGER, 0):
        with session(server, uid) as client:
            jobs = client.get("/api/v1/jobs").json()["jobs"]
            seen[uid] = (len(jobs), "llama-7b" in client.get("/").text)
            answers = [client.request(*one, json={}, headers=own) for one in FOR_ALL_JOBS]
            assert {answer.status_code == 403 for answer in answers} == {uid != 0}
    assert seen == {OWNER: (1, True), STRANGER: (0, False), 0: (1, True)}


def test_the_token_starts_a_session_too(secured, golden):
    client = secured()
    own = {"Origin": str(client.base_url).rstrip("/")}
    page = client.get("/", headers={"Accept": "text/html"})
    assert (page.status_code, 'name="token"' in page.text) == (401, True)
    assert page.headers["www-authenticate"].startswith("Bearer ")
    for form, headers in (({"token": "x"}, own), ({"token": "correct horse"}, {}), ({}, own)):
        answer = client.post("/login", data=form, headers=headers)
        assert (answer.status_code, "not the token" in answer.text) == (401, True)
        golden("http/login.html", without_port(answer.text))
    assert client.post("/login", data={"token": "x" * 2**20}, headers=own).status_code == 413
    assert client.post("/login", data={"token": "correct horse"}, headers=own).status_code == 303
    assert client.post(CAPTURES, json=ASK, headers=own).status_code == 202


def test_without_a_session_programs_get_an_error_that_names_both_ways(tcp):
    answer = tcp.get("/api/v1/jobs")
    assert (answer.status_code, reason(answer)) == (401, "token_needed")
    detail = answer.json()["error"]["detail"]
    assert "`warpwatch page`" in detail and "Authorization: Bearer" in detail
    assert "not that in the file" in tcp.get("/api/v1/jobs", headers=bearer("correct")).text
    # A browser gets the login instead, at any address.
    report = tcp.get(REPORT, headers={"Accept": "text/html,*/*"})
    assert (report.status_code, "Sign in" in report.text) == (401, True)
    hostile = tcp.get("/", headers={"Accept": "text/html", "Host": "<script>"})
    assert "<script>" not in hostile.text


def test_page_opens_the_link_where_there_is_a_display(client, monkeypatch, capsys):
    environ = {"WARPWATCH_DIR": os.environ["WARPWATCH_DIR"], "DISPLAY": ":0"}
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert page.main([], environ) == 0
    assert opened == [capsys.readouterr().out.strip()]


def test_the_link_of_a_fleet_is_never_at_the_address_of_a_daemon(
    shared_server, client, tmp_path, monkeypatch, capsys
):
    (tmp_path / "run-fleet-api").symlink_to(f"{os.environ['WARPWATCH_DIR']}-api")
    environ = {"WARPWATCH_DIR": str(tmp_path / "run")}
    assert page.main(["--fleet", "--url", "http://gpu-1:9400"], environ) == 0
    assert capsys.readouterr().out.startswith(f"{shared_server.url}login?key=")
    monkeypatch.setitem(shared_server.app.state._state, "url", "")
    with pytest.raises(WarpwatchError, match=r"fleet\.listen is not served"):
        page.main(["--fleet"], environ)


def test_who_may_do_what_is_the_golden_table(serve, token_file, tmp_path, report, agent, golden):
    """Each configuration of the server, what comes with a request, and the request."""
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
    web_config = tmp_path / "web.yml"
    web_config.write_text(f"basic_auth_users: {{ali: '{hashed}'}}\n")
    configurations = {
        "plain": {},
        "token": {"token_file": token_file},
        "token for metrics": {"token_file": token_file, "metrics_token": True},
        "password": {"web_config": web_config},
        "password, token": {"web_config": web_config, "token_file": token_file},
    }
    lines = []
    for configured, section in configurations.items():
        server = serve(**section)
        with http_client(server.url) as client, session(server) as known:
            cookie = {"Cookie": "; ".join(f"{one}={known.cookies[one]}" for one in known.cookies)}
            own = {"Origin": server.url.rstrip("/")}
            sessions = {"session": cookie, "session, own page": cookie | own}
            for given, headers in (GIVEN | sessions).items():
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


def test_only_the_token_in_the_file_is_the_token(secured, token_file):
    client = secured()

    def status(token: str, scheme: str = "Bearer ") -> int:
        headers = {"Authorization": scheme + token}
        return int(client.get(CAPTURES, headers=headers).status_code)

    assert status("correct horse", "bearer ") == 200
    assert status("correct") == status("correct horse", "Basic ") == 401
    # A changed file is read again.
    token_file.write_text("another one")
    os.utime(token_file, (1, 1))
    assert (status("correct horse"), status("another one")) == (401, 200)
    token_file.unlink()
    assert status("another one") == 401


CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
input()
"""
CASES = cases(__file__)


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
        # The kernel cannot name the user: processes of other user namespaces have this UID too.
        (65534, Peer("unknown user", on_socket=True)),
    ],
)
def test_the_kernel_says_whose_process_asks(listener, uid, expected):
    command = [sys.executable, "-c", CONNECT, listener.getsockname(), str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        connection, _ = listener.accept()
        with connection:
            assert identify(connection) == expected
        child.communicate(b"\n", timeout=TIMEOUT_S)


@pytest.mark.parametrize(("theirs", "ours", "is_ours"), CASES["machines"])
def test_root_of_another_pod_or_of_an_invisible_process_is_not_root_here(
    tmp_path, theirs, ours, is_ours
):
    for pid, where in ((4242, theirs), (os.getpid(), ours)):
        if where is not None:
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "cgroup").write_text(CASES["cgroups"][where])
            (tmp_path / str(pid) / "comm").write_text("python\n")
    assert _is_of_this_machine(4242, tmp_path) is is_ours
    assert not _is_of_this_machine(0, tmp_path)
