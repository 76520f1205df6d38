"""Webhooks: each anomaly once, to a real server; what is not taken is tried again for a while."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.daemon.http.certificates import make_certificate, server_context
from tests.exporters.receiver import Receiver, receiver
from tests.exporters.states import CAPTURE, LONG, NOW, SLOW, state_of
from tests.manual_clock import ManualClock
from warpwatch_exporters.config import ExportersConfig, WebhookConfig
from warpwatch_exporters.events import EventFeed
from warpwatch_exporters.push import PushExporters
from warpwatch_exporters.webhooks import WebhookExporter
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.state import State

INFO = replace(SLOW, id="6553f1f0-2", time=9.0, severity="info", kind="crash", summary="it ended")
OTHER = replace(SLOW, id="6553f1f0-3")
ENDED = replace(SLOW, end_time=NOW + 90)
EXPLAINED = replace(OTHER, end_time=NOW + 95, explained_by=SLOW.id)


class Site:
    def __init__(
        self,
        server: Receiver,
        before: State | None = None,
        public_url: str = "https://warpwatch.example/gpu-17/",
        **config: Any,
    ) -> None:
        self.server = server
        self.counted: Counter[str] = Counter()
        self.clock = ManualClock()
        self.webhook = WebhookExporter(
            WebhookConfig(**({"url": server.url} | config)),
            "exporters.webhooks[0]",
            "gpu-17",
            public_url,
            lambda result: self.counted.update([result]),
            self.clock.monotonic,
        )
        self.events = EventFeed(before or state_of())

    def see(self, *found: Anomaly | Capture) -> None:
        self.webhook.advance(self.events.drain(state_of(*found)))

    def wait(self, seconds: float = 1000.0) -> None:
        self.clock.advance(seconds)
        self.webhook.advance(())

    def told(self) -> list[Any]:
        return [json.loads(body) for body in self.server.bodies()]


@pytest.mark.parametrize(("form", "severity"), [("json", "warning"), ("slack", "info")])
def test_an_anomaly_its_verdict_and_its_end_are_a_golden_message_each(
    server, golden, form, severity
):
    site = Site(server, format=form, min_severity=severity)
    running = replace(CAPTURE, id="running", outcome=None, diagnosis=None)
    failed = replace(running, id="failed", outcome="partial", diagnosis_outcome="crashed")
    bare = replace(CAPTURE, id="no report/", files=("a",), diagnosis={"verdict": "no_problem"})
    request = replace(CAPTURE.request, anomaly_id=INFO.id)
    captures = running, CAPTURE, bare, failed, LONG, replace(CAPTURE, id="info", request=request)
    for found in ((SLOW,), (SLOW,), (SLOW, *captures), (ENDED, *captures, EXPLAINED)):
        site.see(INFO, *found)
    # Without a public URL there is no link.
    site = Site(server, public_url="", format=form, min_severity=severity)
    site.see(SLOW)
    golden(f"exporters/webhook_{form}.json", json.dumps(site.told(), indent=1).encode())
    assert site.counted == {"sent": 1}
    for given in ({}, {"url": server.url, "url_file": "/nowhere"}):
        with pytest.raises(ValidationError, match="either url or url_file is needed"):
            WebhookConfig(**given)


def test_no_name_of_a_stranger_is_markup_in_slack(server: Receiver) -> None:
    site = Site(server, format="slack")
    site.see(replace(SLOW, id="a/b|c><!here>", job="<!here>", node="<!channel> <https://x|y>"))
    ((_, link),) = (one["text"].split("<") for one in site.told())
    assert [link.count(mark) for mark in ">|/"] == [1, 1, 4], link


def test_what_was_there_before_the_start_is_not_told_again(server: Receiver) -> None:
    site = Site(server, state_of(SLOW))
    again = replace(SLOW, reopened=1)
    for found in ([SLOW], [ENDED], [again], [again], [replace(again, severity="critical")], []):
        site.see(*found)
    # Nor is what another process has told, even after the state has dropped it.
    site.events.know([OTHER, INFO])
    for found in ([], [INFO, OTHER], [OTHER], []):
        site.see(*found)
    assert site.events._known == set()
    told = [one["event"] + one["severity"] for one in site.told()]
    assert told == ["anomaly_closedwarning", "anomaly_openedwarning", "anomaly_openedcritical"]


def test_a_server_that_is_away_gets_it_later_but_not_for_ever(server: Receiver) -> None:
    site = Site(server)
    server.status = 503
    site.see(SLOW)
    site.wait(4.9)
    assert site.counted == {"failed": 1}
    server.status = 204
    site.wait(0.1)
    assert site.counted == {"failed": 1, "sent": 1}
    server.status = 500
    site.see(SLOW, OTHER)
    for _ in range(9):
        site.wait()
    assert site.counted == {"failed": 11, "sent": 1, "dropped": 1}
    # The queue is bounded.
    site = Site(server)
    many = [replace(SLOW, id=f"6553f1f0-{number}") for number in range(107)]
    site.see(*many)
    assert site.counted == {"dropped": 7, "failed": 1}
    # The verdict of the second of them is still to be told.
    site.see(*many, CAPTURE)
    assert site.counted == {"dropped": 8, "failed": 1}


def test_what_is_refused_is_not_sent_again_and_no_redirect_is_followed(server, caplog):
    site = Site(server)
    server.status, server.location = 302, f"{server.url}/elsewhere"
    site.see(SLOW)
    server.status = 404
    site.wait()
    site.see(SLOW, OTHER)
    assert site.counted == {"refused": 2}
    status = [text.partition("the answer is ")[2][:3] for text in caplog.messages]
    assert status == ["302", "404"]
    assert {path for path, _, _ in server.requests} == {"/"}
    # Too many requests: it is to be sent again.
    server.status = 429
    site.wait()
    site.see(SLOW, OTHER, replace(SLOW, id="6553f1f0-4"))
    server.status = 200
    site.wait()
    assert site.counted == {"refused": 2, "failed": 1, "sent": 1}


def test_a_secret_address_and_a_token_are_read_from_files_each_time(server, tmp_path, caplog):
    address, headers = tmp_path / "url", tmp_path / "headers"
    address.write_text("http://127.0.0.1:1/services/T0/B0/secret\n")
    headers.write_text("# of the receiver\nAuthorization: Bearer right\n")
    site = Site(server, url=None, url_file=address, headers_file=headers)
    site.see(SLOW)
    address.write_text(f"{server.url}/services/T0/B0/other\n")
    site.wait()
    address.write_text("hooks.example/T0/B0/secret\n")
    site.see(SLOW, OTHER)
    assert site.counted == {"failed": 2, "sent": 1}
    assert caplog.text.count("exporters.webhooks[0]") == 2
    assert (
        f"{address} has no http:// or https:// address" in caplog.text
        and "T0/B0" not in caplog.text
    )
    ((path, sent, _),) = server.requests
    assert path == "/services/T0/B0/other"
    assert sent["Authorization"] == "Bearer right"


def test_a_certificate_that_nobody_vouches_for_is_not_accepted(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    with receiver(server_context(certificate)) as server:
        for trusted, counted in ((None, {"failed": 1}), (certificate, {"sent": 1})):
            site = Site(server, ca_file=trusted)
            site.see(SLOW)
            assert site.counted == counted
        assert len(server.requests) == 1


def test_nothing_is_loaded_or_counted_where_nothing_is_configured(golden):
    golden("exporters/defaults.json", ExportersConfig().model_dump_json(indent=1).encode())
    metrics = AgentMetrics()
    ways = PushExporters(ExportersConfig(), "n", "warpwatch", "", metrics, state_of, state_of)
    assert ways.last_words == {}
    assert list(metrics.registry.collect()) == []
