"""A certificate that has expired, or will soon, is named before a user has to ask."""

from __future__ import annotations

import logging
import ssl
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests.daemon.http.conftest import Serve
from warpwatch_daemon.http import certificate

NOW = datetime.now(UTC)


def make_certificate(folder: Path, days: int) -> Path:
    """Self-signed for 127.0.0.1, good for so many days from now; a negative number: expired."""
    key, request, signed = (folder / f"server.{end}" for end in ("key", "csr", "crt"))
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1")
    new = "req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test"
    sign = f"x509 -req -in {request} -signkey {key} -days {days} -extfile {extensions}"
    for arguments in (f"{new} -keyout {key} -out {request}", f"{sign} -out {signed}"):
        command = ["openssl", *arguments.split()]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return signed


@pytest.mark.parametrize(
    ("days", "says"), [(-1, "clients refuse it; renew it"), (3, "UTC; renew it"), (30, None)]
)
def test_only_what_is_or_will_soon_be_over_is_reported(
    tmp_path: Path, days: int, says: str | None
) -> None:
    path = make_certificate(tmp_path, days)
    trouble = certificate.trouble(path, datetime.now(UTC))
    assert (trouble is None) == (says is None)
    assert says is None or (str(path) in str(trouble) and str(trouble).endswith(says))


@pytest.mark.parametrize("days", [1, 400, 12_000])
def test_the_end_is_what_openssl_says(tmp_path: Path, days: int) -> None:
    path = make_certificate(tmp_path, days)
    line = ["openssl", "x509", "-in", str(path), "-noout", "-enddate"]
    said = subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout
    end = ssl.cert_time_to_seconds(said.strip().removeprefix("notAfter="))
    assert certificate.expiry(path.read_text()).timestamp() == end
    assert abs(certificate.expiry(path.read_text()) - NOW - timedelta(days=days)) < timedelta(1)


@pytest.mark.parametrize("text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAA=\n"])
def test_of_what_is_no_certificate_nothing_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "server.crt"
    path.write_text(text)
    assert certificate.trouble(path, NOW) is None


def test_an_expired_certificate_is_served_refused_by_clients_and_named(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_certificate(tmp_path, -1)
    web = tmp_path / "web.yml"
    web.write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    with caplog.at_level(logging.WARNING):
        url = serve(web_config=web).url + "healthz"
        with pytest.raises(httpx.ConnectError, match="expired"):
            httpx.get(url, verify=ssl.create_default_context(cafile=path))
        deadline = time.monotonic() + 30
        while "expired on" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.1)
    assert f"http.web_config: the certificate {path} expired on" in caplog.text
