"""Listening, TLS, basic auth, and renewed certificates."""

import asyncio
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import bcrypt
import httpx
import pytest

from tests.cases import cases
from tests.daemon.http.certificates import make_certificate
from tests.daemon.http.conftest import SESSIONS, http_client, local_client
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S, eventually
from warpwatch_serving import web_config
from warpwatch_serving.config import HttpConfig
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
    listeners = Listeners(lambda: None)
    listeners.stop()
    asyncio.run(asyncio.wait_for(listeners.serve(), DEADLINE_S))


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
            assert local.post(SESSIONS).json()["url"] is None
    clock.advance(5)
    with local_client(server) as local:
        eventually(lambda: local.get("/healthz").json()["port"] == port, "the port is served")
        clock.advance(2)
        assert up(local) == 1
    with http_client(server.url) as client:
        assert client.get("/healthz").status_code == 200


def test_a_socket_of_systemd_is_served_and_not_handed_on(serve):
    """sd_listen_fds(3): descriptors from 3 on, for the process whose pid is named."""
    program = """
import os, socket, sys
from warpwatch_serving.server import passed_by_systemd
os.dup2(int(sys.argv[1]), 3)
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x"}
passed = passed_by_systemd(environ)
print(passed.getsockname()[1], os.get_inheritable(3), environ, passed_by_systemd(
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
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert {answer.content.partition(b" ")[0] for answer in answers} == {b"#"}
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


def test_a_password_that_was_right_is_remembered_and_no_other_one_with_it(serve, tmp_path):
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
    path = write(tmp_path, f"basic_auth_users: {{ali: '{hashed}'}}\n")
    with http_client(serve(web_config=path).url) as client:
        for password, status in (("open sesame", 200), ("open sesame", 200), ("open", 401)):
            assert client.get("", auth=("ali", password)).status_code == status
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
