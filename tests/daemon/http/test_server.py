"""Listening, TLS and basic auth."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import bcrypt
import httpx
import pytest

from tests.daemon.http.certificates import make_certificate
from tests.daemon.http.conftest import http_client
from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http import web_config
from warpwatch_daemon.http.server import Server
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


def test_a_taken_port_is_a_usage_error_that_names_the_key(agent):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=r"http\.listen '127.0.0.1:\d+': the port is taken"):
            Server(agent, HttpConfig(listen=f"127.0.0.1:{port}"))


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "no.such.name.invalid:0", "127.0.0.1:99999"])
def test_an_address_that_is_not_ours_is_a_usage_error(agent, listen):
    with pytest.raises(UsageError, match=r"http\.listen"):
        Server(agent, HttpConfig(listen=listen))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", ":0", "0.0.0.0:0"])
def test_it_listens_where_the_configuration_says(serve, listen):
    server = serve(listen=listen)
    with http_client(f"http://127.0.0.1:{server.address[1]}") as client:
        assert client.get("/healthz").status_code == 200
        assert client.get(server.url + "metrics").status_code == 200


def test_a_stop_before_the_run_ends_it_at_once(agent):
    server = Server(agent, HttpConfig(listen="127.0.0.1:0"))
    server.stop()
    server.run()


def test_it_speaks_tls_with_the_certificate_of_the_web_config(serve, certificates):
    server = serve(web_config=write(certificates, PLAIN_TLS))
    assert server.url.startswith("https://")
    with httpx.Client(verify=trusting(certificates)) as client:
        # A kept connection is scraped again and again.
        answers = [client.get(server.url + "metrics") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert {answer.content.partition(b" ")[0] for answer in answers} == {b"#"}
    plain = http_client(f"http://127.0.0.1:{server.address[1]}")
    with plain, pytest.raises(httpx.HTTPError):
        plain.get("/healthz")


def test_a_client_certificate_is_demanded_when_configured(serve, certificates):
    url = serve(web_config=write(certificates, CLIENT_TLS)).url + "healthz"
    with pytest.raises(httpx.HTTPError):
        httpx.get(url, verify=trusting(certificates))
    known = trusting(certificates)
    known.load_cert_chain(certificates / "client.crt", certificates / "client.key")
    assert httpx.get(url, verify=known).status_code == 200


def test_a_renewed_certificate_is_taken_up_and_half_of_one_is_not(certificates, tmp_path):
    crt, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    crt.write_bytes((certificates / "server.crt").read_bytes())
    key.write_bytes((certificates / "server.key").read_bytes())
    tls = web_config.Tls(web_config.TlsServerConfig(cert_file=crt, key_file=key))
    assert tls.refresh() is False
    crt.write_bytes((certificates / "renewed.crt").read_bytes())
    with pytest.raises(ssl.SSLError):
        tls.refresh()
    key.write_bytes((certificates / "renewed.key").read_bytes())
    assert tls.refresh() is True


def test_basic_auth_guards_every_route_but_the_one_of_probes(serve, tmp_path):
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
    path = write(tmp_path, f"basic_auth_users: {{ali: '{hashed}'}}\n")
    token = tmp_path / "token"
    token.write_text("correct horse")
    with http_client(serve(web_config=path, token_file=token).url) as client:
        assert client.get("healthz").status_code == 200
        for page in ("", "metrics", "readyz", "healthz/", "nothing"):
            answer = client.get(page)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == 'Basic realm="warpwatch"'
        for wrong in (("ali", "open"), ("baba", "open sesame"), ("", "")):
            assert client.get("", auth=wrong).status_code == 401
        for header in (b"Basic !", b"Basic \xe9"):
            assert client.get("", headers={b"Authorization": header}).status_code == 401
        for _ in range(2):
            assert client.get("", auth=("ali", "open sesame")).status_code == 200
        # A password that was right is remembered, and no other one with it.
        assert client.get("", auth=("ali", "open")).status_code == 401
        bearer = {"Authorization": "Bearer correct horse"}
        assert client.get("metrics", headers=bearer).status_code == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tls_server_config: {cert_file: a, key_file: b}", "No such file"),
        ("tls_server_config: {cert_file: a}", "tls_server_config.key_file: this key is needed"),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}", "min_version"),
        ("tls_server_config: {cert_file: a, key_file: b, cipher_suites: []}", "not supported"),
        ("http_server_config: {http2: true}", "http_server_config: not supported"),
        ("basic_auth_users: {ali: plain}", "'ali' is no bcrypt hash"),
        ("basic_auth_users: {ali: $2b$031$Xex9}", "'ali' has cost 31, at most 13"),
        ("[1", "not YAML"),
        ("a: !!bool maybe", "not YAML"),
        ("[" * 1000, "not YAML"),
        ("- 1", "expected a mapping"),
        ("tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}", "go together"),
        (CLIENT_TLS.replace("client_ca_file: client.crt, ", ""), "go together"),
    ],
)
def test_a_web_config_that_cannot_be_honoured_is_refused(tmp_path, agent, text, message):
    with pytest.raises(UsageError, match=rf"http\.web_config.*{message}"):
        Server(agent, HttpConfig(web_config=write(tmp_path, text)))


def test_an_empty_web_config_is_plain_http(tmp_path, serve):
    assert serve(web_config=write(tmp_path, "")).url.startswith("http://")
