"""Webhooks: each anomaly once, to a real server; what is not taken is tried again for a while."""

from __future__ import annotations

import json
import logging
import ssl
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.exporters.receiver import Receiver, receiver
from warpwatch_daemon.agent.outgoing import WaysOut
from warpwatch_daemon.config import loading
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.state.agent_metrics import AgentMetrics
from warpwatch_exporters.config import WebhookConfig
from warpwatch_exporters.events import Events
from warpwatch_exporters.webhooks import MAX_TRIES, MAX_WAITING, Webhook
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.state import State

NOW = 1_790_000_000.0
SLOW = Anomaly(
    id="6553f1f0-1",
    kind="straggler",
    time=NOW,
    severity="warning",
    summary="rank 1 computes 60 % longer than <its> peer",
    job="llama-7b",
    rank=1,
)
INFO = replace(SLOW, id="6553f1f0-2", severity="info", kind="crash", summary="ended from outside")
CAPTURE = Capture(
    id="20260921T141959-3f9a1c",
    request=CaptureRequest("llama-7b", "torch", "anomaly", anomaly_id=SLOW.id),
    time=NOW + 1,
    end_time=NOW + 8,
    outcome="complete",
    files=("report.html",),
    diagnosis={"verdict": "host_bound", "summary": "rank 1 waits for Python"},
)


def state(*found: Anomaly | Capture) -> State:
    return State(
        NOW,
        "0.1.0",
        "gpu-17",
        anomalies=tuple(one for one in found if isinstance(one, Anomaly)),
        captures=tuple(one for one in found if isinstance(one, Capture)),
    )


class Site:
    """A webhook that has seen an empty state; the clock is the test's."""

    def __init__(self, server: Receiver, **config: Any) -> None:
        self.server = server
        self.counted: Counter[str] = Counter()
        self.at = 0.0
        self.webhook = Webhook(
            WebhookConfig(**({"url": server.url} | config)),
            "exporters.webhooks[0]",
            "gpu-17",
            "https://warpwatch.example/gpu-17/",
            lambda result: self.counted.update([result]),
            lambda: self.at,
        )
        self.events = Events(state())

    def see(self, *found: Anomaly | Capture) -> None:
        self.webhook.advance(self.events.take(state(*found)))

    def wait(self) -> None:
        self.at += 1000.0
        self.webhook.advance(())

    def told(self) -> list[Any]:
        return [json.loads(body) for body in self.server.bodies()]


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as server:
        yield server


def test_an_anomaly_its_verdict_and_its_end_are_a_message_each(server: Receiver) -> None:
    site = Site(server)
    site.see(SLOW, INFO)
    site.see(SLOW, INFO)
    site.see(SLOW, INFO, CAPTURE)
    site.see(replace(SLOW, end_time=NOW + 90), INFO, CAPTURE)
    opened, verdict, closed = site.told()
    assert opened["event"] == "anomaly_opened"
    assert opened["summary"] == "rank 1 computes 60 % longer than <its> peer"
    assert opened["url"] == "https://warpwatch.example/gpu-17/?show=6553f1f0-1#findings"
    assert (opened["node"], opened["time"]) == ("gpu-17", NOW)
    assert (opened["kind"], opened["scope"], opened["rank"]) == ("straggler", "job", 1)
    assert verdict["event"] == "verdict"
    assert verdict["summary"] == "capture of llama-7b: host bound. rank 1 waits for Python"
    assert (verdict["anomaly"], verdict["verdict"]) == (SLOW.id, "host_bound")
    assert verdict["url"].endswith("/api/v1/captures/20260921T141959-3f9a1c/report.html")
    assert (closed["event"], closed["time"]) == ("anomaly_closed", NOW + 90)
    assert site.counted == {"sent": 3}


def test_what_was_there_before_the_start_is_not_told_again(server: Receiver) -> None:
    site = Site(server)
    site.events = Events(state(SLOW))
    site.see(SLOW)
    site.see(replace(SLOW, end_time=NOW + 90))
    site.see(replace(SLOW, reopened=1))
    assert [one["event"] for one in site.told()] == ["anomaly_closed", "anomaly_opened"]


def test_slack_gets_its_own_form(server: Receiver) -> None:
    site = Site(server, format="slack", min_severity="info")
    site.see(SLOW, CAPTURE)
    site.see(replace(SLOW, end_time=NOW + 90), CAPTURE)
    link = "<https://warpwatch.example/gpu-17"
    assert [one["text"] for one in site.told()] == [
        ":warning: *straggler* on gpu-17: rank 1 computes 60 % longer than &lt;its&gt; peer "
        f"{link}/?show=6553f1f0-1#findings|more>",
        ":mag: capture of llama-7b: host bound. rank 1 waits for Python "
        f"{link}/api/v1/captures/20260921T141959-3f9a1c/report.html|report>",
        ":white_check_mark: over: *straggler* on gpu-17: rank 1 computes 60 % longer than "
        f"&lt;its&gt; peer {link}/?show=6553f1f0-1#findings|more>",
    ]


def test_a_server_that_is_away_gets_it_later_but_not_for_ever(server: Receiver) -> None:
    site = Site(server)
    server.status = 503
    site.see(SLOW)
    site.see(SLOW)
    assert site.counted == {"failed": 1}
    server.status = 204
    site.wait()
    assert site.counted == {"failed": 1, "sent": 1}
    server.status = 500
    site.see(SLOW, replace(SLOW, id="6553f1f0-3"))
    for _ in range(MAX_TRIES + 5):
        site.wait()
    assert site.counted == {"failed": 1 + MAX_TRIES, "sent": 1, "dropped": 1}


def test_what_is_refused_is_not_sent_again_and_no_redirect_is_followed(server: Receiver) -> None:
    site = Site(server)
    server.status, server.location = 302, f"{server.url}/elsewhere"
    site.see(SLOW)
    server.status = 404
    site.wait()
    site.see(SLOW, replace(SLOW, id="6553f1f0-3"))
    assert site.counted == {"refused": 2}
    assert {path for path, _, _ in server.requests} == {"/"}


def test_the_queue_is_bounded(server: Receiver) -> None:
    site = Site(server)
    server.status = 503
    site.see(*(replace(SLOW, id=f"6553f1f0-{number}") for number in range(MAX_WAITING + 7)))
    assert site.counted == {"dropped": 7, "failed": 1}


def test_a_secret_address_and_a_token_are_read_from_files_each_time(
    server: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, headers = tmp_path / "url", tmp_path / "headers"
    address.write_text("http://127.0.0.1:1/services/T0/B0/secret\n")
    headers.write_text("# of the receiver\nAuthorization: Bearer right\n")
    site = Site(server, url=None, url_file=address, headers_file=headers)
    with caplog.at_level(logging.WARNING):
        site.see(SLOW)
    assert "exporters.webhooks[0]" in caplog.text and "secret" not in caplog.text
    address.write_text(f"{server.url}/services/T0/B0/other\n")
    site.wait()
    ((path, sent, _),) = server.requests
    assert path == "/services/T0/B0/other"
    assert sent["Authorization"] == "Bearer right"


def test_a_certificate_that_nobody_vouches_for_is_not_accepted(tmp_path: Path) -> None:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        "-subj /CN=hooks -addext subjectAltName=IP:127.0.0.1 "
        f"-keyout {tmp_path}/hooks.key -out {tmp_path}/hooks.crt"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    certificate = tmp_path / "hooks.crt"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "hooks.key")
    with receiver(context) as server:
        site = Site(server)
        site.see(SLOW)
        assert (site.counted, server.requests) == ({"failed": 1}, [])
        site = Site(server, ca_file=certificate)
        site.see(SLOW)
        assert site.counted == {"sent": 1}


@pytest.mark.parametrize(
    ("webhook", "said"),
    [
        ("{}", "either url or url_file is needed"),
        ("{url: hooks.example}", "exporters.webhooks.0.url"),
        ("{url: https://hooks.example, format: teams}", "exporters.webhooks.0.format"),
        ("{url: https://hooks.example, min_severity: loud}", "exporters.webhooks.0.min_severity"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(tmp_path: Path, webhook: str, said: str) -> None:
    (tmp_path / "w.yaml").write_text(f"exporters: {{webhooks: [{webhook}]}}")
    with pytest.raises(UsageError, match=said):
        loading.load(tmp_path / "w.yaml", {})


def test_nothing_is_loaded_or_counted_where_nothing_is_configured() -> None:
    metrics = AgentMetrics()
    ways = WaysOut(Config(), "n", "warpwatch", None, metrics, lambda: state(), lambda: state())
    assert ways.last_words == {}
    assert list(metrics.registry.collect()) == []
