"""Results of functions and small classes of the daemon, as a golden file."""

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from tests import expressions
from tests.conftest import Cases
from tests.daemon.doctor.conftest import reading, surveyed
from tests.daemon.http.conftest import CAPTURE, NOW, STRAGGLER, node_in_trouble
from tests.manual_clock import ManualClock
from warpwatch_daemon.participants import stacks
from warpwatch_daemon.participants.local_ranks import AskedRank, LocalRanks
from warpwatch_daemon.ranks.claims import Claims
from warpwatch_runtime.directory import Directory
from warpwatch_telemetry.captures import CaptureRequest
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.records import End, RankEvent

MODULES = {
    "": "argparse asyncio collections errno gzip io itertools json math os stat sys time",
    "warpwatch": "protocol",
    "warpwatch_runtime": "agent_metrics bus directory loading",
    "warpwatch_telemetry": "anomalies captures jobs records samples state",
    "warpwatch_detection": "detector runs",
    "warpwatch_detection.anomalies": "register tracked",
    "warpwatch_devices": "memory_groups processes processor_waits",
    "warpwatch_devices.nvml": "survey",
    "warpwatch_capturing": "participant remote_store",
    "warpwatch_daemon.cli": "anomalies capture config diagnose doctor page parsing replay runs "
    "shim status top_screen",
    "warpwatch_daemon": "api_client",
    "warpwatch_daemon.doctor": "check driver gpus host interconnect",
    "warpwatch_daemon.agent": "composition pipeline",
    "warpwatch_daemon.for_fleet": "api bus leases record_stream",
    "warpwatch_daemon.history": "archive context",
    "warpwatch_daemon.participants": "local_ranks stacks",
    "warpwatch_daemon.ranks": "claims counts folder inbox pods quotas rank rank_processes source "
    "table",
    "warpwatch_daemon.state": "hub",
}
# Modules whose names others have, too.
OTHERS = {
    "agent_api": "for_fleet.api", "anomalies_of": "cli.anomalies", "app": "agent.app",
    "cli_config": "cli.config", "cli_daemon": "cli.daemon", "cli_demo": "cli.demo",
    "cli_main": "cli", "cli_top": "cli.top", "runs_of": "history.runs", "settings": "config",
}  # fmt: skip


def asked(sent: list[Any], number: int, silent_s: float = 0.0, **about: Any) -> AskedRank:
    rank = {"rank": number, "status": "running", "is_idle": False, "recent": (0.1,), "begun": 5}
    rank |= {"claims": Claims(), "process": Fake(silence=Fake(duration_s=lambda at: silent_s))}
    commands = Fake(send=lambda *given: sent.append(given))
    folder: Any = Fake(commands=commands, inbox_remedy="mount it", inbox=Directory(Path.cwd()))
    found: Any = Fake(**{**rank, **about})
    return AskedRank(found, f"job-r{number}-01.ring", os.getuid(), folder)


def capture_of(kind: Any, ranks: Mapping[int, Any], *calls: tuple[Any, ...]) -> list[object]:
    """Return what each call returns, the ranks where it changed them, and commands it sent."""
    sent: list[Any] = []
    request = CaptureRequest("job", kind, "manual", steps=3, owner="u", run="r")
    targets = {n: asked(sent, n, **about) for n, about in ranks.items() if about is not None}
    begun: Any = attrgetter("begun")
    one = LocalRanks(ranks, targets, request, 60.0, begun, lambda: 0.0)
    found, before = list[object](), ""
    for call in calls:
        found += [one for one in expressions.play(one, call) if one is not None]
        states = (filter(None, (rank.state, rank.detail)) for rank in one.ranks.values())
        now = ", ".join(map(": ".join, states))
        found += [now] * (now != before) + sent
        before = now
        sent.clear()
    return found


def py_spy(script: str, timeout_s: float = 600.0) -> object:
    """Return the threads of process 7 as py-spy, which is this shell script, prints them."""
    program = Path("py-spy").absolute()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(program.with_name("python")))
        return stacks.run_py_spy(7, timeout_s)


def drained(deadline: float, *parts: bytes) -> object:
    """Return what is read of a pipe with one more part at each poll, and the polls' time-outs."""
    source, target = os.pipe()
    os.set_blocking(source, False)
    waits, left = list[float](), list(parts)

    def poll(wait_ms: float) -> bool:
        waits.append(wait_ms)
        return bool(left and os.write(target, left.pop(0)))

    with pytest.MonkeyPatch.context() as patch:
        polled = Fake(register=lambda *_: None, poll=poll)
        patch.setattr(stacks, "select", Fake(poll=lambda: polled, POLLIN=1))
        data = stacks._drain(source, deadline, partial(next, itertools.count(0.0, 0.25)))
    os.close(source)
    os.close(target)
    return data, waits


def patched(module: Any, work: Callable[[], object], **names: object) -> object:
    """Return the result of ``work`` while the module has these names."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(module, name, value)
        return work()


def tree(name: str, **files: str) -> Path:
    """Make a folder with these files; ``__`` in their names stands for a slash."""
    root = Path(name)
    for path, text in files.items():
        file = root / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


HELPERS = (capture_of, drained, patched, py_spy, reading, surveyed, tree, ManualClock)


def test_functions_return_the_golden_values(cases: Cases) -> None:
    here = node_in_trouble()
    known: dict[str, Any] = {"anomaly": STRAGGLER, "capture": CAPTURE, "request": CAPTURE.request}
    known |= {"state": here, "rank": here.ranks[0], "job": here.jobs[0], "gpu": here.devices[0]}
    known = {f"a_{name}": partial(replace, part) for name, part in known.items()}
    of_job: dict[str, Any] = {"job": "job", "owner": "u", "run": "r"}
    known |= {"event": partial(RankEvent, 5.0, **of_job), "end": partial(End, 5.0, **of_job)}
    known["a_run"] = partial(RunSummary, "uid/1000", "llama", time=NOW, first_time=NOW - 3600)
    known |= {one.__name__: one for one in HELPERS}
    known |= {"NOW": NOW, "here": here}
    for name, module in OTHERS.items():
        known[name] = importlib.import_module(f"warpwatch_daemon.{module}".rstrip("."))
    expressions.check(cases, "daemon/functions.txt", MODULES, known)
