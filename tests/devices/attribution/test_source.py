"""The source asks its origins beside each other and keeps the last word of one that is away."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.devices.attribution.gpus import GPU_0, node
from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from warpwatch_devices.attribution.source import AttributionSource, OriginPoller
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.source import OriginAnswer, OriginError, SourceContext
from warpwatch_telemetry.samples import Attribution, DeviceSample, SlurmJob


class Scripted:
    name = "kubelet"
    needs_devices = True

    def __init__(self, outcome: OriginAnswer | OriginError | None = None) -> None:
        self.outcome = outcome or OriginAnswer()
        self.reads = 0

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        self.reads += 1
        if isinstance(self.outcome, OriginError):
            raise self.outcome
        return self.outcome

    def close(self) -> None:
        pass


class Asked:
    """A scripted origin and what is published of it, at a time that the test moves."""

    def __init__(self, devices: Callable[[], tuple[DeviceSample, ...]] = node) -> None:
        self.origin, self.sink, self.clock = Scripted(), RecordingSink(), ManualClock()
        clocks = (self.clock.monotonic, self.clock.wall)
        asked = (self.origin, 10.0, devices, self.sink)
        self.asker = OriginPoller(*asked, lambda origin, failure, duration_s: None, *clocks)

    def step(self, outcome: OriginAnswer | OriginError | None = None) -> None:
        self.origin.outcome = outcome or OriginAnswer()
        self.clock.advance(10)
        self.asker.step()

    @property
    def errors(self) -> float:
        return self.sink.counts["attribution_errors_total", "kubelet"]


def test_a_failed_origins_last_word_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sink = ManualClock(), RecordingSink()
    (tmp_path / "0").write_text("42\n")
    (tmp_path / "ml_train_0b9f7a52-6f0c-4c35-9e0a-1d2c3b4a5f60").mkdir()
    given = {"slurm": str(tmp_path), "pod_logs": str(tmp_path)}
    config = AttributionConfig(kubelet_socket=str(tmp_path / "none"), **given)
    around = SourceContext(lambda _: None, node, lambda: False, lambda _: None)
    clocks = {"monotonic": clock.monotonic, "wall": clock.wall}
    source, loops = AttributionSource(config, around, **clocks), HandLoops(clock)
    source.start(loops, sink)
    assert [(one.name, one.up) for one in sink.healths] == [("attribution", True)]
    names = ["attribution-cgroup", "attribution-kubelet", "attribution-pod_logs"]
    names += ["attribution-slurm"]
    assert loops.names == names
    for pause_s in (9.9, 0.1, 10):
        loops.run(*names)
        clock.advance(pause_s)
    of_slurm = [one for one in sink.attributions if one.origin == "slurm"]
    assert [one.slurm_jobs for one in of_slurm] == [{GPU_0: (SlurmJob("42"),)}] * 2
    assert [clock.wall() - one.time for one in of_slurm] == [20, 10]
    # Rings of pods wait for this one.
    asked = [one.origin for one in sink.attributions]
    assert (asked.count("pod_logs"), asked.count("kubelet")) == (3, 0)
    health = sink.healths[-1]
    assert (health.name, health.up, health.errors) == ("attribution", False, 2)
    assert health.reason == f"kubelet: {tmp_path}/none: No such file or directory"
    (tmp_path / "0").unlink()
    tmp_path.rename(tmp_path.with_name("moved"))
    loops.run(*names)
    assert "; slurm: " in sink.healths[-1].reason
    assert len([one for one in sink.attributions if one.origin == "slurm"]) == 2
    source.close()


def test_no_one_is_asked_before_there_are_devices_and_then_once_in_an_interval() -> None:
    devices: list[DeviceSample] = []
    asked = Asked(lambda: tuple(devices))
    asked.step()
    assert asked.origin.reads == 0
    without = Asked(tuple)
    without.origin.needs_devices = False
    without.step()
    assert without.origin.reads == 1
    devices.extend(node())
    for after_s, reads in ((0.0, 1), (9.9, 1), (0.1, 2), (0.1, 2)):
        asked.clock.advance(after_s)
        asked.asker.step()
        assert asked.origin.reads == reads


def test_a_failure_counts_and_a_new_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked()
    caplog.set_level(logging.INFO)
    away, refused = OriginError("away"), OriginError("refused")
    answer = OriginAnswer((Attribution("kubelet", 1.0),))
    for outcome in (answer, away, away, away, refused, answer, answer):
        asked.step(outcome)
    assert asked.errors == 4
    assert len(asked.sink.attributions) == 3
    assert caplog.messages == [
        "kubelet cannot be asked whose work runs: away",
        "kubelet cannot be asked whose work runs: refused",
        "kubelet answers again",
    ]


def test_a_refused_piece_counts_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked()
    nine, eight = {"nvidia9"}, {"nvidia9", "nvidia8"}
    for refused in (nine, nine, eight, set[str](), eight):
        asked.step(OriginAnswer(refused=frozenset(refused)))
    assert asked.errors == 4
    assert caplog.messages == [
        "kubelet: 1 not understood: nvidia9",
        "kubelet: 1 not understood: nvidia8",
        "kubelet: 2 not understood: nvidia8, nvidia9",
    ]
