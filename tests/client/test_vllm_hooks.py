"""The parts of vLLM's hooks that need no server: places, work, and when they start."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import cases
from tests.client.servers.engine_config import config
from warpwatch import faults
from warpwatch.hooks import vllm
from warpwatch.hooks.serving import ServerProcess
from warpwatch.iterations import IterationClock
from warpwatch.monitor import Monitor, Phase

CASES = cases(__file__)


@pytest.mark.parametrize(
    ("parallel", "rank", "worker", "scheduler", "front_end"), CASES["places"].values()
)
def test_each_process_of_an_engine_has_a_number(parallel, rank, worker, scheduler, front_end):
    said: Any = config(**parallel)
    place = vllm.worker_place(said, rank, 0)
    assert [place["rank"], place["world_size"], place["parallel"]] == worker
    assert vllm.other_place(said)["rank"] == scheduler
    assert vllm.other_place(said, 0)["rank"] == front_end


def test_a_pass_has_drafts_and_tokens_of_before_and_a_scheduler_two_queues():
    cached = SimpleNamespace(num_output_tokens=[3, 0, 1], num_computed_tokens=[10, 20, 30])
    output = SimpleNamespace(
        scheduled_cached_reqs=cached,
        total_num_scheduled_tokens=40,
        scheduled_spec_decode_tokens={"a": [1, 2], "b": [3]},
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=16)],
    )
    # Two decode, with three drafts; the second is computed again.
    assert vllm.work_of(output) == (40 - 5, 2, 60 + 40 + 16, 40)
    scheduler = SimpleNamespace(get_request_counts=lambda: (3, 1), get_kv_cache_usage=lambda: 0.5)
    assert vllm._sample(scheduler) == (3, 1, 0.5)


def test_a_hook_that_fails_costs_its_phase_alone_and_a_call_that_fails_its_iteration():
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    process, before = ServerProcess(), faults.count()
    process.clock = clock = IterationClock()
    process.monitor = Monitor(clock)
    process.lead()
    assert (clock.serving.exact, clock.waits, process.leads) == (True, False, True)
    process.begin(True)
    assert (clock.open, clock.after_idle, clock.tokens) == (True, True, 0)
    seen: list[Any] = []
    for first in (lambda _: False, fail, lambda _: None):
        call = process.around(
            abs, before=first, phase=f"part_{len(seen)}", after=lambda *all_: seen.append(all_)
        )
        assert call(-3) == 3
    assert process.around(abs, after=fail)(-3) == 3
    assert (clock.phase_names, faults.count() - before) == (["part_2"], 2)
    assert seen == [(3, -3)] * 3
    with pytest.raises(ZeroDivisionError):
        process.around(fail)()
    assert not clock.open
    clock.capturing = True
    assert not isinstance(process.phase("forward"), Phase)
    process.begin(False)
    process.rest()
    assert not clock.open


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


@pytest.mark.parametrize(("environ", "starts"), CASES["starts"].values(), ids=CASES["starts"])
def test_the_hooks_of_a_server_start_once_unless_they_are_off(monkeypatch, environ, starts):
    for name in ("WARPWATCH", "WARPWATCH_HOOKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    process = ServerProcess()
    assert [process.starts("vllm"), process.starts("vllm")] == starts
