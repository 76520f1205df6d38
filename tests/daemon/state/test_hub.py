"""The one state: of devices and jobs, and what the daemon counts about itself."""

import math
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.state.counted import counted
from tests.manual_clock import ManualClock
from warpwatch_daemon.state.hub import Hub
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.records import DeviceReading, PortReading
from warpwatch_telemetry.samples import (
    Device,
    DeviceProcess,
    DeviceSample,
    HostSample,
    SourceHealth,
)
from warpwatch_telemetry.state import RankState

GPU = Device("GPU-1", 0, "H100", info={"driver_load": "boot/7", "pci_bus_id": "0:1a:0.0"})
ENERGY = ("device_energy_joules_total", ())


@pytest.fixture
def hub():
    """One for which nothing grows old."""
    return Hub(1e9)


def sample(time: float, energy_j: float) -> DeviceSample:
    return DeviceSample(GPU, time, {ENERGY: energy_j})


def rank(job: str) -> RankState:
    return RankState(job=job, rank=0, name="0", pid=1, host="h", device="GPU-1")


def show(hub: Hub, *ranks: RankState) -> None:
    """As the pipeline does it."""
    hub.watch_ranks(lambda: ranks)
    running = {
        (rank.job_id, rank.rank): rank.device if rank.status == "running" else None
        for rank in ranks
    }
    hub.follow_ranks(running)


def use(hub: Hub, *energies_j: float) -> list[float | None]:
    """Publish readings of the device's counter, a second apart; the jobs' energies then."""
    for second, energy_j in enumerate(energies_j):
        hub.publish_device(sample(float(second), energy_j))
    return [job.energy_j for job in hub.state().jobs]


def test_values_that_were_not_read_again_are_gone_and_the_device_is_down():
    clock = ManualClock()
    hub = Hub(4.0, clock.wall, {"nic": 40.0}, clock.monotonic)
    hub.publish_device(replace(sample(100.0, 5.0), processes=(DeviceProcess(7, "a", 1),)))
    hub.publish_health(SourceHealth("nvml", up=True))
    hub.publish_host(HostSample(100.0, {("host_cpu_count", ()): 2.0}))
    hub.publish_host(HostSample(90.0, {("host_boot_time", ()): 7.0}, source="nic"))
    # A wall clock that is set makes nothing old.
    clock.set_wall(clock.wall() + 1e9)
    state = hub.state()
    assert state.devices[0].up
    assert state.host.values == {("host_cpu_count", ()): 2.0, ("host_boot_time", ()): 7.0}
    assert (state.time, state.host.time) == (clock.wall(), 100.0)
    assert state.sources == hub.health() == (SourceHealth("nvml", up=True),)
    clock.advance(4.5)
    state = hub.state()
    assert state.devices == (DeviceSample(GPU, 100.0, {}, up=False, reason="stale"),)
    assert state.host.values == {("host_boot_time", ()): 7.0}
    clock.advance(36.0)
    assert hub.state().host is None


def test_a_published_sample_is_also_a_record_for_the_pipeline(hub):
    read = sample(1.0, 5.0)
    nothing = {("device_power_watts", ()): float("nan"), ("device_clock_hertz", ("sm",)): math.inf}
    hub.publish_device(replace(read, values={**read.values, **nothing}))
    # NaN and infinity are unknown, and so absent.
    assert hub.state().devices[0].values == {ENERGY: 5.0}
    hub.publish_host(HostSample(2.0, {}, ports={"mlx5_0:1": {}}))
    assert hub.take_records() == [
        DeviceReading(1.0, "GPU-1", {ENERGY: 5.0}, index=0, driver_load="boot/7", slot="0:1a:0.0"),
        PortReading(2.0, "mlx5_0:1", {}),
    ]
    hub.publish_host(HostSample(2.0, {}, ports={f"mlx5_{number}:1": {} for number in range(8193)}))
    assert (len(hub.take_records()), hub.readings_dropped) == (8192, 1)
    assert hub.take_records() == []


def test_a_job_is_charged_what_its_device_used_while_it_ran(hub):
    use(hub, 1000.0)
    show(hub, rank("train"))
    assert use(hub, 1500.0, 1700.0) == [700.0]
    # The driver was reloaded: the counter begins again.
    assert use(hub, 50.0) == [700.0]
    assert use(hub, 80.0) == [730.0]
    assert hub.job_energy(rank("train").job_id) == 730.0
    # It begins again with a job that was gone.
    show(hub, rank("train"), replace(rank("a"), world_size=4))
    assert [(job.name, job.world_size) for job in hub.state().jobs] == [("a", 4), ("train", 1)]
    show(hub)
    show(hub, rank("train"))
    assert use(hub, 90.0) == [10.0]


def test_tokens_of_a_job_are_told_by_the_joule_from_when_both_are_counted(hub):
    def after(joules: float, tokens: int) -> float | None:
        hub.publish_device(sample(joules, joules))
        half = replace(rank("train"), tokens_total=tokens // 2)
        show(hub, half, replace(half, rank=1, name="1"))
        (job,) = hub.state().jobs
        per_joule: float | None = job.tokens_per_joule
        return per_joule

    assert after(1000.0, 70_000) is None, "no energy of it is known"
    assert after(1100.0, 80_000) is None, "from here on both are"
    assert after(1200.0, 80_000) is None, "none was made"
    assert after(1300.0, 80_500) == 2.5
    assert after(1500.0, 90_000) == 10_000 / 400
    assert after(1600.0, 10) is None, "its ranks began again"
    assert after(1700.0, 60) == 0.5


def test_energy_of_two_sources_that_take_turns_is_never_more_than_the_device_used(hub):
    show(hub, rank("train"))
    elsewhere = replace(sample(1.0, 9e7), source="dcgm_exporter")
    hub.publish_device(sample(1.0, 1e8))
    hub.publish_device(elsewhere)
    hub.publish_device(sample(2.0, 1e8 + 300))
    # The first source fails, the other one's counter lags; then it is back.
    hub.publish_device(DeviceSample(GPU, 3.0, {}, up=False, reason="timeout"))
    hub.publish_device(replace(elsewhere, values={ENERGY: 9e7 + 100}))
    hub.publish_device(replace(elsewhere, values={ENERGY: 9e7 + 150}))
    assert use(hub, 1e8 + 600, 1e8 + 700) == [300.0 + 50.0 + 100.0]


def test_jobs_and_ranks_on_one_device_share_its_energy(hub):
    first, second = rank("a"), replace(rank("a"), rank=1, name="1")
    show(hub, first, second, rank("b"))
    use(hub, 0.0, 90.0)
    # One ended: what the device uses from now on is the others'.
    show(hub, first, replace(second, status="exited"), rank("b"))
    assert use(hub, 190.0) == [110.0, 80.0]
    assert [rank.energy_j for rank in hub.state().ranks] == [80.0, 30.0, 80.0]


H100 = Device("GPU-1", 0, "NVIDIA H100 80GB HBM3")
RANK = RankState(
    job="train", rank=0, name="0", pid=1, host="h", device="GPU-1", run="r1",
    steps_per_s=4.0, tokens_per_s=8_000.0, samples_per_s=8.0,
)  # fmt: skip


def ratios(*ranks: RankState, traces: Any = (), run: str = "r1") -> dict[str, float]:
    hub = Hub(4.0)
    hub.watch_ranks(lambda: ranks)
    hub.publish_device(DeviceSample(H100, 100.0, {}))
    request = CaptureRequest("train", "torch", "manual", run=run)
    # The newest counts, of those that have it.
    older = [one | {"window_s": one["window_s"] and 9.0} for one in traces]
    captures = [Capture("c", request, 1.0, diagnosis={"traces": one}) for one in (older, traces)]
    hub.publish(captures=tuple(captures))
    (job,) = hub.state().jobs
    return dict(job.model_flops_ratio)


def test_it_is_the_time_at_the_peak_of_what_a_capture_counted_by_the_time_of_a_step() -> None:
    # At its peak a GPU would need 0.1 s of the 0.5 s of four steps each.
    trace = {"window_s": 0.5, "steps": 4, "roofline": {"mfu_ratio": 0.2}}
    other = {"window_s": 0.5, "steps": 4, "roofline": {"mfu_ratio": 0.4}}
    new = replace(RANK, rank=1, name="1", steps_per_s=None)
    others = [replace(RANK, rank=n, name=str(n), steps_per_s=4.0 + n) for n in (2, -2)]
    assert ratios(RANK, new, *others, traces=[trace, other]) == {
        "shapes": pytest.approx(0.0375 * 4)
    }
    # Ranks of another run, without a GPU, or without a step.
    assert ratios(RANK, traces=[trace], run="r2") == {}
    less: Any = ({"roofline": None}, {"roofline": {}}, {"steps": 0}, {"window_s": None})
    assert ratios(RANK, traces=[trace | one for one in less]) == {}
    assert ratios(replace(RANK, steps_per_s=None), traces=[trace]) == {}


def test_a_source_counts_by_name_and_labels_and_what_nothing_has_counted_yet_is_absent():
    hub = Hub(4.0)
    assert generate_latest(hub.metrics.registry) == b""
    hub.metrics.counter("jsonl_errors_total")
    assert counted(hub, "jsonl_errors_total") == 0
    hub.count("nvml_calls_total", "power")
    hub.count("nvml_calls_total", "power", by=4)
    hub.count("nvml_calls_total", "clocks")
    hub.count("jsonl_errors_total", by=2)
    assert counted(hub, "nvml_calls_total", "power") == 5
    assert counted(hub, "nvml_calls_total", "clocks") == 1
    assert counted(hub, "jsonl_errors_total") == 2
    with pytest.raises(KeyError):
        hub.count("made_up_total")


@pytest.mark.parametrize("name", sorted(n for n, row in CATALOGUE.items() if row.scope == "agent"))
def test_every_metric_is_shown_as_the_catalogue_describes_it(name):
    row, metrics = CATALOGUE[name], AgentMetrics()
    metric = metrics.counter(name) if row.kind == "counter" else metrics.gauge(name)
    values = [f"some {label}" for label in row.labels]
    (metric.labels(*values) if values else metric).inc()
    # No second series says since when a counter counts.
    (family,) = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    (sample,) = family.samples
    assert (family.type, family.documentation) == (row.kind, row.help)
    assert (sample.name, sample.value) == (row.full_name, 1)
    assert sample.labels == dict(zip(row.labels, values, strict=True))
