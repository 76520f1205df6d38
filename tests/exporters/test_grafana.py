"""Annotations in Grafana: each once, with its end, after any failure."""

import copy
import json
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.http.certificates import make_certificate, server_context
from tests.daemon.state.counted import counted
from tests.exporters.grafana_stand_in import TOKEN, GrafanaStandIn, grafana_stand_in
from tests.exporters.states import CAPTURE, NOW, SLOW, state_of
from tests.manual_clock import ManualClock
from warpwatch_daemon.agent.composition import grafana_follower
from warpwatch_daemon.config import Config
from warpwatch_daemon.state.hub import Hub
from warpwatch_exporters.grafana import Annotations, GrafanaAnnotations, GrafanaApi
from warpwatch_runtime import loading
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest

HOT = Anomaly(
    id="6553f1f0-2",
    kind="overheating",
    time=NOW,
    severity="critical",
    summary="GPU 3 is hot",
    device="GPU-3",
)


class Site:
    def __init__(self, grafana: GrafanaStandIn, folder: Path) -> None:
        self.grafana = grafana
        self.token = folder / "token"
        self.token.write_text(TOKEN + "\n")
        self.url = grafana.url
        self.counted: Counter[str] = Counter()
        self.clock = ManualClock()
        self.restart()

    def restart(
        self, public_url: str = "https://warpwatch.example/gpu-17/", node: str = "gpu-17"
    ) -> None:
        self.exporter = GrafanaAnnotations(
            GrafanaApi(self.url, self.token),
            Annotations(node, public_url),
            lambda result: self.counted.update([result]),
            self.clock.monotonic,
        )

    def see(self, *found: Anomaly | Capture, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        self.exporter.advance(state_of(*found))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with grafana_stand_in() as grafana:
        yield Site(grafana, tmp_path)


def test_anomalies_and_captures_are_the_golden_annotations(site: Site, golden: Any) -> None:
    ended = replace(SLOW, end_time=NOW + 90.5, summary="rank 1 computed 60 % longer")
    running = replace(CAPTURE, outcome=None, end_time=None)
    again = replace(SLOW, reopened=1)
    rounds = [
        (SLOW, HOT, running, replace(CAPTURE, outcome="failed")),
        # An anomaly becomes a region when it ends, also when it came back.
        *((ended, HOT, CAPTURE), (ended, HOT), (again, HOT)),
        (replace(again, end_time=NOW + 100), HOT),
        # The page shows captures without a report.
        (replace(CAPTURE, id="20260921T141959/000002", files=(), recording_time=None),),
    ]
    annotations = []
    for found in rounds:
        site.see(*found)
        annotations.append(copy.deepcopy(site.grafana.annotations))
    # Without a public URL there is no link. Another node has an anomaly of the same id.
    site.restart(public_url="", node="gpu-18")
    stacks = CaptureRequest("llama-7b", "stacks", "anomaly")
    site.see(ended, replace(CAPTURE, request=stacks, diagnosis=None, diagnosis_outcome=None))
    annotations.append(site.grafana.annotations)
    golden("exporters/grafana.json", json.dumps(annotations, indent=1).encode())
    assert site.counted == {"written": 6, "updated": 2}


def test_a_restart_writes_nothing_twice(site: Site) -> None:
    site.see(SLOW, HOT, CAPTURE)
    before = dict(site.grafana.annotations)
    site.restart()
    site.see(SLOW, HOT, CAPTURE)
    assert site.grafana.annotations == before
    assert site.counted == {"written": 3, "known": 3}
    # An anomaly that has ended meanwhile gets its end.
    site.restart()
    site.see(replace(HOT, end_time=NOW + 5))
    assert site.grafana.annotations[2]["timeEnd"] == 1_790_000_005_000


def test_an_answer_that_was_lost_makes_no_second_annotation(site: Site) -> None:
    # First the answer to the query is lost, then that to the writing.
    for method, after_s, written in (("GET", 0, 0), ("POST", 5, 1), ("", 10, 1)):
        site.grafana.lose_answers = (method,)
        site.see(SLOW, after_s=after_s)
        assert len(site.grafana.annotations) == written
    assert site.counted == {"failed": 2, "known": 1}


def test_a_pause_grows_while_grafana_is_away(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.grafana.status = 503
    asked = []
    for second in range(400):
        before = len(site.grafana.requests)
        site.see(SLOW, HOT, after_s=1)
        if len(site.grafana.requests) > before:
            asked.append(second)
    assert asked == [0, 5, 15, 35, 75, 155, 315]
    assert site.counted == {"failed": 7}
    assert caplog.messages == [
        'no annotation in Grafana: GET is answered with 503: {"message": "as the test wants it"}'
    ]
    site.grafana.status = None
    site.see(SLOW, HOT, after_s=300)
    assert len(site.grafana.annotations) == 2


def test_one_that_grafana_cannot_save_keeps_no_other_from_its_turn(site: Site) -> None:
    site.grafana.fail_text = "hot"
    site.see(HOT, SLOW)
    site.see(HOT, SLOW, after_s=5)
    assert site.grafana.only()["text"].startswith("rank 1")
    assert site.counted == {"failed": 2, "written": 1}
    # And is written when it can be.
    site.grafana.fail_text = ""
    site.see(HOT, SLOW, after_s=5)
    assert len(site.grafana.annotations) == 2


def test_what_grafana_refuses_for_good_is_not_asked_again(site, caplog):
    site.grafana.refuse_text = "hot"
    for _ in range(3):
        site.see(HOT, SLOW)
    assert site.counted == {"refused": 1, "written": 1}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    site.see(replace(HOT, end_time=NOW + 1), SLOW)
    assert site.counted == {"refused": 1, "written": 1}
    # An annotation that a user removed stays removed.
    site.grafana.annotations.clear()
    for _ in range(2):
        site.see(replace(SLOW, end_time=NOW + 9), after_s=300)
    assert site.grafana.annotations == {}
    assert site.counted == {"refused": 2, "written": 1}


def test_a_new_token_is_taken_up(site: Site) -> None:
    site.grafana.token = "glsa_new"
    site.see(SLOW)
    assert site.counted == {"refused": 1}
    site.token.write_text("glsa_new")
    site.see(SLOW, after_s=5)
    assert site.counted == {"refused": 1, "written": 1}
    site.token.unlink()
    site.see(SLOW, HOT)
    assert site.counted["failed"] == 1


def test_what_is_not_known_any_more_is_counted(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        site.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # No one answers there.
    site.restart()
    site.see(SLOW, HOT)
    site.see(HOT)
    assert site.counted == {"failed": 1, "dropped": 1}


def test_the_past_is_not_written(site: Site) -> None:
    old = replace(SLOW, time=NOW - 7200)
    site.see(old, replace(old, id="b", end_time=NOW - 3700), replace(HOT, time=NOW - 3500))
    assert site.grafana.only()["text"].startswith("GPU 3 is hot: ")
    # It ends now, and that is news.
    site.see(replace(old, end_time=NOW), replace(HOT, time=NOW - 3500))
    assert len(site.grafana.annotations) == 2


def test_names_that_training_made_up_fit_into_grafana(site: Site) -> None:
    name = "ü<script>alert(1)</script>,\n: " * 40
    diagnosis = {"verdict": [1], "summary": name * 99}
    capture = replace(CAPTURE, request=replace(CAPTURE.request, job=name), diagnosis=diagnosis)
    site.see(replace(SLOW, job=name, summary=name * 9), capture)
    assert site.counted == {"written": 2}
    texts = [annotation["text"] for annotation in site.grafana.annotations.values()]
    assert [text for text in texts if "<script" in text or "\n" in text] == []


def test_a_round_ends_so_that_the_daemon_can(site: Site) -> None:
    many = [replace(HOT, id=f"a-{number}") for number in range(50)]
    for written in (20, 40, 50, 50):
        site.see(*many)
        assert len(site.grafana.annotations) == written


def test_the_daemon_writes_where_its_configuration_says_to_a_grafana_that_it_trusts(
    tmp_path, caplog
):
    certificate = make_certificate(tmp_path)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    hub = Hub(10.0)
    with grafana_stand_in("/grafana", server_context(certificate)) as grafana:
        section = {"url": grafana.url + "/", "token_file": str(token)}
        for more, written in (({}, 0), ({"ca_file": str(certificate)}, 1)):
            tree = {
                "http": {"public_url": "https://warpwatch.example/{node}"},
                "exporters": {"grafana": section | more},
            }
            follower = grafana_follower(
                loading.parse(Config, tree, "the test"), "gpu-17", hub.metrics
            )
            follower.advance(state_of(HOT))
            assert counted(hub, "grafana_annotations_total", "written") == written
        assert "https://warpwatch.example/gpu-17/?show=" in grafana.only()["text"]
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert counted(hub, "grafana_annotations_total", "dropped") == 0.0
    assert grafana_follower(Config(), "gpu-17", AgentMetrics()) is None
