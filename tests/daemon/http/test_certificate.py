"""A certificate that has expired, or will soon, is named before a user has to ask."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.daemon.http.certificates import make_certificate
from tests.daemon.http.conftest import MemoryAgent
from tests.manual_clock import ManualClock
from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http import certificate
from warpwatch_daemon.http.server import Server

WEB_CONFIG = "tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n"
SECOND = timedelta(seconds=1)


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
    agent: MemoryAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_certificate(tmp_path)
    (tmp_path / "web.yml").write_text(WEB_CONFIG)
    clock = ManualClock(wall=certificate.expiry(path.read_text()).timestamp() - 3 * 86_400)
    config = HttpConfig(listen="127.0.0.1:0", web_config=tmp_path / "web.yml")
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
    server.stop()
    server.run()
