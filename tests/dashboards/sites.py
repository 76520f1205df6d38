"""Six clusters over 38 minutes, as their agents would have shown them: Kubernetes and Slurm,
each idle, healthy and with faults.

Devices are the simulated ones and pages the exporter's own. Metrics that both lack (of the host
and of the daemon itself) have every name and label of the catalogue; only faults change them.
"""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from tests.exporters.states import rank
from warpwatch_devices.simulated import PROFILES, SimulatedDevice
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.catalogue import CATALOGUE, names_of
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import (
    Attribution,
    DeviceProcess,
    DeviceSample,
    HostSample,
    Pod,
    ProcessOwner,
    SlurmJob,
    SourceHealth,
    Workload,
)
from warpwatch_telemetry.state import STEP_DURATION_BOUNDS_S, Histogram, JobState, RankState, State

SCHEDULERS, STATES = ("kubernetes", "slurm"), ("idle", "healthy", "fault")
MINUTES, FAULT_MINUTE, SCRAPED_MINUTES = 38, 20, 2
STEP_S, SLOW_S, STEPS_A_MINUTE = 0.5, 0.2, 60
OWNERS = {"kubernetes": "ns/ml", "slurm": "uid/1000"}
JOB = "llama"
WORKLOAD = Workload("ml", "llama-0", "trainer")
# Labels whose values the dashboards ask for; of others any value will do.
VALUES: Mapping[str, tuple[str, ...]] = {
    "mode": ("user", "idle"),
    "window": ("5m",),
    "of": ("self", "children"),
    "result": ("failed",),
    "outcome": ("complete", "failed"),
}
# Counted, and so there, from when it first happens.
_TROUBLE = re.compile(
    "rejected|refused|errors_total|problem|suppressed|captures_total|alerts|cost|"
    "residual|config_reloads|annotations|uploads|messages|exports"
)
# Metrics of a State or a fleet that no dashboard shows.
_ELSEWHERE = re.compile(
    "^(anomaly_info|detector_blind|source_|fleet_(?!kubernetes)|attribution_time)"
)


@dataclass(slots=True)
class SiteNode:
    """A node; ``number`` is also that of its GPU in use, and of the rank on it."""

    scheduler: str
    state: str
    number: int
    devices: list[SimulatedDevice] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = [SimulatedDevice(index, PROFILES["h100"]) for index in range(2)]

    @property
    def labels(self) -> dict[str, str]:
        """The labels that the chart's monitors add."""
        name = f"gpu-{self.number}"
        return {"job": "warpwatch", "cluster": self.cluster, "node": name, "instance": name}

    @property
    def cluster(self) -> str:
        return f"{self.scheduler}-{self.state}"

    def page(self, now: float, minute: int) -> str:
        ill = self.state == "fault" and minute >= FAULT_MINUTE
        page = render(self._state(now, minute, ill), Options(profile="default")).decode()
        shown = [line for line in page.splitlines() if not line.startswith("#")]
        known = {re.split("[{ ]", line, maxsplit=1)[0] for line in shown}
        return "\n".join([*shown, *self._others(known, minute, ill)])

    def _state(self, now: float, minute: int, ill: bool) -> State:
        load = None if self.state == "idle" else 0.9
        loads = [load, None if self.state == "fault" else load]
        samples = [
            device.advance(now, 60.0 * SCRAPED_MINUTES, one)
            for device, one in zip(self.devices, loads, strict=True)
        ]
        uuids = [sample.device.uuid for sample in samples]
        devices = [self._sick(sample, minute) if ill else sample for sample in samples]
        source = SourceHealth("nvml", not ill, duration_s=0.01, errors=minute * ill)
        state = State(now, "1", self.labels["node"], host=HostSample(now, {}), sources=(source,))
        if load is None:
            return replace(state, devices=tuple(devices))
        process = DeviceProcess(4000, "python", 2**34, 0.7)
        devices[0] = replace(devices[0], processes=(process,))
        anomalies = tuple(self._found(now, uuids[0])) if ill else ()
        request = CaptureRequest(JOB, "torch", "anomaly", owner=OWNERS[self.scheduler])
        told = {"findings": [{"kind": "data_loading", "share": 0.4}]}
        return replace(
            state,
            devices=tuple(devices),
            ranks=(self._rank(now, minute, uuids[0]),),
            jobs=(JobState(JOB, 2, (str(self.number),), 500.0 * minute, {"shapes": 0.4},
                           owner=OWNERS[self.scheduler]),),
            attributions=(self._owners(now, *uuids),),
            anomalies=anomalies,
            captures=(Capture("c", request, now, diagnosis=told),) if ill else (),
        )  # fmt: skip

    def _owners(self, now: float, uuid: str, other: str) -> Attribution:
        """The values of both GPUs; where faults are, the second one is held and does nothing."""
        owner = ProcessOwner("python", "p-0", "c-0")
        if self.scheduler == "slurm":
            job, idle = SlurmJob("4711", "ann", "vision", "a3"), SlurmJob("4712", "bob")
            owner = ProcessOwner("python", slurm=job)
            held = {uuid: (job,), other: (idle,)}
            return Attribution("slurm", now, slurm_jobs=held, processes={4000: owner})
        pods = {"p-0": Pod("ml", "llama-0")}
        workloads = {uuid: (WORKLOAD,), other: (Workload("web", "notebook", "main"),)}
        return Attribution("kubelet", now, workloads, processes={4000: owner}, pods=pods)

    def _rank(self, now: float, minute: int, uuid: str) -> RankState:
        """The rank of node 1 computes longer from FAULT_MINUTE on; the other waits for it."""
        late_s = SLOW_S * max(0, minute - FAULT_MINUTE) * (self.state == "fault")
        steps = minute * STEPS_A_MINUTE
        spent_s = (steps * STEP_S) + STEPS_A_MINUTE * late_s
        waits_s = 0.05 * steps + STEPS_A_MINUTE * late_s * (self.number == 0)
        counts = [0] * (len(STEP_DURATION_BOUNDS_S) + 1)
        counts[STEP_DURATION_BOUNDS_S.index(0.5)] = steps
        more: dict[str, Any] = {"out_of_memory_errors_total": 0, "allocation_retries_total": 0}
        if late_s:
            more = {name: minute for name in more}
        return rank(
            self.number,
            owner=OWNERS[self.scheduler],
            pod_uid="p-0" if self.scheduler == "kubernetes" else None,
            device=uuid,
            last_step_time=now,
            steps_total=steps,
            step=steps,
            samples_total=32 * steps,
            tokens_total=2048 * steps,
            durations=Histogram(tuple(counts), spent_s),
            phases_s={"comm": waits_s, "data_wait": 0.01 * steps, "forward": 0.2 * steps},
            gc_s=0.001 * steps,
            energy_j=250.0 * minute,
            **more,
        )

    def _sick(self, sample: DeviceSample, minute: int) -> DeviceSample:
        errors: dict[SeriesKey, float] = {
            ("device_xid_errors_total", ("79",)): minute,
            ("device_ecc_errors_total", ("uncorrected",)): minute,
            ("device_nvlink_errors_total", ("replay",)): minute,
            ("device_pcie_replay_total", ()): minute,
            ("device_health_events_total", ("x",)): minute,
        }
        if sample.device.index == 1 and self.number == 1:
            return DeviceSample(sample.device, sample.time, errors, up=False, reason="lost")
        return replace(sample, values={**sample.values, **errors})

    def _found(self, now: float, uuid: str) -> Iterator[Anomaly]:
        if self.number == 1:
            owner = OWNERS[self.scheduler]
            yield Anomaly(
                now, "warning", "late", JOB, 1, device=uuid, owner=owner, id="s", kind="straggler"
            )
            for kind in ("device_lost", "device_needs_service"):
                yield Anomaly(now, "critical", "lost", device="GPU-lost", id=kind, kind=kind)

    def _others(self, known: set[str], minute: int, ill: bool) -> Iterator[str]:
        """Yield the metrics of hosts and daemons that a State lacks."""
        for name in names_of("default"):
            row = CATALOGUE[name]
            if (
                row.scope not in ("host", "agent")
                or row.full_name in known
                or _ELSEWHERE.match(name)
            ):
                continue
            if _TROUBLE.search(name) and not name.startswith(("host", "network")) and not ill:
                continue
            if "process_" in name and self.state == "idle":
                continue
            value = minute if ill and row.kind == "counter" else 1
            for values in product(*(VALUES.get(label, ("x",)) for label in row.labels)):
                text = ",".join(f'{k}="{v}"' for k, v in zip(row.labels, values, strict=True))
                yield f"{row.full_name}{{{text}}} {value}"


def nodes() -> list[SiteNode]:
    return [SiteNode(*one) for one in product(SCHEDULERS, STATES, range(2))]


def history() -> Iterator[str]:
    """OpenMetrics of all nodes up to now, when Prometheus evaluates rules; without types."""
    every, end = nodes(), time.time()
    for minute in range(0, MINUTES + 1, SCRAPED_MINUTES):
        now = end - 60.0 * (MINUTES - minute)
        for node in every:
            added = ",".join(f'{name}="{value}"' for name, value in node.labels.items())
            yield f"up{{{added}}} 1 {now:.3f}"
            if node.state == "fault":
                away = added.replace(f"gpu-{node.number}", f"gpu-{node.number + 2}")
                yield f"up{{{away}}} 0 {now:.3f}"
            for line in node.page(now, minute).splitlines():
                labelled = line.partition("}")[0].partition("{")[2] if "{" in line else ""
                name, value = re.split("[{ ]", line, maxsplit=1)[0], line.rpartition(" ")[2]
                own = [pair for pair in (labelled, added) if pair]
                if 'node="' in labelled:
                    own[-1] = re.sub(r',node="[^"]*"', "", added)
                yield f"{name}{{{','.join(own)}}} {value} {now:.3f}"
    yield "# EOF"
