"""`anomalies` and `triggers`: how long an anomaly lasts, and what it may have captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from warpwatch_daemon.config import quiet_hours
from warpwatch_telemetry.fields import (
    Age,
    AnomalyKind,
    AtLeastOne,
    Count,
    NotNegative,
    Section,
    Timeout,
)

Option = Literal["stacks", "shapes", "memory"]


class RecipeConfig(Section, frozen=True, kw_only=True):
    """What an anomaly of a kind captures.

    ``ranks``: all that this daemon sees, the one that the anomaly names (all if it names none), or
    that one and one healthy peer to compare it with. ``steps``: five are what PyTorch's own
    examples record; each more costs as much again. ``options``: what a capture of kind torch
    records besides, at a price; ``options_on_repeat``: only if the job was captured for the same
    kind within a day before, because then the cheap capture was not enough.
    """

    kind: Literal["torch", "memory", "stacks", "nsys"] = "torch"
    ranks: Literal["all", "culprit", "culprit_and_peer"] = "all"
    steps: Annotated[int, Meta(ge=1, le=100)] = 5
    options: tuple[Option, ...] = ()
    options_on_repeat: tuple[Option, ...] = ()


def _default_recipes() -> dict[str, RecipeConfig | None]:
    """Kinds that say all that a capture could (crash, oom, those of devices) have none."""
    again: tuple[Option, ...] = ("stacks",)
    return {
        "step_regression": RecipeConfig(options_on_repeat=again),
        "step_drift": RecipeConfig(options_on_repeat=again),
        "step_spikes": RecipeConfig(options_on_repeat=again),
        "data_stall": RecipeConfig(ranks="culprit_and_peer", options_on_repeat=again),
        "comm_slow": RecipeConfig(),
        "straggler": RecipeConfig(ranks="culprit_and_peer", options_on_repeat=again),
        "gc_pause": RecipeConfig(ranks="culprit"),
        "hang": RecipeConfig(kind="stacks"),
        "memory_leak": RecipeConfig(kind="memory", ranks="culprit"),
        "memory_pressure": RecipeConfig(kind="memory", ranks="culprit"),
    }


def over_defaults(node: Any) -> Any:
    """The recipes that are written, on top of the defaults: a key that is not there stays."""
    if not isinstance(node, Mapping):
        return node
    defaults = msgspec.to_builtins(_default_recipes())
    return defaults | {
        kind: {**defaults.get(kind, {}), **recipe} if isinstance(recipe, Mapping) else recipe
        for kind, recipe in node.items()
    }


def check_quiet_hours(node: Any) -> Any:
    """A list of spans, or a single one. Raises ValueError with what would be right."""
    if isinstance(node, str):
        node = [node]
    if isinstance(node, list):
        for written in node:
            quiet_hours.parse(str(written))
    return node


class BaselineConfig(Section, frozen=True, kw_only=True):
    """One capture of a rank of a healthy job, which later diagnoses compare with.

    It waits for ``after_steps`` steps of the rank (warm-up, compilation and the first evaluation
    are over in most jobs) and for ``after_s`` of the job's life: what ends within ten minutes is
    not worth it. ``captures_per_day``: of all jobs together, so that a sweep of short jobs under
    ever new names is not profiled all day; one an hour on average, as of anomalies.
    """

    enabled: bool = True
    after_steps: Count = 200
    after_s: NotNegative = 600.0
    captures_per_day: Count = 24
    steps: Annotated[int, Meta(ge=1, le=100)] = 5


class TriggersConfig(Section, frozen=True, kw_only=True):
    """What may be captured by itself.

    ``captures_per_hour``: a burst of different findings; ``captures_per_day``: one an hour on
    average. ``cooldown_s``: per job and kind, long enough to see what a capture has changed.
    ``other_capture_s``: how long a slowdown that may only be waiting for another node's capture
    must last; captures of five steps are over by then. ``max_events``: of a rank's trace; more
    steps than bring so many are not recorded.
    """

    captures_per_hour: Count = 4
    captures_per_day: Count = 24
    cooldown_s: NotNegative = 600.0
    quiet_hours: Annotated[tuple[str, ...], check_quiet_hours] = ()
    dry_run: bool = False
    other_capture_s: NotNegative = 60.0
    arm_timeout_s: Timeout = 60.0
    capture_timeout_s: Timeout = 120.0
    max_events: AtLeastOne = 1_000_000
    baseline: BaselineConfig = BaselineConfig()
    recipes: Annotated[dict[AnomalyKind, RecipeConfig | None], over_defaults] = msgspec.field(
        default_factory=_default_recipes
    )


class AnomaliesConfig(Section, frozen=True, kw_only=True):
    """How long an anomaly lives, and how much of the past is kept beside the captures.

    ``hold_s``: how long an event (crash, oom, xid, …) stays active after its last one; long enough
    that a page in the night still finds it. ``reopen_s``: what comes back so soon after its end is
    the same anomaly; twice a usual scrape and alert interval of 60 s. ``max_history`` and
    ``max_age``: of the stored anomalies; about 5 kB each, and one month for comparing with.
    """

    hold_s: NotNegative = 600.0
    reopen_s: NotNegative = 120.0
    max_history: AtLeastOne = 10_000
    max_age: Age = 30 * 86400.0
