"""From the alerts of one job and kind, and the kind's recipe, to one request for a capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from warpwatch_capturing.alerts.targets import AlertTarget, Settled
from warpwatch_capturing.board import LiveRank
from warpwatch_capturing.config import RecipeConfig
from warpwatch_capturing.triggers.recipes import healthy_peer
from warpwatch_telemetry.alerts import NO_RECIPE, Alert
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import CaptureRequest

Recipes = Mapping[str, RecipeConfig | None]

# What no recipe says: ranks that are named are captured alone.
_PLAIN = RecipeConfig(ranks="culprit")


def request_for(
    targets: Sequence[AlertTarget],
    alerts: Sequence[Alert],
    recipes: Recipes,
    local: Mapping[int, LiveRank],
    active: Iterable[Anomaly],
) -> CaptureRequest:
    """One request for targets of the same job, kind and capture, with the union of their ranks.

    ``alerts``: that have these targets; ``local``: the job's live ranks here; ``active``: all
    anomalies that are. Raises Settled where the kind's recipe is switched off.
    """
    first = targets[0]
    recipe = _recipe(first, recipes)
    return CaptureRequest(
        **first.job.fields(),
        kind=first.capture or recipe.kind,
        trigger="alert",
        ranks=_ranks(targets, recipe, local, active),
        steps=recipe.steps,
        options=tuple(sorted(recipe.options)),
        reason=f"alert {alerts[0].name}",
        anomaly_kind=first.kind,
        alerts=tuple(dict.fromkeys(alert.key for alert in alerts)),
    )


def _recipe(target: AlertTarget, recipes: Recipes) -> RecipeConfig:
    if target.capture is not None or target.kind is None or target.kind not in recipes:
        return _PLAIN
    recipe = recipes[target.kind]
    if recipe is None:
        raise Settled(NO_RECIPE, f"triggers.recipes: {target.kind} is switched off")
    return recipe


def _ranks(
    targets: Sequence[AlertTarget],
    recipe: RecipeConfig,
    local: Mapping[int, LiveRank],
    active: Iterable[Anomaly],
) -> tuple[int, ...] | None:
    """None: all that are here, also where one alert names none."""
    named = [target.ranks for target in targets if target.ranks is not None]
    if recipe.ranks == "all" or len(named) < len(targets):
        return None
    culprits = frozenset[int]().union(*named)
    peers: set[int] = set()
    if recipe.ranks == "culprit_and_peer":
        sick = [_anomaly(targets[0], rank) for rank in culprits]
        found = [healthy_peer(one, local, [*active, *sick]) for one in sick]
        peers = {peer for peer in found if peer is not None}
    return tuple(sorted(culprits | peers))


def _anomaly(target: AlertTarget, rank: int) -> Anomaly:
    """What the alert is about, as far as its labels say."""
    kind = str(target.kind)
    return Anomaly(0.0, "warning", "", rank=rank, id="", kind=kind, **target.job.fields())
