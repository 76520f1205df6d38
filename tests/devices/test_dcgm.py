"""The dcgm source on the stand-in of DCGM's bindings: the real ones cannot be had here."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.devices.conftest import Golden
from tests.devices.dcgm_stand_in import host_engine
from tests.devices.dcgm_stand_in.host_engine import DCGMError, Engine
from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from tests.waiting import eventually
from warpwatch_devices.config import DcgmConfig
from warpwatch_devices.dcgm.bindings import FOLDERS
from warpwatch_devices.dcgm.source import DcgmSource
from warpwatch_devices.dcgm.values import PROFILING_ROWS
from warpwatch_devices.source import SourceContext
from warpwatch_telemetry.catalogue import series_text
from warpwatch_telemetry.samples import DeviceSample, SourceHealth

STAND_IN = Path(__file__).with_name("dcgm_stand_in")
A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
# As an A100 has them; 1016 is unknown to the bindings, 1017 to us.
FIELDS = [*range(1001, 1016), 1016, 1017]
OF_A = {1001: 0.91, 1002: 0.8, 1004: 0.5, 1009: 1500000000}
GRAPHICS = ("device_graphics_active_ratio", ())
PAUSED = "profiling is paused for a capture"


class Node:
    """A host engine and the source that reads it, in rounds of half a second.

    ``known`` and ``wanted`` are what the source may know of the daemon.
    """

    def __init__(self, address: str = "localhost:5555", bindings: Path = STAND_IN) -> None:
        self.clock = ManualClock()
        gpus = [
            {"id": number, "uuid": uuid, "profiling": FIELDS} for number, uuid in ((0, A), (1, B))
        ]
        values = {"1/0": OF_A, "1/1": {1001: 0.25}}
        self.engine = host_engine.ENGINE = Engine(self.clock.wall, gpus, values)
        self.engine.answers.set()
        self.known: tuple[DeviceSample, ...] = ()
        self.wanted = False
        self.sink, self.loops = RecordingSink(), HandLoops(self.clock)
        around = SourceContext(
            lambda _: None, lambda: self.known, lambda: self.wanted, lambda _: None
        )
        config = DcgmConfig(enabled=True, address=address, bindings=bindings)
        clocks = {"monotonic": self.clock.monotonic, "wall": self.clock.wall}
        self.source = DcgmSource(config, around, **clocks)
        self.source.start(self.loops, self.sink)

    def run(self, seconds: float = 1.0) -> None:
        for _ in range(round(2 * seconds)):
            self.clock.advance(0.5)
            self.loops.round()

    def newest(self, uuid: str) -> DeviceSample:
        return self.sink.devices[uuid][-1]

    def values(self, uuid: str) -> dict[str, float]:
        return {name: value for (name, _), value in self.newest(uuid).values.items()}

    @property
    def health(self) -> SourceHealth:
        return self.sink.healths[-1]

    def close(self) -> None:
        self.engine.answers.set()
        self.loops.join()
        self.source.close()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    monkeypatch.setattr(host_engine, "ENGINE", host_engine.ENGINE)
    nodes: list[Node] = []

    def begin(**options: object) -> Node:
        nodes.append(Node(**options))  # type: ignore[arg-type]
        return nodes[-1]

    yield begin
    for node in nodes:
        node.close()


@pytest.fixture
def node(begin: Callable[..., Node]) -> Node:
    return begin()


def test_fields_become_our_series(node: Node, golden: Golden) -> None:
    node.run()
    sample = node.newest(A)
    assert (sample.source, sample.up, sample.time) == ("dcgm", True, node.clock.wall() - 0.5)
    assert sample.values[GRAPHICS] == 0.91
    assert node.newest(B).values == {GRAPHICS: 0.25}
    assert (node.health.up, node.health.reason, node.health.duration_s) == (True, "", 0.0)
    node.engine.values["1/0"] = {number: number / 10_000 for number in range(1001, 1009)}
    node.engine.values["1/0"] |= {number: number for number in range(1009, 1013)}
    node.engine.values["1/0"] |= {number: number / 10_000 for number in range(1013, 1016)}
    node.run()
    values = node.newest(A).values
    lines = [str(sample.device)]
    lines += [f"{series_text(key)} {round(values[key], 4)}" for key in sorted(values)]
    golden("dcgm_fields.txt", "".join(f"{line}\n" for line in lines).encode())
    assert len(PROFILING_ROWS) == 16


def test_each_gpu_is_watched_by_itself_for_what_it_supports(node: Node) -> None:
    node.engine.gpus[1]["profiling"] = [1001, 1005]
    node.run()
    everything = ",".join(map(str, range(1001, 1016)))
    assert node.engine.calls == [
        "connect localhost:5555 None",
        f"watch [(1, 0)] {everything} 1000000 3.0 0",
        "watch [(1, 1)] 1001,1005 1000000 3.0 0",
    ]
    # Nothing is left behind.
    node.source.close()
    assert node.engine.calls[3:] == ["unwatch [(1, 0)]", "unwatch [(1, 1)]", "disconnect"]


def test_blank_impossible_and_old_values_are_absent(node: Node) -> None:
    blanks = {1001: 140737488355328.0, 1002: 1.2, 1009: 9223372036854775794, 1003: 0.4}
    node.engine.values["1/0"] = blanks
    node.run()
    assert node.values(A) == {"device_sm_occupancy_ratio": 0.4}
    assert node.health.errors == 3
    # The host engine answers, but with what it read long ago.
    node.engine.age_s = 3.0
    node.run()
    assert node.values(A) == {"device_sm_occupancy_ratio": 0.4}
    node.engine.age_s = 3.1
    node.run()
    assert node.sink.devices == {}


def test_a_gpu_lost_or_not_profiled_costs_itself_alone(begin: Callable[..., Node]) -> None:
    for status in (4, 7):
        node = begin()
        node.run()
        node.engine.gpus[0]["status"] = status
        del node.engine.values["1/0"]
        node.run()
        lost = node.newest(A)
        assert (lost.up, lost.reason, lost.values) == (False, "lost", {})
        assert node.newest(B).up
    for fields, refused in (
        ([], "Profiling is not supported for this group of GPUs or GPU"),
        ([1016, 1017], "none of the profiling fields is supported"),
    ):
        node = begin()
        node.engine.gpus[0]["profiling"] = fields
        node.run()
        assert list(node.sink.devices) == [B]
        assert (node.health.up, node.health.reason) == (True, f"GPU 0: {refused}")
    node.engine.gpus = []
    node.run(16)
    assert (node.health.up, node.health.reason) == (True, "DCGM supports no GPU here")


INSTANCES = [{"id": 4, "gpu": 0, "gi": 7}, {"id": 5, "gpu": 0, "gi": 9}]
OF_INSTANCES = {"1/0": {1001: 0.9}, "4/4": {1001: 0.5, 1009: 7}}


def test_instances_come_and_go_while_it_runs(node: Node) -> None:
    node.run()
    node.engine.change(instances=INSTANCES, values=OF_INSTANCES)
    node.run(13.5)
    assert f"{A}/gi7" not in node.sink.devices
    node.run(1.5)
    assert node.newest(f"{A}/gi7").values == {GRAPHICS: 0.5}
    watched = [call.partition("] ")[0] for call in node.engine.calls if call.startswith("watch")]
    assert watched[-2:] == ["watch [(1, 0), (4, 4), (4, 5)", "watch [(1, 1)"]
    # What DCGM has published itself is no device of NVML's.
    node.known = tuple(samples[-1] for samples in node.sink.devices.values())
    new = [{"id": 6, "gpu": 0, "gi": 1}]
    node.engine.change(instances=new, values={"4/6": {1001: 0.125}, "5/0": {1001: 0.7}})
    node.run(16)
    assert list(node.sink.devices) == [f"{A}/gi1"]
    assert node.health.up


def test_profiling_is_paused_while_a_capture_wants_the_counters(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    # Values from before the pause are absent as well.
    node.engine.blank_while_paused = False
    node.run()
    node.wanted = True
    node.run(0.5)
    assert node.engine.paused
    assert (node.newest(A).up, node.newest(A).values) == (True, {})
    assert (node.health.up, node.health.reason) == (True, PAUSED)
    node.wanted = False
    node.run(0.5)
    assert node.values(A) and not node.engine.paused
    node.wanted = True
    node.run(1)
    assert node.engine.paused
    # One that is lost meanwhile is lost at once.
    node.engine.gpus[1]["status"] = 4
    node.run(1)
    assert [(node.newest(gpu).up, node.newest(gpu).reason) for gpu in (A, B)] == [
        (True, ""), (False, "lost"),
    ]  # fmt: skip
    node.engine.gpus[1]["status"] = 1
    node.source.close()
    assert node.engine.calls.count("pause") == node.engine.calls.count("resume") == 2
    assert node.engine.calls[-1] == "disconnect"
    # A host engine that cannot pause goes on.
    node.engine.can_pause = False
    node.run(3)
    assert node.values(A) and (node.health.up, node.health.reason) == (True, "")
    assert [text.partition(":")[0] for text in caplog.messages] == ["DCGM does not pause profiling"]


def test_a_pause_that_lasts_too_long_is_ended_and_not_begun_again(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.run()
    node.wanted = True
    node.run(600)
    assert node.engine.paused
    node.run(1)
    assert node.values(A) and not node.engine.paused
    node.run(600)
    node.wanted = False
    node.run(1)
    assert node.engine.calls.count("pause") == 1
    node.wanted = True
    node.run(1)
    assert node.engine.calls.count("pause") == 2
    # One that cannot be ended is over for us.
    node.engine.can_pause = node.wanted = False
    node.run(1)
    assert (node.health.up, node.health.reason) == (True, "")
    assert caplog.messages == [
        "profiling is resumed: a capture kept it paused too long",
        "DCGM does not resume profiling: This request is serviced by a module that is not loaded",
    ]


def test_a_pause_that_outlived_the_connection_is_ended_or_begun_again(node: Node) -> None:
    node.run()
    node.wanted = True
    node.run()
    node.engine.up = False
    node.run()
    assert not node.health.up and node.engine.paused
    node.wanted = False
    node.engine.up = True
    node.run(2)
    assert node.values(A) and not node.engine.paused
    # A host engine that starts again during a pause knows nothing of it.
    node.wanted = True
    node.run()
    node.engine.change(started=1, paused=False)
    node.run(3)
    assert node.engine.paused and node.values(A) == {}
    node.engine.up = False
    node.source.close()
    assert node.engine.calls[-1].startswith("disconnect ")


def test_a_host_engine_gone_comes_back(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.engine.up = False
    tries = []
    for half_seconds in range(2 * 200):
        before = node.health.errors if node.sink.healths else 0
        node.run(0.5)
        if node.health.errors > before:
            tries.append(half_seconds / 2)
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    text = "DCGM at localhost:5555: The connection to the host engine is not valid any longer"
    assert (node.health.up, node.health.reason, node.sink.devices) == (False, text, {})
    assert caplog.messages == [text]
    # The bindings raise other errors, too, in any words.
    for error, said in (
        (Exception("two\nlines"), "two lines"),
        (ValueError(), "ValueError"),
        (DCGMError(-14), "DCGM Error with code -14"),
    ):
        node.engine.error = error
        node.run(60)
        assert node.health.reason == f"DCGM at localhost:5555: {said}"
    node.engine.change(up=True, error=None)
    node.run(60)
    assert node.values(A) and node.health.up
    node.engine.error = DCGMError(-14)
    node.run()
    assert caplog.messages[-2:] == 2 * ["DCGM at localhost:5555: DCGM Error with code -14"]
    node.engine.error = None
    node.run()
    # Restarted between two readings: nothing of before is known to it.
    node.engine.change(started=1, values={"1/0": {1001: 0.125}})
    node.run(3)
    assert node.newest(A).values == {GRAPHICS: 0.125}


def test_a_call_that_hangs_is_not_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.run()
    node.engine.answers.clear()
    node.clock.advance(1)
    node.loops["dcgm"].start()
    eventually(lambda: node.loops["dcgm"].busy)
    node.clock.advance(10)
    node.loops.run("dcgm-watchdog")
    assert node.health.up
    node.clock.advance(0.1)
    node.loops.run("dcgm-watchdog")
    assert (node.health.up, node.health.reason) == (False, "DCGM at localhost:5555 does not answer")
    monkeypatch.setattr("warpwatch_devices.dcgm.source._CLOSE_TIMEOUT_S", 0.0)
    # Its end is reached while the call is inside.
    node.source.close()
    assert node.loops["dcgm"].busy


def test_missing_bindings_name_the_remedy(begin: Callable[..., Node], tmp_path: Path) -> None:
    node = begin(bindings=tmp_path)
    node.run()
    assert (node.health.up, node.health.reason) == (
        False,
        f"DCGM at localhost:5555: no pydcgm.py in {tmp_path}: install DCGM's packages, or name"
        " the folder of its Python bindings in sources.dcgm.bindings",
    )
    assert FOLDERS[0] == Path("/usr/share/datacenter-gpu-manager-4/bindings/python3")
