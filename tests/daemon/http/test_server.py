"""Listening, TLS, basic auth, and renewed certificates."""

import asyncio
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bcrypt
import httpx
import pytest

from tests.cases import cases
from tests.daemon.http.certificates import make_certificate
from tests.daemon.http.conftest import SESSIONS, http_client, link_to, local_client, socket_of
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S, eventually
from warpwatch_serving import server, web_config
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import Peer
from warpwatch_serving.server import FOLDER_MODE, Listeners, Server, listen_locally
from warpwatch_telemetry.errors import UsageError

PLAIN_TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"
CLIENT_TLS = (
    "tls_server_config: {cert_file: server.crt, key_file: server.key, "
    "client_ca_file: client.crt, client_auth_type: RequireAndVerifyClientCert}\n"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client", "renewed"):
        make_certificate(folder, name)
    return folder


def write(folder: Path, text: str) -> Path:
    path = folder / "web.yml"
    path.write_text(text)
    return path


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "server.crt")


def test_an_address_that_never_exists_is_a_usage_error_that_names_the_key(agent):
    with pytest.raises(UsageError, match=r"http\.listen"):
        Server(agent, HttpConfig(listen="no.such.name.invalid:0"))


def test_a_socket_that_is_served_is_not_taken_and_one_that_was_left_is(tmp_path):
    path = tmp_path / "api" / "socket"
    with listen_locally(path), pytest.raises(OSError, match="another process serves it"):
        listen_locally(path)
    with listen_locally(path):
        modes = [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)]
        assert modes == [FOLDER_MODE, 0o666]


def test_a_server_that_is_stopped_before_it_serves_ends():
    listeners, listener = Listeners(lambda: None), socket.create_server(("127.0.0.1", 0))
    unused: Any = None
    listeners.add(listener, unused)
    listeners.stop()
    asyncio.run(asyncio.wait_for(listeners.serve(), DEADLINE_S))
    assert listener.fileno() == -1


def test_a_client_that_is_gone_and_a_lack_of_descriptors_keep_no_other_out(monkeypatch):
    monkeypatch.setattr(server, "ACCEPT_PAUSE_S", 0.0)
    told: list[str] = []
    listeners, listener = Listeners(lambda: None), socket.create_server(("127.0.0.1", 0))

    def start(accepted: socket.socket, peer: Peer) -> None:
        told.append(peer.name)
        if len(told) == 2:
            raise OSError("the client is gone")
        accepted.close()
        listeners.stop()

    async def close(timeout_s: float) -> None:
        told.append(f"closed within {timeout_s:g} s")

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept

        async def fails_once(listening: socket.socket) -> Any:
            if not told:
                told.append("no descriptors")
                raise OSError("no descriptors")
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", fails_once)
        await asyncio.wait_for(listeners.serve(), DEADLINE_S)

    connections: Any = SimpleNamespace(serve=start, close=close)
    listeners.add(listener, connections)
    with ExitStack() as stack:
        for _ in range(2):
            gone = stack.enter_context(socket.create_connection(listener.getsockname()))
        asyncio.run(serve())
        assert (told[1:], gone.recv(1)) == (["loopback", "loopback", "closed within 2 s"], b"")
    assert listener.fileno() == -1


def test_what_each_listener_answers_until_the_server_ends(serve, agent, golden_case):
    runs, text, prepared = threading.Event(), "", []

    async def prepare(path: str) -> None:
        prepared.append(path)

    agent.prepare = prepare
    agent.run_summaries = lambda: (runs.wait(), [])[1]
    # No other test listens on this address.
    with socket.create_server(("127.83.1.1", 0)) as free:
        probe = f"127.83.1.1:{free.getsockname()[1]}"
    server = serve(probe_listen=probe)
    probing = http_client(f"http://{probe}")
    with ThreadPoolExecutor() as pool, local_client(server) as local, probing as probes:
        for lacks in ((), ("nvml: lost",)):
            agent.lacks = lacks
            for client in (local, probes):
                for path in ("/healthz", "/readyz", "/healthz/", "/metrics", "/nothing"):
                    found = client.get(path)
                    said = "" if path == "/metrics" else found.text.replace(probe, "")
                    text += f"{path}: {found.status_code} {re.sub('[0-9]{5}', 'PORT', said)}\n"
        found = local.delete("/healthz")
        allowed = sorted(found.headers["allow"].split(", "))
        sent = {
            name: found.headers[name] for name in found.headers if name not in ("date", "allow")
        }
        text += f"DELETE: {found.status_code} {allowed} {sent} {found.text}"
        last = pool.submit(local.get, "/api/v1/runs")
        eventually(
            lambda: (
                server._connections.tasks
                and any(slot.answering for slot in list(server._connections.tasks))
            ),
            "the request has come",
        )
        server.stop()
        runs.set()
        text += f"the last one: {last.result().text}{prepared} {dict(agent.codes)}\n"
    golden_case(text)
    eventually(lambda: not socket_of(server).exists(), "the socket is removed")
    assert server._socket.fileno() == -1


def up(client: httpx.Client) -> float:
    series = client.get("/metrics").text.partition("\nwarpwatch_http_up ")[2]
    return float(series.partition("\n")[0])


def test_a_taken_port_is_tried_again_while_the_socket_serves(serve, caplog):
    clock = ManualClock()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = serve({"monotonic": clock.monotonic}, listen=f"127.0.0.1:{port}")
        assert f"http.listen '127.0.0.1:{port}': the port is taken" in caplog.text
        with pytest.raises(UsageError, match="taken"):
            str(server.url)
        with local_client(server) as local:
            assert (up(local), local.get("/healthz").json()["port"]) == (0, None)
            link = local.post(SESSIONS)
            assert (link.status_code, link.json()["url"], link.json()["seconds"]) == (201, None, 60)
    clock.advance(5)
    with local_client(server) as local:
        eventually(lambda: local.get("/healthz").json()["port"] == port, "the port is served")
        clock.advance(2)
        assert (up(local), local.post(SESSIONS).json()["url"]) == (1, server.url)
    with http_client(server.url) as client:
        assert client.get("/healthz").status_code == 200


def test_a_socket_of_systemd_is_served_and_not_handed_on(serve):
    """sd_listen_fds(3): descriptors from 3 on, for the process whose pid is named."""
    program = """
import os, socket, sys
from warpwatch_serving.server import passed_by_systemd
os.dup2(int(sys.argv[1]), 4)
os.dup2(socket.socket(socket.AF_UNIX).detach(), 3)
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "x"}
passed = passed_by_systemd(environ)
print(passed.getsockname()[1], os.get_inheritable(4), environ, passed_by_systemd(
    {"LISTEN_PID": "1", "LISTEN_FDS": "1"}))
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", program, str(listener.fileno())]
        done = subprocess.run(
            command, pass_fds=[listener.fileno()], capture_output=True, text=True, timeout=300
        )
        assert done.stdout == f"{listener.getsockname()[1]} False {{}} None\n", done.stderr
        # The address of the socket unit is served, not that of the configuration.
        listener.setblocking(False)
        with http_client(serve(passed=listener.dup(), listen="127.0.0.1:1").url) as client:
            assert client.get("/healthz").json()["port"] == listener.getsockname()[1]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", ":0", "0.0.0.0:0"])
def test_it_listens_where_the_configuration_says(serve, listen, tmp_path):
    # An empty web_config is plain HTTP.
    server = serve(listen=listen, web_config=write(tmp_path, ""))
    with http_client(f"http://127.0.0.1:{server.address[1]}") as client:
        assert client.get("/healthz").status_code == 200
        assert client.get(server.url + "metrics").status_code == 200


def test_it_speaks_tls_with_the_certificate_of_the_web_config(serve, certificates):
    server = serve(web_config=write(certificates, PLAIN_TLS))
    assert server.url.startswith("https://")
    with httpx.Client(verify=trusting(certificates), timeout=DEADLINE_S) as client:
        # A kept connection is scraped again and again.
        answers = [client.get(server.url + "metrics") for _ in range(3)]
        page = client.get(server.url, headers={"Accept": "text/html"})
        assert f"--base {server.url[:-1]}" in page.text
        cookie = client.get(server.url[:-1] + link_to(server)).headers["set-cookie"]
        assert cookie.endswith("; Secure")
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert {answer.content.partition(b" ")[0] for answer in answers} == {b"#"}
    renewed = threading.Event()
    server._tls.renew = renewed.set
    eventually(renewed.is_set, "the certificate is looked at each second")
    plain = http_client(f"http://127.0.0.1:{server.address[1]}")
    with plain, pytest.raises(httpx.HTTPError):
        plain.get("/healthz")
    with local_client(server) as local:
        assert local.get("/healthz").status_code == 200


def test_a_client_certificate_is_demanded_when_configured(serve, certificates):
    url = serve(web_config=write(certificates, CLIENT_TLS)).url + "healthz"
    with pytest.raises(httpx.HTTPError):
        httpx.get(url, verify=trusting(certificates))
    known = trusting(certificates)
    known.load_cert_chain(certificates / "client.crt", certificates / "client.key")
    assert httpx.get(url, verify=known, timeout=DEADLINE_S).status_code == 200


def test_a_renewed_certificate_is_taken_up_and_half_of_one_is_not(certificates, tmp_path, caplog):
    caplog.set_level("INFO")
    crt, key, ca = (tmp_path / f"tls.{end}" for end in ("crt", "key", "ca"))
    for path, name in ((crt, "server.crt"), (key, "server.key"), (ca, "client.crt")):
        path.write_bytes((certificates / name).read_bytes())
    files: dict[str, Any] = {"cert_file": crt, "key_file": key, "client_ca_file": ca}
    config = web_config.TlsServerConfig(**files, client_auth_type="VerifyClientCertIfGiven")
    tls = web_config.Tls(config)
    for version in ("TLS12", "TLS13"):
        versions = {"min_version": version, "max_version": version}
        context = web_config.Tls(config.model_copy(update=versions)).context
        assert {context.minimum_version, context.maximum_version} == {
            getattr(ssl.TLSVersion, f"TLSv1_{version[-1]}")
        }

    def logged() -> list[str]:
        caplog.clear()
        for _ in range(2):
            tls.renew()
        return [one[:13] for one in caplog.messages]

    assert logged() == []
    crt.write_bytes((certificates / "renewed.crt").read_bytes())
    assert logged() == ["reload failed"]
    key.write_bytes((certificates / "renewed.key").read_bytes())
    assert logged() == ["reloaded the "]
    ca.write_bytes((certificates / "renewed.crt").read_bytes())
    assert logged() == ["reloaded the "]
    assert tls.context.cert_store_stats()["x509"] == 1
    key.unlink()
    assert logged() == ["reload failed"]


def test_a_password_that_was_right_is_remembered_and_no_other_one_with_it(
    serve, tmp_path, monkeypatch
):
    hashed, other, of_unknown = (
        bcrypt.hashpw(password, bcrypt.gensalt(4)).decode()
        for password in (b"open sesame", b"open", b"open sesame")
    )
    monkeypatch.setattr(web_config, "_UNKNOWN_USER", of_unknown)
    path = write(tmp_path, f"basic_auth_users: {{ali: '{hashed}', baba: '{other}'}}\n")
    with http_client(serve(web_config=path).url) as client:
        for password, *status in (
            ("open sesame", 200, 401, 401), ("open sesame", 200, 401, 401), ("open", 401, 200, 401),
            ("o" * 100, 401, 401, 401),
        ):  # fmt: skip
            answers = [client.get("", auth=(user, password)) for user in ("ali", "baba", "no")]
            assert [answer.status_code for answer in answers] == status
        for header in (b"Basic \xe9", b"Basic !", b"Basic YmFiYTpvcGVuIHNlc2FtZQ==", b"Basic Og=="):
            assert client.get("", headers={b"Authorization": header}).status_code == 401


WEB_CONFIGS = (
    *cases(__file__)["refused"],
    *("[" * 1000, "- 1", "tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}"),
    CLIENT_TLS.replace("client_ca_file: client.crt, ", ""),
)


def test_a_web_config_that_cannot_be_honoured_is_refused(tmp_path, agent, golden_case):
    lines = []
    for text in WEB_CONFIGS:
        with pytest.raises(UsageError) as refused:
            Server(agent, HttpConfig(web_config=write(tmp_path, text)))
        # The rest is the YAML parser's own, and may change with it.
        said = str(refused.value).replace(str(tmp_path), "").partition(" YAML: ")[0]
        lines.append(f"{text.strip()[:99]}\n    {said}\n")
    golden_case("".join(lines))
