"""Faults of the machine under an agent and a fleet: no step is lost, nothing false is found, and
what could not be done is in status and metrics.
"""

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.hung_disk import small_disk
from tests.loop.node import ApiAnswers, poll
from tests.loop.preloaded import ShiftedClock
from tests.loop.programs import STEPPING_UNTIL
from warpwatch import protocol

pytestmark = pytest.mark.hostile

WHO = pytest.mark.parametrize("who", ["agent", "fleet"])
# Longer than what is retried or given up within seconds; STOPPED_MINUTES=5 by hand.
FAULT_S = 12.0
STOPPED_S = 60 * float(os.environ.get("STOPPED_MINUTES", "0.75"))
# A ring holds the steps that the job does in this time.
RING_S = protocol.RECORD_COUNT * 0.05
DAY_S = 86400
# A busy machine slows the steps of a job, which is not tested here.
DETECTION = {"disabled": ["straggler", "step_regression", "step_drift", "step_spikes", "comm_slow"]}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LoopCluster]:
    with loop_cluster(tmp_path, 1, detection=DETECTION) as cluster:
        yield cluster


def start(cluster: LoopCluster, job: str, *how: str) -> subprocess.Popen[bytes]:
    """Start a job with a rank on each node, and return the first."""
    folder = str(cluster.folder / f"{job}.stop")
    ranks = [
        node.start(
            f"{job}.log",
            ["-c", STEPPING_UNTIL, job, folder, *how],
            node.rank_environment(number, len(cluster.nodes)) | {"WARPWATCH_RUN": job},
        )
        for number, node in enumerate(cluster.nodes)
    ]
    cluster.have_trained(job, len(ranks), 5)
    return ranks[0]


def process(cluster: LoopCluster, who: str) -> psutil.Process:
    found = cluster.fleet if who == "fleet" else cluster.nodes[0].daemon
    return psutil.Process(found.pid)


def api(cluster: LoopCluster, who: str) -> ApiAnswers:
    return cluster if who == "fleet" else cluster.nodes[0]


def missing(site: ApiAnswers) -> str:
    return " ".join(site.http.get("/readyz").json()["missing"])


def nothing_is_lost(
    cluster: LoopCluster, job: str, trains: subprocess.Popen[bytes], *, overflows: bool = False
) -> None:
    """Let the job end, and compare what it has counted itself with agent and fleet.

    overflows: whether its ring lost records, which the totals count nevertheless.
    """
    (cluster.folder / f"{job}.stop").touch()
    assert trains.wait(60) == 0
    node = cluster.nodes[0]
    own = int(node.log(f"{job}.log").split()[-1])
    poll(lambda: node.steps(job) == [own], "the agent has counted every step")
    poll(lambda: cluster.steps(job) == [own], "the fleet has counted every step")
    lost = node.metric("warpwatch_records_lost_total", training_job=job)
    assert lost is not None and (lost > 0) == overflows, lost
    found = cluster.get("anomalies") + node.get("anomalies")
    assert found == [], (found, cluster.log())


@WHO
def test_without_descriptors_what_runs_goes_on_and_what_comes_is_seen_later(cluster, who):
    cluster.start()
    trains = start(cluster, "train")
    found, site = process(cluster, who), api(cluster, who)
    (before,) = site.steps("train")
    soft, hard = found.rlimit(resource.RLIMIT_NOFILE)
    found.rlimit(resource.RLIMIT_NOFILE, (3, hard))
    cluster.nodes[0].lets_pass(FAULT_S)
    found.rlimit(resource.RLIMIT_NOFILE, (soft, hard))
    site.have_trained("train", 1, before + 100)
    other = start(cluster, "later")
    nothing_is_lost(cluster, "train", trains)
    nothing_is_lost(cluster, "later", other)


@WHO
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_state_that_cannot_be_written_is_said_and_written_later(tmp_path, who, fault):
    with small_disk(tmp_path / "disk", "1m") as disk:
        store = {"store": {"url": f"{disk.as_uri()}/captures"}} if who == "agent" else {}
        # The fleet keeps what it evaluates itself: jobs over nodes.
        with loop_cluster(tmp_path, 1 + (who == "fleet"), detection=DETECTION, **store) as cluster:
            if who == "fleet":
                text = cluster.config.read_text()
                cluster.config.write_text(text.replace(str(tmp_path / "fleet"), str(disk)))
            cluster.start()
            site = api(cluster, who)
            with broken(disk, fault):
                crash(cluster, "first")
                poll(lambda: any(store_errors(site)), cluster.log)
                assert poll(lambda: missing(site), cluster.log)
            crash(cluster, "second")
            poll(lambda: not missing(site), lambda: missing(site))
            found = cluster.get("anomalies")
            assert {one["job"] for one in found} == {"first", "second"}


def store_errors(site: ApiAnswers) -> list[float | None]:
    name = "warpwatch_anomaly_store_errors_total"
    return [site.metric(name, operation=operation) for operation in ("write", "snapshot")]


@contextlib.contextmanager
def broken(disk: Path, fault: str) -> Iterator[None]:
    if fault == "full":
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        yield
        filler.unlink()
        return
    # Over the other one, whose open files keep it from becoming read-only itself.
    mount = ["mount", "-t", "tmpfs", "-o", "ro,mode=755", "tmpfs", str(disk)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def crash(cluster: LoopCluster, job: str) -> None:
    start(cluster, job, "fails")
    (cluster.folder / f"{job}.stop").touch()
    poll(lambda: cluster.get("anomalies", job=job), cluster.log)


@WHO
def test_a_process_that_was_stopped_goes_on_where_it_was(cluster, who):
    cluster.start()
    trains = start(cluster, "train")
    found = process(cluster, who)
    found.send_signal(signal.SIGSTOP)
    cluster.nodes[0].lets_pass(STOPPED_S)
    found.send_signal(signal.SIGCONT)
    # A fleet that stands still finds all in the agent's stream.
    overflows = who == "agent" and STOPPED_S > RING_S
    nothing_is_lost(cluster, "train", trains, overflows=overflows)


@WHO
@pytest.mark.parametrize("by_s", [DAY_S, -DAY_S])
def test_a_clock_that_is_set_by_a_day_finds_nothing_and_loses_nothing(cluster, tmp_path, who, by_s):
    clock = ShiftedClock(tmp_path)
    node = cluster.nodes[0]
    node.start_daemon(wait=True, **(clock.environment if who == "agent" else {}))
    cluster.start_fleet(**(clock.environment if who == "fleet" else {}))
    trains = start(cluster, "train")
    for offset_s in (by_s, 0):
        clock.set(offset_s)
        (before,) = cluster.steps("train")
        cluster.have_trained("train", 1, before + 100)
    nothing_is_lost(cluster, "train", trains)
