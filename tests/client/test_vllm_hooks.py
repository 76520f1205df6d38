"""The hooks of vLLM on a stand-in that has the names which they use, as in vLLM 0.32."""

from typing import Any

import pytest

from tests.cases import cases
from tests.client.servers.ends import BOOTSTRAP, WAITS, ended
from tests.client.servers.engine_config import config
from warpwatch.hooks import vllm
from warpwatch.hooks.serving import ServerProcess

CASES = cases(__file__)

BEGINS = """
import os, sys
from engine_config import config
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
"""
ENGINE = f"""{BEGINS}
from types import SimpleNamespace
from vllm.v1.engine.llm_engine import LLMEngine
engine = LLMEngine(config(), log_stats=False)
{WAITS}
engine.step()
engine.add("a", 20, 3)
engine.add("b", 10, 2)
engine.scheduler.preempted = {{"b"}}
for _ in range(4):
    engine.step()
engine.add("c", 5, 1)
engine.scheduler.requests["c"].events.append(SimpleNamespace(timestamp=1e9))
engine.step()
"""
WORKER = f"""{BEGINS}
from types import SimpleNamespace
from vllm.config.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import CPUWorker
worker = CPUWorker(config(tensor_parallel_size=2, world_size=2), 1, 1)
{WAITS}
scheduler = Scheduler(None)
scheduler.add("a", 20, 3, 0.0)
for _ in range(3):
    output = scheduler.schedule()
    worker.execute_model(output)
    worker.sample_tokens(None)
    scheduler.update_from_output(output, None)
failing = scheduler.schedule()
scheduler.add("a", 20, 3, 0.0)
failing = scheduler.schedule()
failing.fails = True
try:
    worker.execute_model(failing)
except ValueError as error:
    print(error, flush=True)
# It ends no iteration, since that of the failed pass is dropped.
worker.sample_tokens(None)
"""
FRONT_END = f"""{BEGINS}
from types import SimpleNamespace
from vllm.v1.engine.async_llm import AsyncLLM
said = config(world_size=2, distributed_executor_backend="mp")
front_end = AsyncLLM(said, sys.argv[1] == "1", client_index=1)
if front_end.logger_manager:
    times = {{"time_to_first_tokens_iter": [0.05], "inter_token_latencies_iter": [0.008] * 3}}
    stats = SimpleNamespace(**times)
    front_end.logger_manager.record(None, stats, engine_idx=0)
    front_end.logger_manager.record(None, None)
"""


def test_an_engine_in_one_process_reports_its_iterations_and_counts(folder):
    ring = ended(folder, ENGINE)
    said = ring.metadata
    about = {"job": "tiny", "run": "start1", "kind": "serve", "role": "rank"}
    assert said.items() >= about.items()
    assert (said["rank"], said["world_size"], said["server"]) == (0, 1, "vllm 0.32.0")
    assert (
        said["note"]
        == "no latencies and prefix hits: vLLM's statistics are off (--disable-log-stats)"
    )
    # Steps without tokens, before the requests and after them, do not count.
    assert ring.works == [(30, 30, 0, 30), (2, 0, 2, 32), (1, 0, 1, 22), (5, 5, 0, 5)]
    assert sorted(said["phases"]) == ["forward", "sample", "schedule"]
    # Statistics are those of four steps.
    counts = [sum(column) for column in zip(*ring.seconds, strict=True)]
    assert counts[5:10] == [1, 12, 20, 35, 6]
    queued = [(bucket, number) for latency, bucket, number in ring.latencies if latency == 2]
    # The last one has vLLM's own time at which it came into the queue.
    assert sorted(queued) == [(0, 1), (67, 2)]
    assert (ring.header.ended, ring.event_names(), said["faults"]) == (True, ["exit"], 0)


def test_a_worker_has_its_place_and_leaves_tokens_to_the_first_of_its_group(folder):
    ring = ended(folder, WORKER, lines=1)
    said = ring.metadata
    assert (said["rank"], said["world_size"], said["role"]) == (1, 2, "rank")
    assert said["parallel"] == {"tensor": [1, 2]}
    assert ring.works == [(0, 20, 0, 20), (0, 0, 1, 21), (0, 0, 1, 22)]
    assert said["phases"] == ["forward", "sample", "wait"]
    assert said["faults"] == 0


@pytest.mark.parametrize(("statistics", "noted"), [("1", False), ("0", True)])
def test_a_front_end_reports_latencies_if_the_server_measures_them(folder, statistics, noted):
    ring = ended(folder, FRONT_END, statistics)
    said = ring.metadata
    assert (said["rank"], said["world_size"], said["role"]) == (4, 5, "frontend")
    assert ("note" in said) == noted
    measured = [(latency, number) for latency, _, number in ring.latencies]
    assert measured == ([] if noted else [(0, 1), (1, 3)])


@pytest.mark.parametrize(("status", "reported"), [("None", True), ("0", True), ("-9", False)])
def test_an_orderly_end_of_the_engines_is_reported_before_they_are_killed(folder, status, reported):
    engines = (
        f"from vllm.v1.engine.utils import CoreEngineProcManager\n"
        f"{WAITS}\nCoreEngineProcManager([{status}]).shutdown()\n"
    )
    ring = ended(folder, FRONT_END + engines, "1")
    assert ("shutdown" in ring.event_names()) == reported


def test_plugins_that_are_left_out_are_named_in_the_status(folder):
    code = FRONT_END.replace("load_general_plugins()\n", "", 1)
    code = code.replace(
        "import os, sys\n", "import os, sys, warpwatch.hooks as hooks\nhooks.install()\n"
    )
    said = ended(folder, code, "1", VLLM_PLUGINS="other").metadata
    assert (
        said["note"] == "VLLM_PLUGINS leaves warpwatch out: add it to see iterations and latencies"
    )


@pytest.mark.parametrize(
    "change", ["del gpu_worker.Worker.sample_tokens", "del loggers.StatLoggerManager.record"]
)
def test_a_version_that_does_not_fit_is_left_alone_and_named_in_the_status(folder, change):
    missing = change.removeprefix("del ").partition(".")[2]
    changed = (
        f"from vllm.v1.worker import gpu_worker\nfrom vllm.v1.metrics import loggers\n{change}\n"
    )
    code = FRONT_END.replace("front_end.logger_manager:", "False:")
    said = ended(
        folder, code.replace("load_general_plugins\n", f"load_general_plugins\n{changed}", 1), "1"
    ).metadata
    assert said["note"] == f"hook does not fit: no {missing}"


@pytest.mark.parametrize(
    ("parallel", "rank", "worker", "scheduler", "front_end"), CASES["places"].values()
)
def test_each_process_of_an_engine_has_a_number(parallel, rank, worker, scheduler, front_end):
    said: Any = config(**parallel)
    place = vllm.worker_place(said, rank, 0)
    assert [place["rank"], place["world_size"], place["parallel"]] == worker
    assert vllm.other_place(said)["rank"] == scheduler
    assert vllm.other_place(said, 0)["rank"] == front_end


def test_independent_engines_of_one_server_are_replicas():
    place = vllm.worker_place(config(data_parallel_index=2), 0, 0)
    assert (place["run"], place["engine"], place["rank"]) == ("start1", 2, 0)


def test_a_scheduler_whose_base_class_was_one_is_wrapped_once():
    names = ("schedule", "update_from_output", "has_unfinished_requests")
    base: Any = type("Base", (), dict.fromkeys(names, lambda self: None))
    derived: Any = type("Derived", (base,), {})
    for kind in (base, derived, base):
        vllm._hook_scheduler_class(kind)
        assert kind.schedule.__wrapped__ is kind.has_unfinished_requests


def test_the_entry_points_are_found_only_in_the_folder_of_run():
    names = (BOOTSTRAP / "warpwatch_hooks-0.dist-info/entry_points.txt").read_text()
    assert "warpwatch = warpwatch.hooks.vllm:install" in names


@pytest.mark.parametrize(("environ", "starts"), CASES["starts"].values(), ids=CASES["starts"])
def test_the_hooks_of_a_server_start_once_unless_they_are_off(monkeypatch, environ, starts):
    for name in ("WARPWATCH", "WARPWATCH_HOOKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    process = ServerProcess()
    assert [process.starts("vllm"), process.starts("vllm")] == starts
