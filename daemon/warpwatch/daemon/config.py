"""The configuration: typed, every default in one place, every key also an environment variable.

One YAML file, then ``WARPWATCH_SECTION__KEY`` on top. Unknown keys and bad values are refused
with the path, the value and the nearest valid key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from warpwatch.daemon.config_reading import (
    check_kind,
    check_listen,
    overlay,
    parse_age,
    parse_bytes,
    read_yaml,
)
from warpwatch.daemon.conversion import NotConvertibleError, convert
from warpwatch.daemon.errors import UsageError

Bytes = Annotated[int, parse_bytes, Meta(ge=0)]
Age = Annotated[float, parse_age, Meta(ge=0)]
Interval = Annotated[float, Meta(ge=0.1, le=3600)]
Timeout = Annotated[float, Meta(gt=0, le=3600)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
AnomalyKind = Annotated[str, check_kind]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds are checked by ``parse`` and ``load``, not where a section is made in Python."""


class HttpConfig(Section, frozen=True, kw_only=True):
    listen: Annotated[str, check_listen] = "127.0.0.1:9400"
    web_config: Path | None = None
    token_file: Path | None = None
    token_required: bool = False


class RendezvousConfig(Section, frozen=True, kw_only=True):
    """``kineto``: the socket for stock PyTorch's own captures."""

    dir: str = "auto"
    inbox: str = "auto"
    poll_interval_s: Interval = 0.2
    kineto: bool = True


class NvmlConfig(Section, frozen=True, kw_only=True):
    """``mismatch_grace_s``: how long library and driver may differ before the daemon ends."""

    enabled: bool = True
    interval_s: Interval = 1.0
    stuck_after_s: Positive = 5.0
    gpm: bool = True
    mismatch_grace_s: NotNegative = 60.0


class KernelLogConfig(Section, frozen=True, kw_only=True):
    """Where the kernel log cannot be read, XIDs come from the driver's events alone."""

    enabled: bool = True
    path: Path = Path("/dev/kmsg")


class SimulatedConfig(Section, frozen=True, kw_only=True):
    enabled: bool = False
    devices: Annotated[int, Meta(ge=1, le=64)] = 8
    profile: Literal["h100", "a100", "l4"] = "h100"
    interval_s: Interval = 1.0


class HostConfig(Section, frozen=True, kw_only=True):
    enabled: bool = True
    interval_s: Interval = 1.0


class ProcessesConfig(Section, frozen=True, kw_only=True):
    """Processor time and memory of the processes that use a GPU."""

    enabled: bool = True
    interval_s: Interval = 5.0


class DcgmConfig(Section, frozen=True, kw_only=True):
    """``address``: a running host engine's, or ``embedded``. ``bindings``: DCGM's Python folder."""

    enabled: bool = False
    address: str = "localhost:5555"
    bindings: Path | None = None
    interval_s: Interval = 1.0


class DcgmExporterConfig(Section, frozen=True, kw_only=True):
    """A running dcgm-exporter, for what NVML cannot give."""

    url: Annotated[str, Meta(pattern=r"^https?://")] | None = None
    interval_s: Interval = 10.0


class SourcesConfig(Section, frozen=True, kw_only=True):
    nvml: NvmlConfig = NvmlConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    host: HostConfig = HostConfig()
    processes: ProcessesConfig = ProcessesConfig()
    dcgm: DcgmConfig = DcgmConfig()
    dcgm_exporter: DcgmExporterConfig = DcgmExporterConfig()


class AttributionConfig(Section, frozen=True, kw_only=True):
    """Whose work runs on the devices.

    ``kubelet_socket``: auto (where it exists), off, or a path. ``slurm``: auto (the processes'
    control groups), off, or a folder with a file for each device UUID that holds its job ids.
    """

    kubelet_socket: str = "auto"
    slurm: str = "auto"
    interval_s: Interval = 10.0


class DetectorConfig(Section, frozen=True, kw_only=True):
    enabled: bool = True


class LevelConfig(DetectorConfig, frozen=True, kw_only=True):
    """Judging a level by blocks. A block ends at ``block_steps`` steps and ``block_s`` seconds.

    The baseline is learned from ``baseline_blocks`` and used from ``ready_blocks`` on; a level
    counts after ``hold_blocks`` in a row, and ``hold_s``, above ``noise_factor`` times the noise
    of past blocks.
    """

    warmup_steps: Count = 20
    block_steps: Annotated[int, Meta(ge=3, le=100)] = 10
    block_s: Annotated[float, Meta(ge=0, le=60)] = 1.0
    baseline_blocks: Annotated[int, Meta(ge=4, le=200)] = 40
    ready_blocks: Annotated[int, Meta(ge=4, le=200)] = 10
    hold_blocks: AtLeastOne = 3
    hold_s: NotNegative = 4.0
    noise_factor: Positive = 5.0


class StepRegressionConfig(LevelConfig, frozen=True, kw_only=True):
    """``min_effect``: the least rise. A new level that lasted ``accept_*`` is the new normal."""

    min_effect: Annotated[float, Meta(gt=0, le=10)] = 0.05
    accept_blocks: Annotated[int, Meta(ge=4)] = 30
    accept_after_s: NotNegative = 600.0


class RankLevelConfig(LevelConfig, frozen=True, kw_only=True):
    """A level of each rank; before there is a baseline, ``start_blocks`` in a row count."""

    start_blocks: AtLeastOne = 5


class DataStallConfig(RankLevelConfig, frozen=True, kw_only=True):
    """Shares of the step spent in ``data_wait``; ``start_share`` judges without a baseline."""

    block_steps: Annotated[int, Meta(ge=3, le=100)] = 20
    ready_blocks: Annotated[int, Meta(ge=4, le=200)] = 5
    hold_blocks: AtLeastOne = 2
    min_share: Share = 0.10
    min_rise: PositiveShare = 0.08
    start_share: PositiveShare = 0.25


class StragglerConfig(RankLevelConfig, frozen=True, kw_only=True):
    """Ratios of a rank's compute to its peers' median.

    ``min_cost``: least share of the step lost; ``start_ratio`` judges without a baseline.
    """

    noise_factor: Positive = 4.0
    min_ratio: Annotated[float, Meta(gt=1)] = 1.10
    min_cost: PositiveShare = 0.05
    start_ratio: Annotated[float, Meta(gt=1)] = 1.25


class HangConfig(DetectorConfig, frozen=True, kw_only=True):
    """No step for the longest of ``timeout_s``, ``median_steps`` steps and ``gap_factor`` gaps.

    ``warmup_timeout_s`` holds during a rank's first steps; ``stopped_after_s`` is how long a
    living process may miss its heartbeat.
    """

    timeout_s: Positive = 140.0
    median_steps: Positive = 28.0
    gap_factor: Annotated[float, Meta(ge=1)] = 1.2
    warmup_steps: Count = 5
    warmup_timeout_s: NotNegative = 600.0
    stopped_after_s: Positive = 10.0


class CrashConfig(DetectorConfig, frozen=True, kw_only=True):
    """``grace_s``: how long others must live on for a death to be a crash of one rank."""

    grace_s: NotNegative = 5.0


class DetectorsConfig(Section, frozen=True, kw_only=True):
    """One section a kind."""

    step_regression: StepRegressionConfig = StepRegressionConfig()
    data_stall: DataStallConfig = DataStallConfig()
    straggler: StragglerConfig = StragglerConfig()
    hang: HangConfig = HangConfig()
    crash: CrashConfig = CrashConfig()


class RecipeConfig(Section, frozen=True, kw_only=True):
    """``options``: what a capture of kind torch records besides, at a price."""

    kind: Literal["torch", "memory", "stacks", "nsys"] = "torch"
    steps: Annotated[int, Meta(ge=1, le=100)] = 5
    options: list[Literal["stacks", "shapes", "memory"]] = []


def _default_recipes() -> dict[str, RecipeConfig]:
    return {
        "step_regression": RecipeConfig(),
        "data_stall": RecipeConfig(),
        "straggler": RecipeConfig(),
        "hang": RecipeConfig(kind="stacks"),
    }


class TriggersConfig(Section, frozen=True, kw_only=True):
    """``max_events``: of a rank's trace; more steps than bring so many are not recorded."""

    captures_per_hour: Count = 4
    cooldown_s: NotNegative = 600.0
    dry_run: bool = False
    arm_timeout_s: Timeout = 60.0
    capture_timeout_s: Timeout = 120.0
    max_events: AtLeastOne = 1_000_000
    recipes: dict[AnomalyKind, RecipeConfig] = msgspec.field(default_factory=_default_recipes)


class AnomaliesConfig(Section, frozen=True, kw_only=True):
    hold_s: NotNegative = 600.0


class StoreConfig(Section, frozen=True, kw_only=True):
    url: Annotated[str, Meta(pattern=r"^file:///")] = "file:///var/lib/warpwatch/captures"
    max_bytes: Bytes = 5 * 2**30
    max_age: Age = 14 * 86400.0
    max_captures: AtLeastOne = 1000


class JsonlConfig(Section, frozen=True, kw_only=True):
    path: Path | None = None


class PrometheusConfig(Section, frozen=True, kw_only=True):
    """``dcgm_names``: the names of dcgm-exporter's default list as well."""

    dcgm_names: bool = False
    workload_labels: Literal["join", "inline"] = "join"


class ExportersConfig(Section, frozen=True, kw_only=True):
    prometheus: PrometheusConfig = PrometheusConfig()
    jsonl: JsonlConfig = JsonlConfig()


class Config(Section, frozen=True, kw_only=True):
    http: HttpConfig = HttpConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    sources: SourcesConfig = SourcesConfig()
    attribution: AttributionConfig = AttributionConfig()
    detectors: DetectorsConfig = DetectorsConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    triggers: TriggersConfig = TriggersConfig()
    store: StoreConfig = StoreConfig()
    exporters: ExportersConfig = ExportersConfig()


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration of ``path`` (None: zero configuration) with the environment on top.

    Raises UsageError with one line that names the key, the value and what would be right.
    """
    origin = str(path) if path else "the environment"
    tree = read_yaml(path) if path else {}
    overlay(tree, environ)
    return parse(tree, origin)


def parse(tree: dict[str, Any], origin: str) -> Config:
    """The configuration of a tree that came from ``origin``. Raises UsageError as ``load``."""
    # A section whose keys are all commented out is an empty one.
    tree = {key: {} if value is None else value for key, value in tree.items()}
    try:
        return convert(tree, Config)
    except NotConvertibleError as error:
        first, *others = error.mistakes
        more = f" (and {len(others)} more)" if others else ""
        raise UsageError(f"{origin}: {first}{more}") from error


def as_tree(config: Config) -> dict[str, Any]:
    """What YAML and JSON can hold, and ``parse`` reads."""
    tree: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    return tree
