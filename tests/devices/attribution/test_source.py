"""The source asks its origins beside each other and keeps the last word of one that is away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.devices.attribution.fake_kubelet import FakeKubelet, pods
from tests.devices.attribution.gpus import GPU_0, node
from tests.devices.recording import RecordingSink, wait_until
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices.attribution.origin import OriginAnswer, OriginError
from warpwatch_devices.attribution.source import Asker, AttributionSource, origins_of
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.source import Surroundings
from warpwatch_telemetry.attribution import Attribution, SlurmJob
from warpwatch_telemetry.samples import DeviceSample

Devices = Callable[[], tuple[DeviceSample, ...]]


def surroundings(devices: Devices = node) -> Surroundings:
    return Surroundings(
        load_of=lambda index: None,
        devices=devices,
        counters_wanted=lambda: False,
        fail=lambda reason: None,
    )


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INTERVAL_S", "TICK_S"):
        monkeypatch.setattr(f"warpwatch_devices.attribution.source.{name}", 0.1)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    running = Supervisor()
    yield running
    running.stop()


class Scripted:
    """An origin that answers, or fails, as the test says."""

    name = "kubelet"
    needs_devices = True

    def __init__(self) -> None:
        self.outcome: OriginAnswer | OriginError = OriginAnswer()
        self.reads = 0

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        self.reads += 1
        if isinstance(self.outcome, OriginError):
            raise self.outcome
        return self.outcome

    def close(self) -> None:
        pass


def asker(origin: Scripted, sink: RecordingSink, devices: Devices = node) -> Asker:
    return Asker(origin, 0.0, devices, sink, lambda origin, failure, duration_s: None)


def test_the_configuration_says_who_is_asked(tmp_path: Path) -> None:
    def names(kubelet_socket: str = "auto", slurm: str = "auto") -> list[str]:
        config = AttributionConfig(kubelet_socket=kubelet_socket, slurm=slurm)
        return [origin.name for origin in origins_of(config)]

    assert names() == ["cgroup", "kubelet"]
    assert names(kubelet_socket="off") == ["cgroup"]
    assert names(kubelet_socket=str(tmp_path), slurm="off") == ["cgroup", "kubelet"]
    assert names(slurm=str(tmp_path)) == ["cgroup", "kubelet", "slurm"]


def test_a_kubelet_that_goes_leaves_its_last_word_with_its_time(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    socket = tmp_path / "kubelet.sock"
    kubelet = FakeKubelet(socket, pods(("before", "nvidia.com/gpu", GPU_0)))
    config = AttributionConfig(kubelet_socket=str(socket), slurm="off")
    source, sink = AttributionSource(config, surroundings()), RecordingSink()

    def of_kubelet() -> list[Attribution]:
        return [reported for reported in sink.attributions if reported.origin == "kubelet"]

    def failures() -> float:
        return sink.counts["attribution_errors_total", "kubelet"]

    source.start(supervisor, sink)
    wait_until(of_kubelet)
    kubelet.stop()
    wait_until(lambda: failures() >= 2)
    wait_until(lambda: not sink.healths[-1].up)
    assert sink.healths[-1].name == "attribution"
    assert sink.healths[-1].reason.startswith("kubelet: ")
    before = of_kubelet()
    assert before[-1].workloads[GPU_0][0].pod == "before"
    kubelet = FakeKubelet(socket, pods(("after", "nvidia.com/gpu", GPU_0)))
    wait_until(lambda: len(of_kubelet()) > len(before))
    assert of_kubelet()[-1].workloads[GPU_0][0].pod == "after"
    assert of_kubelet()[-1].time > before[-1].time
    wait_until(lambda: sink.healths[-1].up)
    source.close()
    kubelet.stop()


def test_a_kubelet_that_does_not_answer_keeps_no_one_waiting(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    kubelet = FakeKubelet(tmp_path / "kubelet.sock")
    kubelet.answering.clear()
    (tmp_path / "0").write_text("42\n")
    config = AttributionConfig(kubelet_socket=str(tmp_path / "kubelet.sock"), slurm=str(tmp_path))
    source, sink = AttributionSource(config, surroundings()), RecordingSink()
    source.start(supervisor, sink)

    def of_slurm() -> list[Attribution]:
        return [reported for reported in sink.attributions if reported.origin == "slurm"]

    wait_until(lambda: kubelet.calls == 1 and len(of_slurm()) >= 3)
    assert of_slurm()[-1].slurm_jobs == {GPU_0: (SlurmJob("42"),)}
    assert not [reported for reported in sink.attributions if reported.origin == "kubelet"]
    source.close()
    kubelet.stop()


def test_no_one_is_asked_before_there_are_devices() -> None:
    origin = Scripted()
    devices: list[DeviceSample] = []
    asked = asker(origin, RecordingSink(), lambda: tuple(devices))
    asked.step()
    assert origin.reads == 0
    devices.extend(node())
    asked.step()
    assert origin.reads == 1


def test_an_origin_is_asked_once_in_its_interval() -> None:
    origin = Scripted()
    asked = Asker(origin, 3600.0, node, RecordingSink(), lambda *reported: None)
    asked.step()
    asked.step()
    assert origin.reads == 1


def test_a_failure_counts_each_time_and_is_logged_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    origin, sink = Scripted(), RecordingSink()
    asked = asker(origin, sink)
    caplog.set_level(logging.INFO)
    away, refused = OriginError("away"), OriginError("refused")
    answer = OriginAnswer()
    outcomes: list[OriginAnswer | OriginError] = [away, away, away, refused, answer, answer]
    for outcome in outcomes:
        origin.outcome = outcome
        asked.step()
    assert sink.counts["attribution_errors_total", "kubelet"] == 4
    assert [record.getMessage() for record in caplog.records] == [
        "kubelet cannot be asked whose work runs: away",
        "kubelet cannot be asked whose work runs: refused",
        "kubelet answers again",
    ]


def test_a_refused_piece_counts_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    origin, sink = Scripted(), RecordingSink()
    asked = asker(origin, sink)
    for refused in ({"nvidia9"}, {"nvidia9"}, {"nvidia9", "nvidia8"}):
        origin.outcome = OriginAnswer(refused=frozenset(refused))
        asked.step()
    assert sink.counts["attribution_errors_total", "kubelet"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "kubelet: 1 not understood: nvidia9",
        "kubelet: 1 not understood: nvidia8",
    ]
