"""The sections `triggers`, `store` and `remote_store`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from warpwatch_telemetry.sections import (
    REAL,
    WHOLE,
    Age,
    AnomalyKind,
    AtLeastOne,
    Boolean,
    Bytes,
    Count,
    NotNegative,
    Section,
)

Option = Literal["stacks", "shapes", "memory"]
Steps = Annotated[int, Field(ge=1, le=100), WHOLE]


class RecipeConfig(Section):
    """The capture for a kind of anomaly.

    ``ranks``: all that this daemon sees, the one that the anomaly names (all if it names none), or
    that one and one healthy peer to compare it with. ``steps``: five are what PyTorch's own
    examples record; each more costs as much again. ``options``: more that a
    capture of kind torch records, at a cost.
    """

    kind: Literal["torch", "memory", "stacks", "nsys"] = "torch"
    ranks: Literal["all", "culprit", "culprit_and_peer"] = "all"
    steps: Steps = 5
    options: tuple[Option, ...] = ()


def _default_recipes() -> dict[str, RecipeConfig | None]:
    """Return the built-in recipes. Crash, oom, a queue and faults of devices need none."""
    return {
        "step_regression": RecipeConfig(),
        "step_drift": RecipeConfig(),
        "step_spikes": RecipeConfig(),
        "run_regression": RecipeConfig(),
        "data_stall": RecipeConfig(ranks="culprit_and_peer"),
        "comm_slow": RecipeConfig(),
        "straggler": RecipeConfig(ranks="culprit_and_peer"),
        "gc_pause": RecipeConfig(ranks="culprit"),
        "latency_regression": RecipeConfig(),
        "kv_thrash": RecipeConfig(),
        "hang": RecipeConfig(kind="stacks"),
        # Enough steps to contain a leak at every tenth batch.
        "memory_leak": RecipeConfig(kind="memory", ranks="culprit", steps=20),
        "memory_pressure": RecipeConfig(kind="memory", ranks="culprit"),
    }


def over_defaults(node: Any) -> Any:
    """Return the configured recipes on top of the built-in ones."""
    if not isinstance(node, Mapping):
        return node
    defaults = {kind: recipe.model_dump() for kind, recipe in _default_recipes().items() if recipe}
    return defaults | {
        kind: {**defaults.get(kind, {}), **recipe} if isinstance(recipe, Mapping) else recipe
        for kind, recipe in node.items()
    }


def check_quiet_hours(node: Any) -> Any:
    """Return a list of spans. Raise ValueError with an example for an invalid one."""
    if isinstance(node, str):
        node = [node]
    if isinstance(node, list):
        for written in node:
            parse_span(str(written))
    return node


class BaselineConfig(Section):
    """One capture of a rank of a healthy job, which later diagnoses compare with.

    It waits for ``after_steps`` steps of the rank: most jobs have then finished warm-up,
    compilation and the first evaluation. It also waits until the job is ``after_s`` old: a job of
    less than ten minutes is not worth it.
    """

    enabled: Boolean = True
    after_steps: Count = 200
    after_s: NotNegative = 600.0


class TriggersConfig(Section):
    """The limits on automatic captures.

    ``captures_per_hour``: a burst of different findings; ``captures_per_day``: one an hour on
    average. ``cooldown_s``: per job and kind, long enough to see what a capture has changed.
    ``arm_timeout_s``: a rank that has not begun the start step by then is left out.
    """

    captures_per_hour: Count = 4
    captures_per_day: Count = 24
    cooldown_s: NotNegative = 600.0
    quiet_hours: Annotated[tuple[str, ...], BeforeValidator(check_quiet_hours)] = ()
    dry_run: Boolean = False
    arm_timeout_s: Annotated[float, Field(gt=0, le=3600), REAL] = 60.0
    baseline: BaselineConfig = BaselineConfig()
    recipes: Annotated[dict[AnomalyKind, RecipeConfig | None], BeforeValidator(over_defaults)] = (
        Field(default_factory=_default_recipes)
    )


_WRITTEN = re.compile(r"(\d\d):(\d\d)\s*-\s*(\d\d):(\d\d)(\s*UTC)?")
_DAY_MIN = 24 * 60


@dataclass(frozen=True, slots=True)
class Span:
    """From ``begin_min`` until before ``end_min``, minutes of the day.

    It includes midnight if it ends earlier than it begins. In local time unless ``utc``.
    """

    begin_min: int
    end_min: int
    utc: bool = False

    def holds(self, now: float) -> bool:
        """Return whether the span contains ``now``, a wall clock time in seconds."""
        clock = time.gmtime(now) if self.utc else time.localtime(now)
        minute = 60 * clock.tm_hour + clock.tm_min
        if self.begin_min < self.end_min:
            return self.begin_min <= minute < self.end_min
        return minute >= self.begin_min or minute < self.end_min


def parse_span(text: str) -> Span:
    """Parse ``22:00-06:00`` or ``22:00-06:00 UTC``. Raises ValueError with a correct example."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is not None:
        hours, minutes = (int(match[1]), int(match[3])), (int(match[2]), int(match[4]))
        begin, end = (60 * hour + minute for hour, minute in zip(hours, minutes, strict=True))
        if max(minutes) < 60 and begin < _DAY_MIN and end <= _DAY_MIN and begin != end:
            return Span(begin, end, match[5] is not None)
    raise ValueError("expected two times of day such as 22:00-06:00 or 22:00-06:00 UTC")


def quiet(written: Iterable[str], now: float) -> str | None:
    """Return the first span that contains ``now``, as it was written."""
    return next((text for text in written if parse_span(text).holds(now)), None)


# S3, Google Cloud Storage, Azure Blob Storage, or a folder that many nodes mount. A secret in the
# query would be shown with the address of each capture.
_REMOTE = r"^(file:///|(s3a?|gs|az|adl|azure|abfss?)://)[^?#\s]+$"


class StoreConfig(Section):
    url: Annotated[str, Field(pattern=r"^file:///")] = "file:///var/lib/warpwatch/captures"
    max_bytes: Bytes = 5 * 2**30
    max_age: Age = 14 * 86400.0
    max_captures: AtLeastOne = 1000


class RemoteStoreConfig(Section):
    """``url``: the address of a folder in an object store, without secrets; null for none."""

    url: Annotated[str, Field(pattern=_REMOTE)] | None = None
