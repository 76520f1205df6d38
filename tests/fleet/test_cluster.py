"""Jobs over nodes: which runs are one, in which order, and who may say what."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.cases import cases
from tests.fleet.nodes import NOW, OWNER, TestCluster, TestNode, end, seen, step
from tests.manual_clock import ManualClock
from warpwatch._version import __version__
from warpwatch_capturing.regular import RegularJob
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_fleet.agent_link import AgentError
from warpwatch_fleet.captures.requests import Schedule
from warpwatch_fleet.config import FleetFile, ScheduleConfig
from warpwatch_fleet.jobs import ident_of
from warpwatch_fleet.memory import JobStateStore
from warpwatch_fleet.source import HttpSource
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.records import DeviceReading, RankEvent, Serve
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

STEP_S = 0.5


@pytest.fixture
def two() -> TestCluster:
    cluster = TestCluster(TestNode("gpu-1"), TestNode("gpu-2"))
    begin(cluster)
    return cluster


def begin(cluster: TestCluster, **about: Any) -> None:
    for number, node in enumerate(cluster.nodes):
        node.say(*(seen(2 * number + rank, **about) for rank in range(2)))
    cluster.hear()


def test_replicas_of_a_server_on_two_nodes_are_jobs_of_one_name():
    cluster = TestCluster(TestNode("gpu-1"), TestNode("gpu-2"))
    for number, node in enumerate(cluster.nodes):
        run = f"pod-{number}"
        about: dict[str, Any] = {"kind": "serve", "replica": f"chat-{number}", "run": run}
        node.say(seen(0, 1, "chat", **about), seen(1, 2, "chat", role="scheduler", **about))
        # The second server does not report its KV cache.
        used: dict[str, Any] = {"owner": OWNER, "run": run, "kv_usage": None if number else 0.5}
        node.say(Serve(NOW, "chat", 0, owner=OWNER, run=run))
        for running in (3, 0) if number else (0,):
            node.say(Serve(NOW, "chat", 1, running=running, waiting=running, **used))
    cluster.hear()
    cluster.now += 5
    cluster.hear()
    found = ((job.state(), job) for job in cluster.cluster.jobs.values())
    states = {(state.kind, state.replica): job for state, job in found}
    assert set(states) == {("serve", "chat-0"), ("serve", "chat-1")}
    first = states["serve", "chat-0"]
    assert first.world_size == 2
    rule = ScheduleConfig(job="ch*", every=3600, kind="memory", steps=4)
    by_hand = Capture("1", CaptureRequest("chat", "torch", "manual"), NOW + 3000)
    due: Any = Schedule((rule,), cluster.cluster).due(RegularJob(first.id, ()), (by_hand,), 9e9)
    assert [due.kind, due.ranks, due.steps, due.reason[-5:]] == ["memory", (0,), 4, ": ch*"]
    served = [one.serve for job in states.values() for one in job.ranks({}, 0.0)]
    assert [(one.role, one.running, one.kv_usage) for one in served] == [
        ("rank", None, None),
        ("scheduler", 0, 0.5),
        ("rank", None, None),
        ("scheduler", 0, None),
    ]


def train(cluster: TestCluster, steps: int, slow: float = 1.0, late: int | None = 3) -> None:
    """Steps of all ranks; one computes ``slow`` times as long, and the others wait for it.

    ``late`` None: all communicate longer.
    """
    noise = random.Random(len(cluster.job().members[0].recent))
    for _ in range(steps):
        cluster.steps += 1
        number = cluster.steps
        cluster.now += STEP_S * slow
        for rank in range(4):
            node = cluster.nodes[rank // 2]
            phases = {"comm": STEP_S * (slow - 1) * (rank != late) + 0.05}
            took_s = STEP_S * slow + noise.gauss(0.0, 0.002)
            node.say(step(rank, number, cluster.now + node.ahead_s, took_s, phases_s=phases))
        if number % 5 == 0:
            cluster.hear()
    cluster.hear()


def become_slow(cluster: TestCluster, **how: Any) -> None:
    train(cluster, 300)
    assert cluster.anomalies() == []
    train(cluster, **{"steps": 60, "slow": 1.4} | how)


def found_by_agent(kind: str, **about: Any) -> Anomaly:
    known: dict[str, Any] = {"time": NOW, "severity": "warning", "summary": "!", "id": "1"}
    return Anomaly(kind=kind, **known | about)


def test_what_an_anomaly_of_the_fleet_does_and_what_speaks_for_it_name_nodes(two):
    evidence, effects = ("rank 3 had to page",), ("comm_slow: all wait", "rank 1 waits for rank 3")
    summary = "; ".join(("rank 3 is slow", *evidence, *effects))
    found = found_by_agent("straggler", summary=summary, rank=3, evidence=evidence, effects=effects)
    placed = two.job().located(found, two.cluster.names(), {})
    assert placed.evidence == ("rank 3 had to page (on gpu-2)",)
    assert placed.effects == ("comm_slow: all wait", "rank 1 waits for rank 3 (on gpu-1)")
    assert placed.summary == (
        "rank 3 is slow; rank 3 had to page (on gpu-2); comm_slow: all wait; "
        "rank 1 waits for rank 3 (on gpu-1)"
    )


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0])
def test_a_straggler_is_named_once_with_its_node_whatever_its_clock(ahead_s):
    cluster = TestCluster(TestNode("gpu-1"), TestNode("gpu-2", ahead_s=ahead_s))
    begin(cluster)
    become_slow(cluster)
    (found,) = cluster.anomalies()
    about = (found.kind, found.rank, found.node, found.judged_by)
    assert about == ("straggler", 3, "gpu-2", "fleet")
    assert cluster.now - 60 < found.time <= cluster.now
    assert cluster.cluster.nodes["gpu-2:9400"].skew_s == pytest.approx(-ahead_s, abs=1)
    # An agent that goes on with it while no fleet is there.
    cluster.nodes[1].stream.put_anomaly(replace(found, judged_by="agent"))
    cluster.hear()
    assert [one.id for one in cluster.anomalies()] == [found.id]
    assert cluster.job().raised() == {"straggler": found.id}


def serve(cluster: TestCluster, seconds: int, slow: float = 1.0) -> None:
    """Let an engine of two nodes serve: each agent sends one summary of its rank per second."""
    fields: dict[str, Any] = {"owner": OWNER, "run": "41"}
    for number in range(seconds):
        cluster.now += 1
        own_s = 0.08 * (1 + 0.02 * (number % 3))
        for rank, node in enumerate(cluster.nodes):
            # The first waits for the second.
            comm_s = 0.01 if rank else 0.01 + own_s * (slow - 1)
            iterations: Any = {"decode": (10, 10 * (own_s * slow + 0.01))}
            at = cluster.now + node.ahead_s
            second = Serve(at, "chat", rank, iterations=iterations, running=8, **fields)
            node.say(msgspec.structs.replace(second, comm_s=10 * comm_s))
        cluster.hear()


def test_a_slow_rank_of_an_engine_over_two_nodes_is_named_with_its_node():
    cluster = TestCluster(TestNode("gpu-1"), TestNode("gpu-2", ahead_s=3.0))
    for rank, node in enumerate(cluster.nodes):
        node.say(seen(rank, 2, "chat", kind="serve", parallel={"tensor": (rank, 2)}))
    cluster.hear()
    serve(cluster, 400)
    assert cluster.anomalies() == []
    serve(cluster, 60, slow=1.4)
    # The iterations of all ranks take longer at first, which the straggler then explains.
    slower, found = cluster.anomalies()
    assert (slower.kind, slower.end_time) == ("step_regression", found.time)
    assert cluster.job().raised() == {"straggler": found.id}
    about = (found.kind, found.rank, found.node, found.judged_by)
    assert about == ("straggler", 1, "gpu-2", "fleet")
    assert found.summary.startswith("rank 1 computes 4")
    assert [*cluster.cluster.raised.values()] == [{"straggler": 1, "step_regression": 1}]


def test_a_node_that_is_away_is_no_hang_and_time_stands_still_for_its_jobs(two):
    train(two, 300)
    first, _ = two.nodes
    for _ in range(600):
        two.now += 1.0
        two.hear(first)
    assert two.anomalies() == []
    assert not two.cluster.is_whole(two.job(), two.now)
    two.hear()
    train(two, 50)
    assert two.anomalies() == []
    assert two.cluster.is_whole(two.job(), two.now + 10.0)
    assert not two.cluster.is_whole(two.job(), two.now + 10.1)
    two.cluster.nodes[first.address].up = False
    assert not two.cluster.is_whole(two.job(), two.now)
    # The ten minutes are its longest step: a hang is longer.
    for _ in range(700):
        two.now += 1.0
        two.hear()
    assert two.raised() == ["hang"]


def test_agents_hear_every_20_s_that_the_fleet_judges_and_at_once_what_it_raises(two):
    train(two, 300)
    (job,) = two.cluster.jobs

    def due(changed: Any = ()) -> list[tuple[str, dict[str, str]]]:
        leases = two.cluster.leases_due(two.now, changed)
        assert all(known == job for _, known, _ in leases)
        return [(target.address, raised) for target, _, raised in leases]

    both: list[tuple[str, dict[str, str]]] = [(node.address, {}) for node in two.nodes]
    assert (due(), due()) == (both, [])
    two.now += 19.9
    two.hear()
    assert due() == []
    two.now += 0.1
    two.hear()
    assert due() == both
    train(two, 60, slow=1.4)
    (found,) = two.anomalies()
    raised = [(node.address, {"straggler": found.id}) for node in two.nodes]
    two.cluster.leases_due(two.now, ())
    assert (due(), due({job})) == ([], raised)


def test_ranks_that_died_before_the_fleet_started_lived_on_in_no_crash():
    cluster = TestCluster(TestNode("gpu-1"), TestNode("gpu-2"))
    for number, node in enumerate(cluster.nodes):
        ranks = 2 * number, 2 * number + 1
        died = (RankEvent(NOW + 1, "llama", rank, "died", owner=OWNER, run="41") for rank in ranks)
        node.say(*map(seen, ranks), *died)
    for _ in range(3):
        cluster.now += 60
        cluster.hear()
    (found,) = cluster.anomalies()
    assert (found.kind, found.severity) == ("crash", "info")


@pytest.mark.parametrize("is_rebooted", [False, True])
def test_the_end_on_each_node_is_the_end_of_the_job_which_is_kept_ten_minutes(two, is_rebooted):
    train(two, 300)
    first, second = two.nodes
    second.say(end(2, two.now), end(3, two.now))
    if is_rebooted:
        first.stream = RecordStream()
        for after_s in (300.0, 29.5):
            two.now += after_s
            two.hear()
            assert two.job().live_ranks().keys() == {0, 1}
        two.now += 0.5
        first.say(seen(0))
        two.hear()
        assert two.job().live_ranks().keys() == {0}
        first.say(end(0, two.now))
    else:
        first.say(end(0, two.now), end(1, two.now))
    two.hear()
    assert (two.job().live_nodes(), two.job().live_ranks()) == (set(), {})
    two.now += 600
    two.hear()
    ended = two.job()
    two.now += 1
    two.hear()
    assert (two.raised(), two.cluster.jobs, two.cluster.forgotten) == ([], {}, [ended.id])
    assert not any(node._ranks for node in two.cluster.nodes.values())


def test_steps_whose_records_the_agent_could_not_read_are_counted(two):
    def say(**totals: Any) -> None:
        about: dict[str, Any] = {"owner": OWNER, "run": "41"}
        two.nodes[0].say(RankEvent(two.now, "llama", 0, "records_lost", totals, **about))
        two.hear()

    train(two, 3)
    member = two.job().members[0]
    say(records=7, steps=10, samples=80, tokens=True)
    assert (member.steps, member.samples, member.tokens) == (10, 80, 0)
    # The first lines after a clock was set back come before the node's new time.
    two.nodes[0].ahead_s = -3600.0
    train(two, 2)
    # A repeated total, and totals that no ring has.
    say(records=1, steps=10, samples=-1, tokens="all")
    say(records=1, steps=1e300)
    phases = {f"phase{number}": 0.1 for number in range(20)}
    two.nodes[1].say(step(2, 6, two.now, phases_s=phases))
    two.hear()
    assert len(two.job().members[2].phases_s) == 16
    assert (member.steps, member.samples, member.tokens) == (12, 80, 0)


def test_a_second_process_of_a_rank_is_counted_until_the_first_has_ended(two):
    two.nodes[0].say(seen(3))
    two.hear()
    assert two.job().members[3].node == "gpu-2:9400"
    assert two.cluster.count_refused() == {"second_process": 1}
    assert len(two.cluster.nodes["gpu-1:9400"]._ranks) == 2
    two.nodes[1].say(end(3, two.now))
    two.hear()
    two.nodes[0].say(seen(3))
    two.hear()
    assert two.job().members[3].node == "gpu-1:9400"
    two.job().feed = lambda *_: 1 / 0
    two.nodes[0].say(step(0, 1, two.now), seen(0, 1, "other"))
    two.hear()
    assert (two.cluster.count_refused()["error"], len(two.cluster.jobs)) == (1, 2)


@pytest.mark.parametrize(("is_removed", "master"), [(True, ""), (False, "gpu-1:29500")])
def test_ranks_go_on_under_the_new_address_of_their_agent(is_removed, master):
    cluster = TestCluster(TestNode("gpu-1"), TestNode("gpu-2"))
    begin(cluster, master=master)
    train(cluster, 300)
    first, second = cluster.nodes
    cluster.nodes = TestNode("gpu-1", address="gpu-9:9400"), second
    cluster.cluster.nodes[first.address].up = False
    # The other one leaves the targets for a moment, and is then read again from its first line.
    cluster.cluster.set_targets({first.address: Target(first.address, {})})
    second.cursor = None
    followed = cluster.nodes if is_removed else (first, *cluster.nodes)
    cluster.cluster.set_targets({one.address: Target(one.address, {}) for one in followed})
    cluster.nodes[0].say(seen(0, master=master), seen(1, master=master))
    train(cluster, 60, slow=1.4)
    assert cluster.raised() == ["straggler"]
    assert cluster.job().nodes.keys() == {"gpu-9:9400", "gpu-2:9400"}
    assert [cluster.job().members[rank].steps for rank in (0, 2)] == [360, 360]


def test_a_name_belongs_to_the_first_agent_that_has_it_until_it_is_away():
    first, second = TestNode("gpu-1"), TestNode("gpu-1", address="gpu-9:9400")
    cluster = TestCluster(first, second).cluster
    one, other = cluster.nodes.values()
    other.begin()
    second.say(seen(0))
    cluster.feed("gpu-1:9400", first.lines(NOW), NOW)
    one.up = True
    with pytest.raises(AgentError, match="another agent says that it is on gpu-1"):
        cluster.feed("gpu-9:9400", second.lines(NOW), NOW)
    # Nothing of what it said before is believed.
    assert (cluster.jobs, other.name) == ({}, "gpu-9:9400")
    with pytest.raises(AgentError, match="now says that it is on 'gpu-2'"):
        cluster.feed("gpu-1:9400", [encode_stream_line(CursorLine("1-1", "gpu-2"))], NOW)
    one.up = False
    other.begin()
    cluster.feed("gpu-9:9400", second.lines(NOW), NOW)
    assert other.name == "gpu-1"
    # An agent that is an owner's now has no name of a node; its counts stay.
    one.refused["a"] = other.refused["b"] = 2
    cluster.set_targets({"gpu-9:9400": Target("gpu-9:9400", {"owner": "ns/x"})})
    assert (cluster.count_refused(), cluster.node_names.has("gpu-1")) == ({"a": 2, "b": 2}, False)


@pytest.mark.parametrize("forget", [False, True])
def test_a_restart_of_the_fleet_neither_repeats_nor_forgets_an_anomaly(two, tmp_path, forget):
    become_slow(two)
    (before,) = two.anomalies()
    two.save(tmp_path)
    # Events between the last save and the end are in the agents' lines.
    train(two, 40, slow=1.4)
    two.restart(tmp_path, forget=forget)
    if forget:
        two.now += 900
        for number, node in enumerate(two.nodes):
            node.say(seen(2 * number), seen(2 * number + 1))
    # Also before all ranks are there.
    two.hear(two.nodes[0])
    assert [one.id for one in two.anomalies()] == [before.id]
    two.hear()
    train(two, 60, slow=1.4)
    (after,) = two.anomalies()
    assert (two.raised(), after.id, after.end_time) == ([], before.id, None)
    train(two, 200)
    (over,) = two.anomalies()
    assert over.end_time is not None
    assert two.raised() == []
    # One that is over is known after another restart, too.
    two.save(tmp_path)
    two.restart(tmp_path)
    two.hear()
    assert (two.anomalies(), two.raised()) == ([over], [])
    for rank in range(4):
        two.nodes[rank // 2].say(end(rank, two.now))
    for after_s in (0, 601):
        two.now += after_s
        two.hear()
    begin(two)
    assert two.anomalies() == []


def test_a_restarted_fleet_judges_lines_that_come_before_those_of_another_node(two, tmp_path):
    train(two, 50)
    two.save(tmp_path)
    train(two, 500)
    two.restart(tmp_path)
    two.hear(two.nodes[0])
    two.hear()
    assert two.job().is_evaluated
    assert two.anomalies() == []


def test_a_restarted_fleet_awaits_all_ranks_of_a_job_for_half_a_minute(two, tmp_path):
    train(two, 30)
    two.save(tmp_path)
    two.restart(tmp_path, forget=True)
    two.nodes[0].say(seen(0), seen(1))
    two.nodes[1].say(seen(2))
    for after_s, is_resumed in ((0.0, False), (29.9, False), (0.2, True)):
        two.now += after_s
        two.hear()
        assert two.job().is_resumed == is_resumed == two.cluster.is_whole(two.job(), two.now)


def test_restarts_during_a_hang_do_not_delay_it(two, tmp_path):
    train(two, 300)
    stopped = two.now
    while not two.anomalies() and two.now < stopped + 200:
        two.now += 7.0
        two.hear()
        two.save(tmp_path)
        two.restart(tmp_path)
        two.hear()
    (found,) = two.anomalies()
    # As without a restart.
    assert (found.kind, found.time - stopped) == ("hang", 140.0)


def test_what_was_judged_is_kept_each_four_minutes_and_for_a_day(two, tmp_path):
    (job,) = two.cluster.jobs.values()
    job.detection.history.extend(found_by_agent("hang", id=str(n)) for n in range(101))
    assert [one.id for one in job.saved().history] == [str(n) for n in range(1, 101)]
    assert [saved.id for saved in two.cluster.to_save(NOW, ())] == [job.id]
    assert two.cluster.to_save(NOW + 240, ()) == []
    assert two.cluster.to_save(NOW + 241, ()) != []
    two.save(tmp_path)
    (path,) = tmp_path.glob("*.job")
    kept_at = path.stat().st_mtime
    for after_s, count in ((86_400, 1), (86_401, 0)):
        clock = ManualClock(wall=kept_at + after_s)
        assert len(JobStateStore(tmp_path, clock.wall).load()) == count
    two.save(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    assert JobStateStore(tmp_path).load() == {}
    JobStateStore(tmp_path).keep([], [job.id])
    assert list(tmp_path.iterdir()) == []
    folder, failed = tmp_path / "states", list[str]()
    store = JobStateStore(folder, fail=lambda: failed.append(store.complaint.text))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    names = job.id, job.id._replace(run="another on the second node")
    store.keep([msgspec.structs.replace(job.saved(), names=names)], ())
    said = "a restart begins from what agents keep: cannot keep what is known of llama: [Errno 2] "
    assert (failed, store.complaint.text[: len(said)]) == ([""], said)
    folder.mkdir()
    store.keep([msgspec.structs.replace(job.saved(), names=names)], ())
    assert (store.complaint.text, {*store.load()}) == ("", {*names})
    (file := folder / "file").touch()
    said = f"a restart begins from what agents keep: fleet.state_dir {file}/x: Not a directory"
    assert JobStateStore(file / "x").complaint.text == said


def test_what_changes_is_saved_at_once_by_a_source_over_http(tmp_path, monkeypatch):
    cluster = TestCluster(TestNode("gpu-1"), TestNode("gpu-2"))
    clock = SimpleNamespace(time=lambda: cluster.now, monotonic=lambda: cluster.now)
    monkeypatch.setattr("warpwatch_fleet.source.time", clock)
    folder, file, unsaved = tmp_path / "states", tmp_path / "targets", list[int]()
    own = {"state_dir": folder, "targets_files": [file]}
    config = FleetFile.model_validate({"fleet": own})
    source = HttpSource(config, "fleet-0", lambda: unsaved.append(1))
    cluster.cluster, targets = source.view, cluster.cluster.nodes
    cluster.cluster.set_targets({address: node.target for address, node in targets.items()})
    cluster.evaluate = lambda: asyncio.run(source.evaluate())
    begin(cluster)
    train(cluster, 300)
    while not cluster.raised():
        train(cluster, 5, slow=1.4)
    (saved,) = {one.id: one for one in JobStateStore(folder).load().values()}.values()
    assert [one.kind for one in saved.active] == ["straggler"]
    cluster.nodes[0].say(end(0, cluster.now), end(1, cluster.now))
    cluster.cluster.nodes["gpu-2:9400"].up = False
    assert source.evaluated() == {"0": True}
    for rank in (2, 3):
        cluster.nodes[1].say(step(rank, cluster.steps + 1, cluster.now))
    cluster.cluster.feed("gpu-2:9400", cluster.nodes[1].lines(cluster.now), cluster.now)
    monkeypatch.setattr("warpwatch_fleet.cluster.MAX_WAITING", 0)
    assert (asyncio.run(source.evaluate()), len(cluster.job().waiting)) == ([], 0)
    cluster.nodes[1].say(end(2, cluster.now), end(3, cluster.now))
    for after_s in (0, 601):
        cluster.now += after_s
        cluster.hear()
    assert (list(folder.iterdir()), cluster.cluster.forgotten) == ([], [])
    folder.rmdir()
    cluster.hear()
    begin(cluster)
    train(cluster, 5)
    source._targets.read()
    said = [one.partition(": ")[0] for one in source.missing]
    assert said == [str(file), "a restart begins from what agents keep"]
    for node in cluster.cluster.nodes.values():
        node.up = False
    assert (source.evaluated(), list(source.rounds)[1][1]) == ({"0": False}, source.links.renew)
    asyncio.run(source.close())
    assert source.links.client.is_closed and unsaved


def test_what_an_agent_raised_while_no_fleet_judged_stays_its_own(two):
    train(two, 300)
    job = {"owner": OWNER, "job": "llama", "run": "41"}
    own = found_by_agent("straggler", time=two.now, rank=3, **job)
    two.nodes[1].stream.put_anomaly(own)
    train(two, 60, slow=1.4)
    assert two.raised() == []
    assert [one.id for one in two.anomalies()] == ["1@gpu-2"]
    two.nodes[1].stream.put_anomaly(replace(own, end_time=two.now))
    train(two, 200)
    train(two, 60, slow=1.4)
    assert two.raised() == []


def test_a_fleet_without_its_state_opens_anew_what_an_agent_continues_of_it(two):
    train(two, 300)
    own = found_by_agent("straggler", time=two.now, rank=3, owner=OWNER, job="llama", run="41")
    two.nodes[1].stream.put_anomaly(replace(own, id=ident_of(two.job().id, own)))
    train(two, 60, slow=1.4)
    assert two.raised() == ["straggler"]


@pytest.mark.parametrize(("device", "evidence"), [("GPU-3", 1), ("GPU-2", 0)])
def test_what_an_agent_found_of_its_gpu_is_evidence_of_a_straggler(two, device, evidence):
    two.nodes[1].say(seen(2, device="GPU-2"), seen(3, device="GPU-3"))
    two.nodes[1].say(DeviceReading(two.now, "GPU-3", {}, index=5))
    become_slow(two)
    about = {"summary": "held at 1.2 GHz by heat", "device": device, "time": two.now - 20}
    two.nodes[1].stream.put_anomaly(found_by_agent("thermal_throttle", **about))
    two.hear()
    (found,) = [one for one in two.anomalies() if one.kind == "straggler"]
    assert found.gpu == 5
    said = ("thermal_throttle on the GPU of rank 3: held at 1.2 GHz by heat (on gpu-2)",)
    assert found.evidence == said * evidence
    assert found.summary.endswith(said[0]) == bool(evidence)


def test_what_an_agent_found_of_its_network_is_evidence_of_slow_communication(two):
    train(two, 300)
    ports = (("mlx5_1/1", -900, -600), ("mlx5_2/1", -60, 5), ("mlx5_0/1", 0, None))
    for port, after, ended in ports:
        about = {"time": two.now + after, "end_time": ended and two.now + ended, "device": port}
        own = found_by_agent("network_errors", id=port, summary=f"errors at {port}", **about)
        two.nodes[1].stream.put_anomaly(own)
    train(two, 120, slow=1.4, late=None)
    (found,) = [one for one in two.anomalies() if one.kind == "comm_slow"]
    said = "network_errors on the node of rank 2: errors at mlx5_0/1 (on gpu-2)"
    assert found.evidence[-1:] == (said,)
    assert found.summary.endswith(said)
    named = [any(port in text for text in found.evidence) for port, *_ in ports]
    assert named == [False, True, True]


def test_text_of_an_agent_is_one_line_that_utf_8_can_hold():
    node = TestNode("gpu-1")
    cluster = TestCluster(node)
    job = "j\ud800\x1b[2J\n\u202e"
    line = json.dumps({"type": "rank", "time": NOW, "job": job, "rank": 0, "world_size": 1})
    node.stream.put_anomaly(found_by_agent("xid", summary="a\x9bb\nc", evidence=("\x07",)))
    cluster.cluster.feed(node.address, [line.encode()], NOW)
    cluster.hear()
    assert cluster.job().id.name == "j  [2J  "
    (anomaly,) = cluster.anomalies()
    assert (anomaly.summary, anomaly.evidence) == ("a b c", (" ",))


def test_the_health_of_an_agent_says_the_worst_of_what_is_wrong(golden_case):
    lines = []
    for name, about in cases(__file__)["health"].items():
        about["refused"] = Counter(about.get("refused"))
        cluster = TestCluster(TestNode("gpu-1", about.pop("ahead_s", 0.0)))
        cluster.hear()
        (node,) = cluster.cluster.nodes.values()
        now = NOW + about.pop("lag_s", 0.0)
        for attribute, value in about.items():
            setattr(node, attribute, value)
        lines.append(f"{name}: {node.health(now)}\n".replace(__version__, "VERSION"))
    golden_case("".join(lines))


def test_an_anomaly_that_a_restarted_agent_does_not_report_again_has_ended():
    cluster = TestCluster(TestNode("gpu-1", ahead_s=100.0))
    (node,) = cluster.nodes
    for ident in ("1", "2"):
        node.stream.put_anomaly(found_by_agent("xid", id=ident))
    cluster.hear()
    node.stream = RecordStream()
    node.stream.put_anomaly(found_by_agent("xid", id="2"))
    ends = []
    for after_s in (0.0, 29.9, 0.1, 600.0):
        cluster.now += after_s
        cluster.hear()
        ends.append([one.end_time for one in cluster.anomalies()])
    assert ends == [[None, None], [None, None], [NOW + 30, None], [NOW + 30, None]]
