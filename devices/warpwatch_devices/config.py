"""The sections `sources` and `attribution`: what is read from devices and host, and how often."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from warpwatch_telemetry.sections import (
    WHOLE,
    Boolean,
    Interval,
    NotNegative,
    Positive,
    Section,
    Url,
)


class NvmlConfig(Section):
    """``stuck_after_s``: a driver call that takes longer ends that device's series.

    ``mismatch_grace_s``: the agent ends after this time if only a restart helps, as when library
    and driver no longer fit.
    """

    enabled: Boolean = True
    interval_s: Interval = 1.0
    stuck_after_s: Positive = 5.0
    mismatch_grace_s: NotNegative = 60.0


class KernelLogConfig(Section):
    """Where the kernel log cannot be read, XIDs come from the driver's events alone."""

    enabled: Boolean = True


class SimulatedConfig(Section):
    enabled: Boolean = False
    devices: Annotated[int, Field(ge=1, le=64), WHOLE] = 8
    profile: Literal["h100", "a100", "l4"] = "h100"


class HostConfig(Section):
    enabled: Boolean = True
    interval_s: Interval = 1.0


class ProcessesConfig(Section):
    """Processor time and memory of the processes that use a GPU."""

    enabled: Boolean = True


class DcgmConfig(Section):
    """``address``: a running host engine's, or ``embedded``. ``bindings``: DCGM's Python folder."""

    enabled: Boolean = False
    address: str = "localhost:5555"
    bindings: Path | None = None


class DcgmExporterConfig(Section):
    """A running dcgm-exporter, for what NVML cannot give."""

    url: Url | None = None


class SourcesConfig(Section):
    nvml: NvmlConfig = NvmlConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    host: HostConfig = HostConfig()
    processes: ProcessesConfig = ProcessesConfig()
    dcgm: DcgmConfig = DcgmConfig()
    dcgm_exporter: DcgmExporterConfig = DcgmExporterConfig()


# YAML reads a plain off as false.
_Origin = Annotated[
    str,
    BeforeValidator(lambda value: "off" if value is False else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"const": False}]}),
]


class AttributionConfig(Section):
    """The origins of attributions.

    ``kubelet_socket``: auto (if it exists), off, or a path; so is ``pod_logs``, the kubelet's
    folder of logs. ``slurm``: auto (the processes' control groups), off, or a folder with a file
    for each device UUID that holds its job ids.
    """

    kubelet_socket: _Origin = "auto"
    pod_logs: _Origin = "auto"
    slurm: _Origin = "auto"
