"""The demo: the story of each fault, what its processes are given, and the program of a rank."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from tests.cases import cases
from tests.client.daemon_side import Folder
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch_daemon.cli import demo as command
from warpwatch_daemon.demo import processes, story
from warpwatch_daemon.demo.processes import DemoNodes, DemoProcesses
from warpwatch_daemon.demo.story import FAULTS, Story
from warpwatch_telemetry.errors import UsageError, WarpwatchError

CASES = cases(__file__)
PHASES = ["forward", "comm", "backward", "optimizer"]


class Played:
    """Processes of a demo whose API answers what a case says from each second on."""

    ranks, run, url = 2, "r2", "http://demo"
    start_daemon = partial(print, "start the daemon")
    start_training = partial(print, "start the training")
    stop_training = partial(print, "stop the training")
    link, log_tail = partial(str, "http://demo/link"), "the last line of {}".format

    def __init__(self, case: dict[str, Any]) -> None:
        self.clock, self.said, self._case = ManualClock(0.0, 5000.0), list[str](), case
        self.watcher, self.has_captured = case.get("watcher", "daemon"), "watcher" in case
        self.work = self.store = Path("/demo")
        times: Any = {"monotonic": self.clock.monotonic, "time": self.clock.wall}
        self.times = SimpleNamespace(**times, sleep=self.clock.sleep)
        self.switch = SimpleNamespace(set=lambda fault: self.say(f"switch: {fault}"))
        self.api = SimpleNamespace(get=self._get)

    def say(self, text: str) -> None:
        self.said.append(f"[{self.clock.monotonic():6.2f}] {text}")

    def _get(self, path: str) -> Any:
        """Return the list with the defaults in each record, or the report of the detectors."""
        name = path.removeprefix("/api/v1/")
        known = self._case.get(name.partition("?")[0], {})
        newest = max((at for at in known if at <= self.clock.monotonic()), default=None)
        found = known.get(newest, [])
        if name.startswith("detectors?"):
            self.said += [f"GET {name}"] * (f"GET {name}" not in self.said)
            readings = [CASES["defaults"]["readings"] | one for one in found]
            held = [{"cause": "crash", "summary": "a"}] * (newest == 0)
            return {"detectors": [{"readings": [one]} for one in readings], "suppressed": held}
        return {name: [CASES["defaults"][name] | one for one in found]}

    def check_training(self) -> None:
        if self.clock.monotonic() >= self._case.get("dies", 1e9):
            raise WarpwatchError("rank 1 ended with 1: killed")


@pytest.mark.parametrize("name", CASES["stories"])
def test_a_fault_is_told_until_its_verdict(name, golden_case):
    case = CASES["stories"][name]
    played: Any = Played(case)
    try:
        ending = Story(played, played.say, played.times).run(FAULTS[case["fault"]])
        played.say(json.dumps(ending.to_json()))
        played.say(f"closed: {ending.closed}")
    except WarpwatchError as error:
        played.say(f"error: {error}")
    golden_case("".join(f"{line}\n" for line in played.said))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("nodes", [1, 2])
def test_daemons_and_ranks_get(nodes, folder, monkeypatch, golden_case):
    given: Any = []
    ended = SimpleNamespace(poll=lambda: 0, wait=lambda timeout: 0)
    store = folder / "kept" if nodes > 1 else None
    demo = DemoNodes("[::1]:0", store, nodes) if nodes > 1 else DemoProcesses("127.0.0.1:9", None)
    monkeypatch.setattr(
        demo, "watch", lambda name, api, *more: given.append([name, api.url, *more])
    )
    monkeypatch.setattr(demo, "_start", lambda *start: given.append(start) or ended)
    (demo.work / "stop").touch()
    demo.switch.set("hang")
    demo.start_daemon()
    demo.start_training()
    given += [demo.switch.get(), (demo.work / "stop").exists(), demo.api._socket_path]
    demo.stop_training()
    demo.check_training()
    given.append((demo.work / "stop").exists())
    text = yaml.dump(json.loads(json.dumps(given, default=str)), sort_keys=False, width=999)
    for number, port in enumerate(dict.fromkeys(re.findall(r"1\]?:(\d{2,})", text))):
        text = text.replace(f":{port}", f":PORT{number}")
    text = text.replace(str(demo.work), "WORK").replace(str(folder), "TMP")
    golden_case(text.replace(demo.run, "RUN"))


@pytest.mark.parametrize("captured", [True, False])
def test_captures_stay_and_nothing_else(captured, folder, monkeypatch):
    monkeypatch.setenv("WARPWATCH_RUN", "another")
    with DemoProcesses("127.0.0.1:9", None) as demo:
        demo.switch.set("slow_rank")
        demo.store.mkdir()
        demo._ranks.append(demo._start("rank0", ["timeit", CASES["says"]], {"WARPWATCH_A": ""}))
        demo._ranks[0].wait()
        with pytest.raises(WarpwatchError, match=r"^rank 0 ended with 1: PATH WARPWATCH_A$"):
            demo.check_training()
        demo._ranks[0] = demo._start("rank0", ["this"], {})
        demo._ranks[0].wait()
        with pytest.raises(WarpwatchError, match="rank 0 ended with 0: Namespaces are"):
            demo.check_training()
        assert "Traceback" in (demo.work / "rank0.log").read_text()
        (demo.work / "quiet.log").touch()
        assert demo.log_tail("quiet") == "it said nothing"
        # The ranks end by themselves, or are killed.
        monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
        demo._ranks[0] = rank = Popen(["sleep", "1000"])
        if captured:
            (demo.store / "capture.json").touch()
    left = [path.relative_to(demo.work) for path in folder.rglob("*") if path.is_file()]
    assert (left, demo.work.exists()) == ([Path("captures/capture.json")] * captured, captured)
    assert rank.poll() == -signal.SIGKILL


def test_a_daemon_starts_or_it_is_said_why_not(folder, monkeypatch):
    asked: list[str] = []
    api: Any = SimpleNamespace(get=asked.append, post=lambda *call: {"path": f"{call[0]}/x"})
    with DemoProcesses("127.0.0.1:0", None) as demo, socket.socket() as other:
        with pytest.raises(UsageError, match=r"^warpwatch daemon: .* htpp: unknown key"):
            demo.watch("daemon", demo.api, {"htpp": {}})
        api.url, demo.api = demo.url, api
        started, asleep = cast(Any, []), ["sleep", "1000"]
        monkeypatch.setattr(demo, "_start", lambda *it: started.append(it) or Popen(asleep))
        demo.watch("gpu-1", api, {"http": {}}, "daemon")
        assert (asked, demo.link()) == (["/healthz"], f"{demo.url}/api/v1/sessions/x")
        monkeypatch.setattr(processes, "START_TIMEOUT_S", 0.0)
        (demo.work / "fleet.log").touch()
        with pytest.raises(WarpwatchError, match=r"^the fleet did not start: it said nothing$"):
            demo.watch("fleet", api, {})
        path, directory = str(demo.work / "gpu-1.yaml"), {"WARPWATCH_DIR": str(demo.work / "run")}
        command = ["warpwatch_daemon", "daemon", "--config", path]
        assert started[0] == ("gpu-1", command, directory)
        assert (started[1][1][1], Path(path).read_text()) == ("fleet", "http: {}\n")
        # A port that is given stays taken.
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", processes.free_port()))
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        for taken in (place, "a:-1", "127.0.0.1:99999"):
            with pytest.raises(UsageError, match=f"^cannot listen on {taken} .*; choose with --l"):
                demo.watch("late", cast(Any, SimpleNamespace(url=f"http://{taken}")), {})
    assert [one.poll() for one in demo._watchers.values()] == [2, -15, -15]


@pytest.mark.parametrize("line", CASES["commands"])
def test_the_command_tells(line, folder, monkeypatch, capsys, golden_case):
    def played(listen: str, store: Path | None, nodes: int = 1) -> Any:
        print("start", listen, store, nodes)
        return contextlib.nullcontext(Played(CASES["commands"][line]))

    for name in ("START_TIMEOUT_S", "LEARN_TIMEOUT_S", "FOUND_TIMEOUT_S", "QUIET_S"):
        monkeypatch.setattr(story, name, CASES["commands"][line].get(name, 0.0))
    monkeypatch.setattr(command, "DemoProcesses", played)
    monkeypatch.setattr(command, "DemoNodes", played)
    on: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", on.__setitem__)
    if "no torch" in CASES["commands"][line]:
        monkeypatch.setitem(sys.modules, "torch", None)
    try:
        status: object = command.main(line.split())
    except WarpwatchError as error:
        status = error
    for stop in on.values():
        with pytest.raises(SystemExit, match="143"):
            stop()
    out, err = capsys.readouterr()
    told = re.sub(r"(?m)^.[ .0-9]+ s.", "[…]", err)
    golden_case(f"{out}{told}{status}\n{[*map(int, on)]}\n")


@pytest.mark.torch
def test_a_rank_goes_wrong_as_the_switch_says_until_the_stop(tmp_path, golden_case):
    folder = Folder(tmp_path / "run")
    about = {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo", "WARPWATCH_JOB": "llama"}
    about |= {f"WARPWATCH_DEMO_{name.upper()}": name for name in ("stop", "switch")}
    about["WARPWATCH_DEMO_RENDEZVOUS"] = str(tmp_path / "meeting")
    options: Any = {"cwd": tmp_path, "env": folder.environment(**about), "check": True}
    with folder.held():
        program = [sys.executable, "-c", CASES["program"]]
        done = subprocess.run(program, stdout=PIPE, text=True, timeout=DEADLINE_S, **options)
    golden_case("".join(f"{what}: {how}\n" for what, how in json.loads(done.stdout).items()))
    ring = folder.ring()
    assert (ring.metadata["job"], ring.metadata["phases"][1:]) == ("llama", PHASES)
    assert [(step[0], step[4]) for step in ring.steps] == [(number, 16) for number in range(13)]
    assert all(ns for step in ring.steps for ns in step[7:11])
