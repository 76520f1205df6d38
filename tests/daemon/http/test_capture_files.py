"""The files of captures reach a browser as data, and nothing else does."""

from __future__ import annotations

import os

import pytest

from tests.daemon.http.conftest import CAPTURE, TRACE

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


def test_only_perfetto_may_read_a_trace_and_nothing_but_traces(client):
    allowed = "access-control-allow-origin"
    perfetto = {"Origin": "https://ui.perfetto.dev"}
    answer = client.get(f"{BASE}/{TRACE}", headers=perfetto)
    assert answer.headers[allowed] == "https://ui.perfetto.dev"
    assert answer.headers["vary"] == "Origin"
    other = {"Origin": "https://evil.example"}
    assert allowed not in client.get(f"{BASE}/{TRACE}", headers=other).headers
    for path in (f"{BASE}/report.html", f"{BASE}/diagnosis.json", BASE, "/api/v1/ranks"):
        assert allowed not in client.get(path, headers=perfetto).headers


def test_a_report_runs_in_a_sandbox_without_scripts(client):
    answer = client.get(f"{BASE}/report.html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none'")
    assert "script" not in policy
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "content-disposition" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        *(f"{BASE}/{name}" for name in ("missing.json", "link.txt", "fifo", "report.html%00")),
        *(f"{BASE}/{up}secret" for up in ("../../", "..%2f..%2f", "%2e%2e/", "..%5c")),
        *(f"{BASE}/{name}" for name in ("%2fetc%2fpasswd", "%2e", "%2e%2e")),
        *("/api/v1/captures/other/report.html", f"/api/v1/captures/..%2f{TRACE}"),
    ],
)
def test_nothing_else_is_reachable(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.text
