"""Who polls: jobs, ranks, launchers, and what is ordered of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from warpwatch_daemon.captures.kineto import process_facts
from warpwatch_daemon.captures.kineto.pollers import Pollers, Sender
from warpwatch_daemon.captures.kineto.process_facts import UNKNOWN, ProcessFacts, describe
from warpwatch_daemon.captures.kineto.protocol import MessageError, Poll, TraceConfig
from warpwatch_telemetry.jobs import JobId

CONFIG = TraceConfig("/inbox/a.json", start_time=1000.0, window_s=1.0)


class Node:
    """A registry whose processes say who they are by a table."""

    def __init__(self) -> None:
        self.origins: dict[str, ProcessFacts] = {}
        self.processes = Pollers(lambda sender: self.origins[sender.name])

    def poll(
        self,
        name: str,
        origin: ProcessFacts = UNKNOWN,
        pids: Sequence[int] = (1,),
        uid: int = 1000,
        ready: bool = True,
        now: float = 990.0,
        at: float = 0.0,
        job_id: int = 0,
    ) -> str:
        self.origins[name] = origin
        poll = Poll(ready, job_id, tuple(pids))
        return self.processes.poll(poll, Sender(name, pids[0], uid), now, at)

    def names(self) -> dict[str, dict[int, str]]:
        jobs = self.processes.jobs()
        return {
            job.name: {number: process.sender.name for number, process in members.items()}
            for job, members in jobs.items()
            if job.owner == "uid/1000"
        }


def ranked(rank: int, world_size: int = 2, job: str = "llama") -> ProcessFacts:
    return describe({"RANK": str(rank), "WORLD_SIZE": str(world_size), "WARPWATCH_JOB": job}, [])


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_environment_and_the_command_line_say_job_and_rank() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "8", "SLURM_JOB_NAME": "pre", "SLURM_JOB_ID": "17"}
    said = describe(environ, ["python", "train.py"], "pid:[1]")
    assert said == ProcessFacts("pre-17", 3, 8, "3", "pid:[1]", known=True)
    assert describe({}, ["python", "train.py"]).job == "train.py"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["python", "-u", "-W", "ignore", "-Xdev", "/app/train.py", "--lr", "1"], "/app/train.py"),
        (["python", "-m", "pkg.train", "x"], "train.py"),
        (["python", "-c", "import torch"], "-c"),
        (["trainer"], "trainer"),
        ([], ""),
    ],
)
def test_the_script_is_found_behind_the_interpreters_options(
    arguments: list[str], name: str
) -> None:
    assert process_facts.script(arguments) == name


def test_a_living_process_is_described_and_a_foreign_one_is_unknown() -> None:
    environ = {"WARPWATCH_JOB": "alive\n", "RANK": "1"}
    code = "print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        said = process_facts.read_facts(child.pid, os.getuid())
        assert (said.job, said.rank, said.known) == ("alive", 1, True)
        assert process_facts.read_facts(child.pid, os.getuid() + 1) is UNKNOWN
        child.communicate(b"\n")
    assert process_facts.read_facts(child.pid, os.getuid()) is UNKNOWN
    assert process_facts.read_facts(0, os.getuid()) is UNKNOWN


def test_ranks_of_a_job_are_together_and_a_second_job_of_the_name_is_numbered(node: Node) -> None:
    node.poll("a", ranked(1), [10])
    node.poll("b", ranked(0), [11])
    node.poll("c", ranked(0), [12])
    node.poll("d", ranked(0), [13], uid=2000)
    assert node.names() == {"llama": {1: "a", 0: "b"}, "llama#2": {0: "c"}}
    theirs = node.processes.jobs()[JobId("uid/2000", "llama", "")]
    assert [process.sender.name for process in theirs.values()] == ["d"]


def test_a_launcher_is_no_rank(node: Node) -> None:
    node.poll("torchrun", describe({"WARPWATCH_JOB": "llama"}, []), [5, 1])
    node.poll("a", ranked(0), [10, 5, 1])
    node.poll("b", ranked(1), [11, 5, 1])
    assert node.names() == {"llama": {0: "a", 1: "b"}}


def test_what_a_rank_has_spawned_is_no_rank(node: Node) -> None:
    node.poll("rank", ranked(0), [10, 5])
    node.poll("worker", ranked(0), [20, 10, 5])
    assert node.names() == {"llama": {0: "rank"}}


def test_where_nothing_can_be_read_ranks_are_numbered_as_they_come(node: Node) -> None:
    node.poll("torchrun", UNKNOWN, [5, 1])
    node.poll("a", UNKNOWN, [10, 5])
    node.poll("b", UNKNOWN, [11, 5])
    node.poll("other", UNKNOWN, [5], job_id=17)
    assert node.names() == {"kineto": {0: "a", 1: "b"}, "kineto-17": {0: "other"}}


def test_the_pids_of_another_namespace_are_no_ones_ancestors(node: Node) -> None:
    here, there = ({**{"RANK": str(rank)}, "WORLD_SIZE": "2"} for rank in (0, 1))
    node.poll("a", describe(here, ["t"], "pid:[1]"), [1])
    node.poll("b", describe(there, ["t"], "pid:[2]"), [7, 1])
    assert node.names() == {"t": {0: "a", 1: "b"}}


def test_the_registry_is_bounded_by_owner(node: Node) -> None:
    for number in range(64):
        node.poll(f"hog{number}", ranked(number), [number + 1], uid=666)
    with pytest.raises(MessageError, match="too_many"):
        node.poll("hog64", ranked(64), [65], uid=666)
    node.poll("other", ranked(0), [99], uid=1000)
    assert len(node.processes.names()) == 65


def test_no_one_waits_while_the_origin_of_a_process_is_looked_up() -> None:
    free: list[bool] = []

    def facts_of(sender: Sender) -> ProcessFacts:
        asking = threading.Thread(target=processes.jobs, daemon=True)
        asking.start()
        asking.join(2)
        free.append(not asking.is_alive())
        return UNKNOWN

    processes = Pollers(facts_of)
    for at in (0.0, 2.0):
        processes.poll(Poll(True, 0, (10,)), Sender("a", 10, 1000), 990.0, at)
    assert free == [True]
    assert processes.jobs()[JobId("uid/1000", "kineto", "")][0].poll_interval_s == 2.0


def test_a_name_belongs_to_the_user_who_had_it_first(node: Node) -> None:
    node.poll("a", ranked(0), [10], uid=1000)
    with pytest.raises(MessageError, match="not_the_owner"):
        node.poll("a", ranked(0), [10], uid=2000)


def test_who_does_not_poll_for_a_minute_is_gone(node: Node) -> None:
    node.poll("a", ranked(0), [10], at=0.0)
    node.poll("b", ranked(1), [11], at=30.0)
    node.processes.expire(at=61.0)
    assert node.names() == {"llama": {1: "b"}}


def test_an_order_is_given_once_and_not_before_the_process_is_ready(node: Node) -> None:
    node.poll("a", ranked(0), [10])
    (order,) = node.processes.give({"a": CONFIG}).values()
    assert node.poll("a", pids=[10], ready=False, at=1.0) == ""
    assert order.sent_at is None
    assert node.poll("a", pids=[10], at=2.0) == CONFIG.text()
    assert node.poll("a", pids=[10], at=3.0) == ""
    assert order.sent_at == 2.0


def test_a_late_poll_moves_the_start_out_of_its_past(node: Node) -> None:
    node.poll("a", ranked(0), [10])
    (order,) = node.processes.give({"a": CONFIG}).values()
    assert "PROFILE_START_TIME=1001300\n" in node.poll("a", pids=[10], now=1000.0, at=1.0)
    assert order.config.start_time == 1001.3


def test_a_process_that_stays_ready_has_refused(node: Node) -> None:
    for name in "ab":
        node.poll(name, ranked(ord(name) - 97), [ord(name)])
    orders = node.processes.give({"a": CONFIG, "b": CONFIG})
    for name in "ab":
        node.poll(name, pids=[ord(name)], at=1.0)
        # It has not looked at the request, or waits for the start.
        node.poll(name, pids=[ord(name)], at=2.0, now=1000.1)
        node.poll(name, pids=[ord(name)], at=3.0, now=1000.3, ready=name == "a")
        node.poll(name, pids=[ord(name)], at=4.0, now=1001.3)
    assert (orders["a"].refused_at, orders["a"].taken) == (3.0, False)
    assert (orders["b"].refused_at, orders["b"].taken) == (None, True)


def test_what_is_withdrawn_is_not_ordered(node: Node) -> None:
    node.poll("a", ranked(0), [10])
    process = node.processes.jobs()[JobId("uid/1000", "llama", "")][0]
    (order,) = node.processes.give({"a": CONFIG}).values()
    node.processes.withdraw(process, order)
    assert node.poll("a", pids=[10], at=1.0) == ""
