"""Reads an agent or a fleet over its API, and makes rows of text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from rich.text import Text

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli.capture import outcome_of
from warpwatch_daemon.cli.status import anomaly_line
from warpwatch_runtime.quantities import NO_VALUE, gibibytes, plural, rate, seconds, text
from warpwatch_serving.page import devices as gpu
from warpwatch_serving.page.findings import SEVERITIES, unseen
from warpwatch_telemetry.catalogue import series_key
from warpwatch_telemetry.metric import DEVICE_PRECEDENCE
from warpwatch_telemetry.samples import SourceHealth

Document = Mapping[str, Any]
RankKey = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """The lists of the API. time: wall clock in seconds; url: of the server.

    phases: the shares of phases in the steps since the last reading, by rank.
    sources: those of an agent, or the agents of a fleet.
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
        """Return the entries with ``words`` in the name of their job, owner or node."""
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


class TopClient:
    """Reads the API. Every method may wait for it, and raises WarpwatchError, Refused among them.

    connect: called again after a failure, since a starting daemon may use its socket now.
    """

    def __init__(self, connect: Callable[[], ApiClient]) -> None:
        self._connect = connect
        self._api: ApiClient | None = None
        self._before: dict[RankKey, tuple[float, Mapping[str, float]]] = {}
        self._phases: dict[RankKey, Mapping[str, float]] = {}

    def read(self) -> Reading:
        api = self._api or self._connect()
        self._api = None
        parts = ("devices", "ranks", "anomalies", "captures")
        said = {part: api.get(f"/api/v1/{part}")[part] for part in parts}
        sources = msgspec.convert(api.get("/readyz", accepted=503)["sources"], list[SourceHealth])
        self._api = api
        self._follow(said["ranks"])
        return Reading(time.time(), api.where, **said, phases=dict(self._phases), sources=sources)

    def request_capture(self, rank: Document) -> Document:
        """Request a capture of the rank's job."""
        body = {"job": rank["job"], "owner": rank["owner"], "reason": "asked for in warpwatch top"}
        asked: Document = (self._api or self._connect()).post("/api/v1/captures", body)
        return asked

    def _follow(self, ranks: list[Document]) -> None:
        """Compare totals with the last ones; a rank without a new step keeps its shares."""
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


WIDE = 120
MAX_ROWS = 500
BAR_CHARS = {False: 16, True: 40}
# A bar of phases: one letter each, and its colour of sixteen.
PHASES = {
    "data_wait": ("d", "yellow"),
    "h2d": ("h", "magenta"),
    "forward": ("f", "green"),
    "backward": ("b", "blue"),
    "comm": ("c", "red"),
    "optimizer": ("o", "cyan"),
    "checkpoint": ("k", "white"),
    "eval": ("e", "white"),
}
LEGEND = " d data  h h2d  f forward  b backward  c comm  o optimizer  k checkpoint e eval"
_ALARM, _WARN = "bold red", "yellow"
_SEVERITY = {"info": "", "warning": _WARN, "critical": _ALARM}

Row = Sequence[Text]


def headline(reading: Reading) -> str:
    active = [one for one in reading.anomalies if one["end_time"] is None]
    counts = (
        plural(len(reading.devices), "GPU"),
        plural(len(reading.ranks), "rank"),
        plural(len(active), "active anomaly", "active anomalies"),
    )
    agents = unseen(reading.sources)
    return ", ".join((*filter(None, [agents.sentence]), *counts))


# --- GPUs ---


def device_columns(wide: bool) -> tuple[str, ...]:
    more = ("Clock", "Throttled", "Name") if wide else ()
    return ("GPU", "Use", "Memory", "Power", "Temp", *more, "Who")


def device_rows(reading: Reading, wide: bool) -> Iterator[tuple[str, Row]]:
    who: dict[str, list[str]] = {}
    for rank in reading.ranks:
        if rank["device"] and rank["status"] in ("running", "stopped"):
            who.setdefault(rank["device"], []).append(f"{rank['job']} {rank['name']}")
    named = {one["device"] for one in reading.anomalies if one["end_time"] is None}
    found = [(one, _known(one)) for one in reading.devices]

    def place(one: tuple[Document, gpu.Values]) -> tuple[bool, bool]:
        device, known = one
        return device["up"], not (device["uuid"] in named or _is_hot(device, known))

    for device, known in sorted(found, key=place)[:MAX_ROWS]:
        yield device["uuid"], _device(device, known, ", ".join(who.get(device["uuid"], [])), wide)


def _known(device: Document) -> gpu.Values:
    values = {series_key(name): value for name, value in device["values"].items()}
    return {key: value for key, value in values.items() if value is not None}


def _is_hot(device: Document, known: gpu.Values) -> bool:
    is_held = gpu.temperature(known).hot or gpu.throttling(known).hot
    return is_held or any(gpu.xids(known, device["time"]))


def _device(device: Document, known: gpu.Values, who: str, wide: bool) -> Row:
    # A fleet's source of a device is its node.
    node = "" if device["source"] in DEVICE_PRECEDENCE else device["source"]
    index = " ".join(filter(None, (node, str(device["index"]), device["gpu_instance"])))
    if not device["up"]:
        empty = [Text("")] * (len(device_columns(wide)) - 2)
        return [Text(index), *empty, Text(f"! {device['reason'] or 'down'}", _ALARM)]
    heat, held, use = gpu.temperature(known), gpu.throttling(known), gpu.utilization(known)
    xid = any(gpu.xids(known, device["time"]))
    shown: list[Text] = [
        Text(index),
        Text(use.shown, justify="right"),
        _of(gpu.memory(known)),
        _of(gpu.power(known)),
        Text(heat.shown + ("!" if heat.hot else ""), _ALARM if heat.hot else "", justify="right"),
    ]
    if wide:
        shown += [_of(gpu.clock(known)), Text(held.shown, _WARN if held.hot else "")]
        shown.append(Text(text(device["name"], 34)))
    notes = ["XID"] * xid + [held.shown] * (held.hot and not wide) + [text(who, 60)]
    return [*shown, Text(" ".join(filter(None, notes)), _WARN if xid else "")]


def _of(value: gpu.Gauge) -> Text:
    mark = "!" if value.hot else ""
    return Text(f"{value.shown} {value.detail}{mark}".strip(), _WARN if value.hot else "")


# --- ranks ---


def rank_columns(wide: bool) -> tuple[str, ...]:
    more = ("Steps/s", "Memory", "Node") if wide else ()
    return ("Job", "Rank", "Step", "Time", "Tokens/s", "Phases", *more, "State")


def rank_rows(reading: Reading, wide: bool) -> Iterator[tuple[RankKey, Row]]:
    """Yield ranks in trouble, training ranks, then ended ones."""
    named = {
        (one["owner"], one["job"], one["run"], one["rank"])
        for one in reading.anomalies
        if one["end_time"] is None
    }

    def place(rank: Document) -> tuple[bool, bool, str, int]:
        key = (rank["owner"], rank["job"], rank["run"], rank["rank"])
        is_troubled = key in named or rank["status"] in ("stopped", "died")
        return not is_troubled, rank["status"] == "exited", rank["job"], rank["rank"]

    for rank in sorted(reading.ranks, key=place)[:MAX_ROWS]:
        yield rank_key(rank), _rank(rank, reading.phases.get(rank_key(rank), {}), wide)


def _rank(rank: Document, phases: Mapping[str, float], wide: bool) -> Row:
    recent, tokens = rank["recent_s"], rank["tokens_per_s"]
    status, reason = rank["status"], rank["silent_reason"]
    trouble = {"running": "", "exited": "dim"}.get(status, _ALARM)
    said = status if not reason or reason in (status, "unknown") else f"{status}: {reason}"
    shown: list[Text] = [
        Text(text(rank["job"], 30 if wide else 14)),
        Text(text(rank["name"], 12), justify="right"),
        Text(NO_VALUE if rank["step"] is None else str(rank["step"]), justify="right"),
        Text(seconds(statistics.median(recent) if recent else None), justify="right"),
        Text(rate(tokens, "").removesuffix(" /s") if tokens else NO_VALUE, justify="right"),
        bar(phases, BAR_CHARS[wide]),
    ]
    if wide:
        pace = rank["steps_per_s"]
        shown.append(Text(f"{pace:.2f}" if pace else NO_VALUE, justify="right"))
        shown.append(Text(gibibytes(rank["memory_allocated_bytes"]), justify="right"))
        shown.append(Text(text(rank["host"], 24)))
    return [*shown, Text(("! " if trouble == _ALARM else "") + text(said, 24), trouble)]


def bar(phases: Mapping[str, float], width: int) -> Text:
    """Return the shares of a step, a letter for each ``1/width``; dots are the rest."""
    shown, at = Text(), 0.0
    for name, (letter, colour) in PHASES.items():
        start, at = at, min(1.0, at + phases.get(name, 0.0))
        shown.append(letter * (round(at * width) - round(start * width)), colour)
    shown.append("." * (width - len(shown)), "dim")
    return shown


# --- what was found ---


def finding_lines(reading: Reading, limit: int) -> list[Text]:
    """Return the newest capture, active anomalies, the worst first, then closed ones."""

    def place(one: Document) -> tuple[bool, int, float]:
        is_over = one["end_time"] is not None
        return is_over, 0 if is_over else SEVERITIES.index(one["severity"]), -one["time"]

    order = sorted(reading.anomalies, key=place)
    lines = [capture_line(one) for one in reading.captures[-1:]]
    lines += [_anomaly(one, reading.time) for one in order[: limit - len(lines)]]
    return lines or [Text("no anomaly, no capture")]


def _anomaly(anomaly: Document, now: float) -> Text:
    tone = _SEVERITY[anomaly["severity"]] if anomaly["end_time"] is None else "dim"
    return Text(text(anomaly_line(anomaly, now), 400), tone)


def capture_line(capture: Document) -> Text:
    diagnosis: Mapping[str, Any] = capture["diagnosis"] or {}
    ranks = capture["ranks"]
    states = {one["state"] for one in ranks}
    running = f"running, {len(ranks)} ranks {'/'.join(sorted(states))}"
    how = outcome_of(capture) if capture["outcome"] else running
    verdict = f": {diagnosis['verdict']}: {diagnosis.get('summary', '')}" if diagnosis else ""
    return Text(text(f"  capture of {capture['request']['job']} {how}{verdict}", 400))
