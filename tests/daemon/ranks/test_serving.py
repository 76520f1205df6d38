"""The processes of an inference server, from their rings to records, states and series."""

from typing import Any

import pytest

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import A, RankNode
from warpwatch.protocol import ABSENT, LATENCY_BOUNDS_S, RECORD_SERVE
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry import state as serving
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Record, Serve, Step
from warpwatch_telemetry.samples import Pod
from warpwatch_telemetry.state import State

S = 1_000_000_000
SAID: dict[str, Any] = {"job": "chat", "kind": "serve", "run": "r-1", "world_size": 2}
PHASES = ["forward", "comm"]


def served(node: RankNode, rank: int = 0, **said: Any) -> RingFile:
    return node.ring(None, **{**SAID, "rank": rank, "phases": PHASES, **said})


def of(kind: type[Record], records: list[Record]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def exposition(node: RankNode, fine: bool = False) -> list[str]:
    state = State(0.0, "0", "node", ranks=tuple(node.states()))
    return render(state, Options(profile="full" if fine else "default")).decode().splitlines()


def test_shim_and_agent_have_the_same_buckets():
    assert LATENCY_BOUNDS_S == serving.LATENCY_BOUNDS_S


def test_an_iteration_is_a_step_with_its_work(node):
    ring = served(node)
    for duration_s, *work in ((0.008, 0, 4, 900), (0.04, 512, 0, 512), (0.05, 64, 3, 700)):
        ring.iteration(duration_s, *work)
    steps = of(Step, node.poll())
    assert [
        (s.work_class, s.prefill_tokens, s.decode_requests, s.kv_tokens, s.tokens) for s in steps
    ] == [("decode", 0, 4, 900, 4), ("prefill", 512, 0, 512, 512), ("mixed", 64, 3, 700, 67)]
    assert (steps[0].duration_s, steps[0].phases_s) == (0.008, {"comm": 0.002})


def test_a_second_has_counts_buckets_and_the_iterations_before_it(node):
    ring = served(node)
    ring.iteration(0.008, 0, 4, 900)
    ring.iteration(0.004, 0, 4, 904)
    ring.second(continues=True, buckets=[(0, 3, 1), (2, 67, 9), (7, 1, 1)])
    ring.second(
        *(S, S // 4, 4, 2, S // 2, 1, 30, 50, 512, 8, S // 10, S // 5, 3 * S),
        buckets=[(0, 3, 2), (1, 20, 8)],
    )
    ring.iteration(0.04, 512, 0, 512)
    ring.record(RECORD_SERVE, b"short")
    (second,) = of(Serve, node.poll())
    assert (second.interval_s, second.idle_s, second.running, second.waiting) == (1.0, 0.25, 4, 2)
    assert (second.kv_usage, second.preemptions) == (0.5, 1)
    assert (second.prefix_hit_tokens, second.prefix_query_tokens) == (30, 50)
    assert (second.prompt_tokens, second.generated_tokens) == (512, 8)
    assert (second.first_token, second.inter_token, second.queue) == ({3: 3}, {20: 8}, {67: 9})
    assert (second.first_token_s, second.inter_token_s, second.queue_s) == (0.1, 0.2, 3.0)
    assert second.iterations == {"decode": (2, 0.012)}
    assert second.comm_s == 0.003
    # The newest parts of a record without an end count.
    for _ in range(25):
        ring.second(continues=True, buckets=[(0, 4, 1)])
    ring.second(S, 2 * S, 0, 0, ABSENT, 0, 0, 0, 0, 0, 1 << 62)
    (second,) = of(Serve, node.poll())
    assert (second.kv_usage, second.idle_s, second.first_token_s) == (None, 1.0, 0.0)
    assert second.first_token == {4: 20}
    assert second.iterations == {"prefill": (1, 0.04)}
    assert node.newest().serve.idle is True
    # A successor does not go on with what another process had not finished.
    ring.iteration(0.04, 512, 0, 512)
    ring.second(continues=True, buckets=[(0, 4, 1)])
    node.poll()
    ring.die()
    node.poll(1.0, 5.0)
    assert node.newest(5.5).serve.running is None
    ring = served(node)
    ring.second(S, 0, 4)
    (second,) = of(Serve, node.poll(6.0))
    assert (second.first_token, second.iterations, second.comm_s) == ({}, {}, 0.0)


def test_only_workers_have_steps_and_a_front_end_knows_no_requests(node):
    served(node, 0)
    scheduler, front = (
        served(node, 2, role="scheduler", world_size=3),
        served(node, 3, role="frontend", world_size=4),
    )
    scheduler.iteration(0.008, 0, 4, 900)
    scheduler.second(S, 0, 4, 0, S // 2)
    front.second(S, 0, ABSENT, ABSENT, ABSENT, buckets=[(0, 3, 1)])
    records = node.poll()
    assert of(Step, records) == []
    seen = {one.rank: (one.kind, one.role, one.replica) for one in of(RankSeen, records)}
    assert seen == {
        0: ("serve", "rank", "a5fa77"), 2: ("serve", "scheduler", "a5fa77"),
        3: ("serve", "frontend", "a5fa77"),
    }  # fmt: skip
    known = {state.rank: state.serve for state in node.states()}
    assert (known[2].running, known[2].kv_usage, known[2].role) == (4, 0.5, "scheduler")
    assert (known[3].running, known[3].counts) == (None, {})
    assert list(known[3].latencies) == ["first_token"]
    assert node.rejects == {}
    # An engine without peers joins its scheduler, and who says that it ends is not waited for.
    served(node, 1, run="r-2", role="scheduler", job="alone")
    node.poll(1.0)
    served(node, 0, run="r-2", world_size=1, job="alone")
    front.end()
    (end,) = of(End, node.poll(2.0))
    assert (end.rank, len({s.run for s in node.states()})) == (3, 2)


@pytest.mark.parametrize("known_pods", [lambda: {A: Pod("ns", "chat-abc")}])
def test_live_replicas_of_a_server_keep_one_name(node):
    served(node)
    second = served(node, run="r-2")
    node.ring(A, **SAID)
    node.ring(A, **SAID | {"run": "r-1-dp1"})
    node.poll()
    assert {(s.job, s.run, s.serve.replica) for s in node.states()} == {
        ("chat", "r-1-dp1", "chat-abc-dp1"), ("chat", "r-1", "a5fa77"), ("chat", "r-2", "211fc1"),
        ("chat", "r-1", "chat-abc"),
    }  # fmt: skip
    # One that ended stays when another begins.
    second.end()
    node.poll()
    served(node, run="r-3")
    node.poll()
    assert "r-2" in {state.run for state in node.states()}
    # A training of the same name is another job.
    node.ring(None, job="chat")
    node.poll()
    assert sum(state.job.startswith("chat#") for state in node.states()) == 1


@pytest.mark.parametrize("shutdown", [True, False, None])
def test_processes_that_their_front_end_has_ended_have_not_crashed(node, shutdown):
    worker, scheduler = served(node, 0), served(node, 2, role="scheduler", world_size=3)
    front = served(node, 3, role="frontend", world_size=4)
    node.poll()
    if shutdown is None:
        # The front end was started again.
        front.event("shutdown")
        node.poll()
        front.die()
        front = served(node, 3, role="frontend", world_size=4)
        node.poll()
    for ring in (worker, scheduler):
        ring.die()
    records = [] if shutdown else node.poll(1.0)
    assert not [one for one in records if isinstance(one, End) or ended(one)]
    if shutdown:
        front.event("shutdown")
    ends = [type(one) for one in node.poll(1.5, 5.0) if isinstance(one, End) or ended(one)]
    assert ends == [End if shutdown else RankEvent] * 2


def ended(record: Record) -> bool:
    return isinstance(record, RankEvent) and record.event == "died"


def test_the_series_of_a_server_continue_over_a_restart_of_the_daemon(node, golden_case):
    ring = served(node, parallel={"tensor": [0, 2]})
    for rank, kind in ((1, "tensor"), (2, "pipeline")):
        served(node, rank, world_size=3, parallel={kind: [1, 2]}).iteration(0.008, 0, 4, 900)
    ring.iteration(0.008, 0, 4, 900)
    words = (S, S // 4, 4, 2, S // 2, 1, 30, 50, 512, 8, S // 10, S // 5, S // 2)
    ring.second(*words, buckets=[(0, 3, 2), (1, 3, 1), (2, 3, 1)])
    node.poll()
    node.restart()
    ring.iteration(0.008, 0, 4, 900)
    ring.second(*words, buckets=[(0, 3, 2), (1, 3, 1), (2, 3, 1)])
    node.poll()
    lines = exposition(node)
    golden_case("".join(f"{line}\n" for line in lines if line.startswith("warpwatch_serve")))
    # No series says that iterations are steps.
    assert not [line for line in lines if line.startswith(("warpwatch_step", "warpwatch_tokens"))]
    assert sum("first_token_seconds_bucket" in line for line in exposition(node, fine=True)) == 68


def test_a_fleet_gets_a_servers_seconds_and_no_iterations(node):
    ring = served(node)
    ring.iteration(0.008, 0, 4, 900)
    ring.second(S, 0, 4, 0, ABSENT)
    stream = RecordStream()
    stream.portion(None)
    stream.put(record for record in node.poll() if not isinstance(record, RankEvent))
    lines = stream.portion(None).text().decode()
    assert '"type":"serve"' in lines
    assert '"type":"step"' not in lines
