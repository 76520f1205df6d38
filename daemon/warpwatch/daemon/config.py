"""The configuration: typed, every default in one place, every key also an environment variable.

One YAML file, then ``WARPWATCH_SECTION__KEY`` on top. Unknown keys and bad values are refused
with the path, the value and the nearest valid key.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from warpwatch.daemon.errors import UsageError
from warpwatch.telemetry.anomalies import KINDS

ENV_PREFIX = "WARPWATCH_"

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_bytes(value: Any) -> Any:
    """``5GiB`` → 5368709120. Anything that is not such a text is left to pydantic."""
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if isinstance(value, str)
        else None
    )
    if match is None:
        return value
    unit = _UNITS.get(match[2].upper())
    if unit is None:
        raise ValueError(f"unit {match[2]!r} is none of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    return int(float(match[1]) * unit)


def parse_age(value: Any) -> Any:
    """``14d`` → 1209600 seconds."""
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]?)\s*", value) if isinstance(value, str) else None
    )
    if match is None:
        return value
    unit = _AGES.get(match[2] or "s")
    if unit is None:
        raise ValueError(f"unit {match[2]!r} is none of s, m, h, d, w")
    return float(match[1]) * unit


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Age = Annotated[float, BeforeValidator(parse_age), Field(ge=0)]
Interval = Annotated[float, Field(ge=0.1, le=3600)]
Share = Annotated[float, Field(ge=0, le=1)]


def check_listen(value: str) -> str:
    if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[^:\s]*):\d{1,5}", value):
        raise ValueError("an address and a port are needed, such as 127.0.0.1:9400")
    return value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class HttpConfig(Section):
    listen: Annotated[str, AfterValidator(check_listen)] = "127.0.0.1:9400"
    web_config: Path | None = None
    token_file: Path | None = None
    token_required: bool = False


class RendezvousConfig(Section):
    dir: str = "auto"
    inbox: str = "auto"
    poll_interval_s: Interval = 0.2


class NvmlConfig(Section):
    """``mismatch_grace_s``: how long library and driver may differ before the daemon ends."""

    enabled: bool = True
    interval_s: Interval = 1.0
    stuck_after_s: float = Field(5.0, gt=0)
    gpm: bool = True
    mismatch_grace_s: float = Field(60.0, ge=0)


class KernelLogConfig(Section):
    """Where the kernel log cannot be read, XIDs come from the driver's events alone."""

    enabled: bool = True
    path: Path = Path("/dev/kmsg")


class SimulatedConfig(Section):
    enabled: bool = False
    devices: int = Field(8, ge=1, le=64)
    profile: Literal["h100", "a100", "l4"] = "h100"
    interval_s: Interval = 1.0


class HostConfig(Section):
    enabled: bool = True
    interval_s: Interval = 1.0


class ProcessesConfig(Section):
    """Processor time and memory of the processes that use a GPU."""

    enabled: bool = True
    interval_s: Interval = 5.0


class DcgmConfig(Section):
    """``address``: a running host engine's, or ``embedded``. ``bindings``: DCGM's Python folder."""

    enabled: bool = False
    address: str = "localhost:5555"
    bindings: Path | None = None
    interval_s: Interval = 1.0


class DcgmExporterConfig(Section):
    """A running dcgm-exporter, for what NVML cannot give."""

    url: str | None = Field(None, pattern=r"^https?://")
    interval_s: Interval = 10.0


class SourcesConfig(Section):
    nvml: NvmlConfig = NvmlConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    host: HostConfig = HostConfig()
    processes: ProcessesConfig = ProcessesConfig()
    dcgm: DcgmConfig = DcgmConfig()
    dcgm_exporter: DcgmExporterConfig = DcgmExporterConfig()


class AttributionConfig(Section):
    """Whose work runs on the devices.

    ``kubelet_socket``: auto (where it exists), off, or a path. ``slurm``: auto (the processes'
    control groups), off, or a folder with a file for each device UUID that holds its job ids.
    """

    kubelet_socket: str = "auto"
    slurm: str = "auto"
    interval_s: Interval = 10.0


class DetectorConfig(Section):
    enabled: bool = True


class LevelConfig(DetectorConfig):
    """Judging a level by blocks. A block ends at ``block_steps`` steps and ``block_s`` seconds.

    The baseline is learned from ``baseline_blocks`` and used from ``ready_blocks`` on; a level
    counts after ``hold_blocks`` in a row, and ``hold_s``, above ``noise_factor`` times the noise
    of past blocks.
    """

    warmup_steps: int = Field(20, ge=0)
    block_steps: int = Field(10, ge=3, le=100)
    block_s: float = Field(1.0, ge=0, le=60)
    baseline_blocks: int = Field(40, ge=4, le=200)
    ready_blocks: int = Field(10, ge=4, le=200)
    hold_blocks: int = Field(3, ge=1)
    hold_s: float = Field(4.0, ge=0)
    noise_factor: float = Field(5.0, gt=0)


class StepRegressionConfig(LevelConfig):
    """``min_effect``: the least rise. A new level that lasted ``accept_*`` is the new normal."""

    min_effect: float = Field(0.05, gt=0, le=10)
    accept_blocks: int = Field(30, ge=4)
    accept_after_s: float = Field(600.0, ge=0)


class RankLevelConfig(LevelConfig):
    """A level of each rank; before there is a baseline, ``start_blocks`` in a row count."""

    start_blocks: int = Field(5, ge=1)


class DataStallConfig(RankLevelConfig):
    """Shares of the step spent in ``data_wait``; ``start_share`` judges without a baseline."""

    block_steps: int = Field(20, ge=3, le=100)
    ready_blocks: int = Field(5, ge=4, le=200)
    hold_blocks: int = Field(2, ge=1)
    min_share: Share = 0.10
    min_rise: float = Field(0.08, gt=0, le=1)
    start_share: float = Field(0.25, gt=0, le=1)


class StragglerConfig(RankLevelConfig):
    """Ratios of a rank's compute to its peers' median.

    ``min_cost``: least share of the step lost; ``start_ratio`` judges without a baseline.
    """

    noise_factor: float = Field(4.0, gt=0)
    min_ratio: float = Field(1.10, gt=1)
    min_cost: float = Field(0.05, gt=0, le=1)
    start_ratio: float = Field(1.25, gt=1)


class HangConfig(DetectorConfig):
    """No step for the longest of ``timeout_s``, ``median_steps`` steps and ``gap_factor`` gaps.

    ``warmup_timeout_s`` holds during a rank's first steps; ``stopped_after_s`` is how long a
    living process may miss its heartbeat.
    """

    timeout_s: float = Field(140.0, gt=0)
    median_steps: float = Field(28.0, gt=0)
    gap_factor: float = Field(1.2, ge=1)
    warmup_steps: int = Field(5, ge=0)
    warmup_timeout_s: float = Field(600.0, ge=0)
    stopped_after_s: float = Field(10.0, gt=0)


class CrashConfig(DetectorConfig):
    """``grace_s``: how long others must live on for a death to be a crash of one rank."""

    grace_s: float = Field(5.0, ge=0)


class DetectorsConfig(Section):
    """One section a kind."""

    step_regression: StepRegressionConfig = StepRegressionConfig()
    data_stall: DataStallConfig = DataStallConfig()
    straggler: StragglerConfig = StragglerConfig()
    hang: HangConfig = HangConfig()
    crash: CrashConfig = CrashConfig()


class RecipeConfig(Section):
    kind: Literal["torch", "stacks"] = "torch"
    steps: int = Field(5, ge=1, le=100)


class TriggersConfig(Section):
    captures_per_hour: int = Field(4, ge=0)
    cooldown_s: float = Field(600, ge=0)
    dry_run: bool = False
    arm_timeout_s: float = Field(60, gt=0, le=3600)
    capture_timeout_s: float = Field(120, gt=0, le=3600)
    recipes: dict[str, RecipeConfig] = {
        "step_regression": RecipeConfig(),
        "data_stall": RecipeConfig(),
        "straggler": RecipeConfig(),
        "hang": RecipeConfig(kind="stacks"),
    }

    @field_validator("recipes")
    @classmethod
    def _known_kinds(cls, recipes: dict[str, RecipeConfig]) -> dict[str, RecipeConfig]:
        for kind in recipes:
            if kind not in KINDS:
                near = difflib.get_close_matches(kind, KINDS, n=1)
                hint = f", did you mean {near[0]!r}" if near else ""
                raise ValueError(f"{kind!r} is no anomaly kind{hint}")
        return recipes


class AnomaliesConfig(Section):
    hold_s: float = Field(600, ge=0)


class StoreConfig(Section):
    url: str = Field("file:///var/lib/warpwatch/captures", pattern=r"^file:///")
    max_bytes: Bytes = 5 * 2**30
    max_age: Age = 14 * 86400.0
    max_captures: int = Field(1000, ge=1)


class JsonlConfig(Section):
    path: Path | None = None


class PrometheusConfig(Section):
    """``dcgm_names``: the names of dcgm-exporter's default list as well."""

    dcgm_names: bool = False
    workload_labels: Literal["join", "inline"] = "join"


class ExportersConfig(Section):
    prometheus: PrometheusConfig = PrometheusConfig()
    jsonl: JsonlConfig = JsonlConfig()


class Config(Section):
    http: HttpConfig = HttpConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    sources: SourcesConfig = SourcesConfig()
    attribution: AttributionConfig = AttributionConfig()
    detectors: DetectorsConfig = DetectorsConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    triggers: TriggersConfig = TriggersConfig()
    store: StoreConfig = StoreConfig()
    exporters: ExportersConfig = ExportersConfig()


# What PyYAML raises for texts of its users: its own errors, bad dates and numbers, deep nesting.
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)


def parse_value(text: str) -> Any:
    """One value as YAML would have it; what is no YAML is a text."""
    try:
        return yaml.safe_load(text)
    except NOT_YAML:
        return text


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration of ``path`` (None: zero configuration) with the environment on top.

    Raises UsageError with one line that names the key, the value and what would be right.
    """
    origin = str(path) if path else "the environment"
    tree = _read_yaml(path) if path else {}
    _overlay(tree, environ)
    return parse(tree, origin)


def parse(tree: dict[str, Any], origin: str) -> Config:
    # A section whose keys are all commented out is an empty one.
    tree = {key: {} if value is None else value for key, value in tree.items()}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"{origin}: {_explain(error)}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except NOT_YAML as error:
        line = " ".join(str(error).split())
        raise UsageError(f"{path}: not YAML: {line}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: a mapping of sections is needed, found {type(tree).__name__}")
    return tree


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    for name, text in environ.items():
        # One without a section is another part's, such as WARPWATCH_DIR.
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        *parents, leaf = name.removeprefix(ENV_PREFIX).lower().split("__")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise UsageError(f"{name}: {parent} is no section")
            node = child
        node[leaf] = parse_value(text)


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][-1]), _keys_beside(first["loc"]), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"{path}: unknown key{hint}{more}"
    return f"{path}: {first['msg']}, not {first['input']!r}{more}"


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Config
    for part in location[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return []
        model = field.annotation
    return list(getattr(model, "model_fields", {}))
