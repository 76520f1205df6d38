"""What an agent or a fleet says now, over its API; it may be away and come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from warpwatch_daemon.api_client import ApiClient
from warpwatch_telemetry.samples import SourceHealth

Document = Mapping[str, Any]
RankKey = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """Lists as the API has them. time: wall clock in seconds; url: who said it.

    phases: of each rank, the share of each phase in its steps since the look before.
    sources: what an agent reads, or the agents that a fleet follows.
    """

    time: float
    url: str
    devices: list[Document]
    ranks: list[Document]
    anomalies: list[Document]
    captures: list[Document]
    phases: Mapping[RankKey, Mapping[str, float]] = field(default_factory=dict)
    sources: Sequence[SourceHealth] = ()

    def narrowed(self, words: str) -> Reading:
        """Return what has ``words`` in the name of its job, owner or node."""
        if not words:
            return self
        words = words.casefold()

        def has(*names: str | None) -> bool:
            return any(words in name.casefold() for name in names if name)

        ranks = [one for one in self.ranks if has(one["job"], one["owner"], one["host"])]
        used, hosts = {one["device"] for one in ranks}, {one["host"] for one in ranks}
        return replace(
            self,
            ranks=ranks,
            devices=[one for one in self.devices if one["uuid"] in used or has(one["source"])],
            anomalies=[
                one
                for one in self.anomalies
                if has(one["job"], one["owner"], one["node"])
                or (one["job"] is None and (one["node"] in hosts or one["device"] in used))
            ],
            captures=[
                one for one in self.captures if has(one["request"]["job"], one["request"]["owner"])
            ],
        )


def rank_key(rank: Document) -> RankKey:
    return rank["owner"], rank["job"], rank["run"], rank["name"]


class Reader:
    """Every method may wait for the other side and raises WarpwatchError, Refused among them.

    connect: made anew after a failure, since a daemon that starts may be at its socket now.
    """

    def __init__(self, connect: Callable[[], ApiClient]) -> None:
        self._connect = connect
        self._api: ApiClient | None = None
        self._before: dict[RankKey, tuple[float, Mapping[str, float]]] = {}
        self._phases: dict[RankKey, Mapping[str, float]] = {}

    def look(self) -> Reading:
        api = self._api or self._connect()
        self._api = None
        parts = ("devices", "ranks", "anomalies", "captures")
        said = {part: api.get(f"/api/v1/{part}")[part] for part in parts}
        sources = msgspec.convert(api.get("/readyz", accepted=503)["sources"], list[SourceHealth])
        self._api = api
        self._follow(said["ranks"])
        return Reading(time.time(), api.where, **said, phases=dict(self._phases), sources=sources)

    def ask_for_capture(self, rank: Document) -> Document:
        """Of the job that the rank is of."""
        body = {"job": rank["job"], "owner": rank["owner"], "reason": "asked for in warpwatch top"}
        asked: Document = (self._api or self._connect()).post("/api/v1/captures", body)
        return asked

    def _follow(self, ranks: list[Document]) -> None:
        """Totals are compared with those before; a rank without a new step keeps its shares."""
        totals = {rank_key(one): (one["durations"]["sum"], one["phases_s"]) for one in ranks}
        for key, (passed_s, phases_s) in totals.items():
            before_s, before = self._before.get(key, (0.0, {}))
            if passed_s < before_s:
                before_s, before = 0.0, {}
            if passed_s > before_s:
                self._phases[key] = {
                    name: max(0.0, seconds - before.get(name, 0.0)) / (passed_s - before_s)
                    for name, seconds in phases_s.items()
                }
        self._phases = {key: shares for key, shares in self._phases.items() if key in totals}
        self._before = totals
