"""Listening, TLS, basic auth, and certificates that have expired or will soon."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import bcrypt
import httpx
import pytest

from tests.daemon.http.certificates import make_certificate
from tests.daemon.http.conftest import http_client
from tests.manual_clock import ManualClock
from warpwatch_serving import certificate, web_config
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.server import Server
from warpwatch_telemetry.errors import UsageError

SECOND = timedelta(seconds=1)
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


def test_an_address_that_is_taken_or_not_ours_is_a_usage_error_that_names_the_key(agent):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=r"http\.listen '127.0.0.1:\d+': the port is taken"):
            Server(agent, HttpConfig(listen=f"127.0.0.1:{port}"))
    for listen in ("192.0.2.1:0", "no.such.name.invalid:0", "127.0.0.1:99999"):
        with pytest.raises(UsageError, match=r"http\.listen"):
            Server(agent, HttpConfig(listen=listen))


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


def test_a_password_that_was_right_is_remembered_and_no_other_one_with_it(serve, tmp_path):
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
    path = write(tmp_path, f"basic_auth_users: {{ali: '{hashed}'}}\n")
    with http_client(serve(web_config=path).url) as client:
        for password, status in (("open sesame", 200), ("open sesame", 200), ("open", 401)):
            assert client.get("", auth=("ali", password)).status_code == status
        for header in (b"Basic \xe9", b"Basic !", b"Basic YmFiYTpvcGVuIHNlc2FtZQ==", b"Basic Og=="):
            assert client.get("", headers={b"Authorization": header}).status_code == 401


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS13}", "No such file"),
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


@pytest.mark.parametrize("days", [1, 12_000])
def test_the_end_is_what_openssl_says(tmp_path: Path, days: int) -> None:
    path = make_certificate(tmp_path, days=days)
    line = ["openssl", "x509", "-in", str(path), "-noout", "-enddate"]
    said = subprocess.run(line, check=True, capture_output=True, text=True, timeout=300).stdout
    end = ssl.cert_time_to_seconds(said.strip().removeprefix("notAfter="))
    assert certificate.expiry(path.read_text()).timestamp() == end


def test_only_what_is_or_will_soon_be_over_is_reported(tmp_path: Path) -> None:
    path = make_certificate(tmp_path)
    end = certificate.expiry(path.read_text())
    when = f"{end:%Y-%m-%d %H:%M} UTC"
    expires = f"the certificate {path} expires on {when}; renew it"
    expired = f"the certificate {path} expired on {when}: clients refuse it; renew it"
    moments = [end - timedelta(days=7) - SECOND, end - timedelta(days=7), end - SECOND, end]
    assert [certificate.trouble(path, moment) for moment in moments] == [
        *(None, expires, expires, expired)
    ]


@pytest.mark.parametrize("text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAA=\n"])
def test_of_what_is_no_certificate_nothing_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "server.crt"
    path.write_text(text)
    assert certificate.trouble(path, datetime.now(UTC)) is None


def test_the_end_is_logged_once_a_day_and_at_once_for_a_renewed_certificate(
    agent, tmp_path, caplog
):
    path = make_certificate(tmp_path)
    web_config = "tls_server_config: {cert_file: tls.crt, key_file: tls.key}"
    clock = ManualClock(wall=certificate.expiry(path.read_text()).timestamp() - 3 * 86_400)
    config = HttpConfig(listen="127.0.0.1:0", web_config=write(tmp_path, web_config))
    server = Server(agent, config, wall=clock.wall)

    def logged(passed_s: float) -> int:
        clock.advance(passed_s)
        caplog.clear()
        asyncio.run(server._refresh_certificate())
        return len([one for one in caplog.messages if "expires on" in one])

    assert [logged(passed_s) for passed_s in (0, 10, 86_380, 20, 3600)] == [1, 0, 0, 1, 0]
    os.utime(path, ns=(1, 1))
    assert logged(10) == 1
    path.write_text("half of a certificate")
    assert logged(10) == 0
    assert "the certificate stays as it was" in caplog.text
    # A stop before the run ends it at once.
    server.stop()
    server.run()
