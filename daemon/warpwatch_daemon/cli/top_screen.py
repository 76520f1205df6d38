"""The screen of `warpwatch top`: reads the API, makes rows of text, shows them in the terminal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli.status import anomaly_line, capture_line, read_lists, to_state
from warpwatch_runtime.quantities import NO_VALUE, gibibytes, plural, rate, seconds, text
from warpwatch_serving.bodies import PageFilters
from warpwatch_serving.page import devices as gpu
from warpwatch_serving.page.findings import unseen, worst_first
from warpwatch_serving.page.selection import Selection
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import WarpwatchError
from warpwatch_telemetry.metric import DEVICE_PRECEDENCE
from warpwatch_telemetry.samples import DeviceSample
from warpwatch_telemetry.state import RankKey, RankState, State


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a server. url: the server's.

    phases: the shares of phases in the steps since the last reading, by rank.
    """

    state: State
    url: str
    phases: Mapping[RankKey, Mapping[str, float]] = field(default_factory=dict)

    def narrowed(self, words: str) -> Reading:
        """Return the part with ``words`` in the name of a job, owner or node."""
        wanted = PageFilters(q=words[:MAX_SEARCHED] or None)
        return replace(self, state=Selection(self.state, wanted).state)


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
        state = to_state(read_lists(api), time.time())
        self._api = api
        self._follow(state.ranks)
        return Reading(state, api.where, dict(self._phases))

    def request_capture(self, rank: RankState) -> Capture:
        body = {**rank.job_id.fields(), "reason": "asked for in warpwatch top"}
        asked = (self._api or self._connect()).post("/api/v1/captures", body)
        return msgspec.convert(asked, Capture)

    def _follow(self, ranks: Sequence[RankState]) -> None:
        """Compare totals with the last ones; a rank without a new step keeps its shares."""
        totals = {one.key: (one.durations.sum, one.phases_s) for one in ranks}
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
# As long as the page's own search.
MAX_SEARCHED = 100
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


def headline(state: State) -> str:
    counts = (
        plural(len(state.devices), "GPU"),
        plural(len(state.ranks), "rank"),
        plural(len(worst_first(state)), "active anomaly", "active anomalies"),
    )
    return ", ".join((*filter(None, [unseen(state.sources).sentence]), *counts))


# --- GPUs ---


def device_columns(wide: bool) -> tuple[str, ...]:
    more = ("Clock", "Throttled", "Name") if wide else ()
    return ("GPU", "Use", "Memory", "Power", "Temp", *more, "Who")


def device_rows(state: State, wide: bool) -> Iterator[tuple[str, Row]]:
    users = gpu.users(state)
    named = {one.device for one in worst_first(state)}

    def place(sample: DeviceSample) -> tuple[bool, bool]:
        return sample.up, not (sample.device.uuid in named or _is_hot(sample))

    for sample in sorted(state.devices, key=place)[:MAX_ROWS]:
        uuid = sample.device.uuid
        yield uuid, _device(sample, ", ".join(users.get(uuid, [])), wide)


def _is_hot(sample: DeviceSample) -> bool:
    is_held = gpu.temperature(sample.values).hot or gpu.throttling(sample.values).hot
    return is_held or any(gpu.xids(sample.values, sample.time))


def _device(sample: DeviceSample, users: str, wide: bool) -> Row:
    device, known = sample.device, sample.values
    # A fleet's source of a device is its node.
    node = "" if sample.source in DEVICE_PRECEDENCE else sample.source
    index = " ".join(filter(None, (node, str(device.index), device.gpu_instance)))
    if not sample.up:
        empty = [Text("")] * (len(device_columns(wide)) - 2)
        return [Text(index), *empty, Text(f"! {sample.reason or 'down'}", _ALARM)]
    heat, held, use = gpu.temperature(known), gpu.throttling(known), gpu.utilization(known)
    xid = any(gpu.xids(known, sample.time))
    shown: list[Text] = [
        Text(index),
        Text(use.shown, justify="right"),
        _of(gpu.memory(known)),
        _of(gpu.power(known)),
        Text(heat.shown + ("!" if heat.hot else ""), _ALARM if heat.hot else "", justify="right"),
    ]
    if wide:
        shown += [_of(gpu.clock(known)), Text(held.shown, _WARN if held.hot else "")]
        shown.append(Text(text(device.name, 34)))
    notes = ["XID"] * xid + [held.shown] * (held.hot and not wide) + [text(users, 60)]
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
    state = reading.state
    named = {(one.job_id, one.rank) for one in worst_first(state)}

    def place(rank: RankState) -> tuple[bool, bool, str, int]:
        is_troubled = (rank.job_id, rank.rank) in named or rank.status in ("stopped", "died")
        return not is_troubled, rank.status == "exited", rank.job, rank.rank

    for rank in sorted(state.ranks, key=place)[:MAX_ROWS]:
        yield rank.key, _rank(rank, reading.phases.get(rank.key, {}), wide)


def _rank(rank: RankState, phases: Mapping[str, float], wide: bool) -> Row:
    recent, tokens = rank.recent_s, rank.tokens_per_s
    status, reason = rank.status, rank.silent_reason
    trouble = {"running": "", "exited": "dim"}.get(status, _ALARM)
    said = status if not reason or reason in (status, "unknown") else f"{status}: {reason}"
    if rank.serve is not None and status == "running":
        said = "idle" if rank.serve.idle else rank.serve.role
    shown: list[Text] = [
        Text(text(rank.job, 30 if wide else 14)),
        Text(text(rank.name, 12), justify="right"),
        Text(NO_VALUE if rank.step is None else str(rank.step), justify="right"),
        Text(seconds(statistics.median(recent) if recent else None), justify="right"),
        Text(rate(tokens, "").removesuffix(" /s") if tokens else NO_VALUE, justify="right"),
        bar(phases, BAR_CHARS[wide]),
    ]
    if wide:
        pace = rank.steps_per_s
        shown.append(Text(f"{pace:.2f}" if pace else NO_VALUE, justify="right"))
        shown.append(Text(gibibytes(rank.memory_allocated_bytes), justify="right"))
        shown.append(Text(text(rank.host, 24)))
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


def finding_lines(state: State, limit: int) -> list[Text]:
    """Return the newest capture, active anomalies, the worst first, then closed ones."""
    closed = [one for one in state.anomalies if one.end_time is not None]
    order = [*worst_first(state), *sorted(closed, key=lambda one: -one.time)]
    lines = [capture_text(one) for one in state.captures[-1:]]
    lines += [_anomaly(one, state) for one in order[: limit - len(lines)]]
    return lines or [Text("no anomaly, no capture")]


def _anomaly(anomaly: Anomaly, state: State) -> Text:
    tone = _SEVERITY[anomaly.severity] if anomaly.end_time is None else "dim"
    return Text(text(anomaly_line(anomaly, state), 400), tone)


def capture_text(capture: Capture) -> Text:
    return Text(text(capture_line(capture), 400))


# --- the terminal ---

_CSS = """
Screen { layout: vertical; }
#head { height: 1; text-style: bold; }
#head.away { text-style: bold reverse; }
DataTable { height: auto; scrollbar-size-horizontal: 0; }
DataTable, DataTable > .datatable--header { background: ansi_default; color: ansi_default; }
DataTable > .datatable--cursor {
    background: ansi_default; color: ansi_default; text-style: reverse;
}
#gpus { max-height: 45%; }
#legend { height: 1; text-style: dim; }
#ranks { height: 1fr; min-height: 3; }
#findings { height: auto; max-height: 8; margin-top: 1; }
#said { height: 1; }
#search { display: none; height: 1; border: none; padding: 0; }
#search.open { display: block; }
"""


# Longer ones are rare.
MAX_WORD = 16


class Top(App[None]):
    """The terminal: three parts below each other. interval_s: between two readings."""

    CSS = _CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "capture", "Capture the rank's job"),
        Binding("slash", "search", "Search"),
        Binding("escape", "end_search", "All", show=False),
        Binding("tab", "focus_next", "Next table"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, reader: TopClient, interval_s: float) -> None:
        # Sixteen colours of the terminal's own; with NO_COLOR, none at all.
        super().__init__(ansi_color=True)
        self._reader = reader
        self._interval_s = interval_s
        # As it was read, and as it is shown.
        self._whole: Reading | None = None
        self._reading: Reading | None = None
        self._away_since: float | None = None
        self._asked_for = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        yield DataTable(id="gpus", cursor_type="none", cell_padding=1)
        yield Static(LEGEND, id="legend", markup=False)
        yield DataTable(id="ranks", cursor_type="row", cell_padding=1)
        yield Static("", id="findings", markup=False)
        yield Static("", id="said", markup=False)
        yield Input(id="search", placeholder="job, owner or node; Esc shows all")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#ranks").focus()
        self.poll()
        self.set_interval(self._interval_s, self.poll)

    # --- reading ---

    @work(thread=True, exclusive=True, group="poll")
    def poll(self) -> None:
        try:
            reading = self._reader.read()
        except WarpwatchError as error:
            self.call_from_thread(self._show_away, str(error))
        else:
            self.call_from_thread(self._show, reading)

    def action_capture(self) -> None:
        rank = self._selected()
        if rank is None:
            self._say("there is no rank to capture")
        else:
            self._say(f"asking for a capture of {rank.job} …")
            self._capture(rank)

    @work(thread=True, exclusive=True, group="capture")
    def _capture(self, rank: RankState) -> None:
        try:
            capture = self._reader.request_capture(rank)
        except WarpwatchError as error:
            said = f"no capture: {error}"
        else:
            self._asked_for = capture.id
            said = capture_text(capture).plain.strip()
        self.call_from_thread(self._say, said)

    def _selected(self) -> RankState | None:
        table = self.query_one("#ranks", DataTable)
        if self._reading is None or not table.row_count:
            return None
        keys = [key for key, _ in rank_rows(self._reading, False)]
        chosen = keys[min(table.cursor_row, len(keys) - 1)]
        return next(one for one in self._reading.state.ranks if one.key == chosen)

    # --- searching ---

    def action_search(self) -> None:
        self.query_one("#search").add_class("open").focus()

    def action_end_search(self) -> None:
        search = self.query_one("#search", Input)
        search.value = ""
        search.remove_class("open")
        self.query_one("#ranks").focus()

    def on_input_changed(self) -> None:
        self._draw()

    def on_input_submitted(self) -> None:
        self.query_one("#ranks").focus()

    # --- showing ---

    def on_resize(self) -> None:
        self.call_later(self._draw)

    def _show(self, reading: Reading) -> None:
        self._whole, self._away_since = reading, None
        self._draw()

    def _draw(self) -> None:
        if self._whole is None:
            return
        self._reading = reading = self._whole.narrowed(self.query_one("#search", Input).value)
        wide = self.size.width >= WIDE
        if self._away_since is None:
            self._head(f"{headline(reading.state)}  {reading.url}", away=False)
        _fill(self.query_one("#gpus", DataTable), device_columns(wide),
              device_rows(reading.state, wide))  # fmt: skip
        _fill(self.query_one("#ranks", DataTable), rank_columns(wide),
              rank_rows(reading, wide))  # fmt: skip
        limit = 3 if self.size.height < 40 else 8
        # Two lines each, where words are not divided.
        width = 2 * self.size.width - MAX_WORD
        lines = [_cut(line, width) for line in finding_lines(reading.state, limit)]
        self.query_one("#findings", Static).update(Text("\n").join(lines))
        for own in (one for one in reading.state.captures if one.id == self._asked_for):
            self._say(capture_text(own).plain.strip())

    def _show_away(self, why: str) -> None:
        """Keep the last rows, and tell their age."""
        now = time.time()
        self._away_since = self._away_since or now
        self._head(f"AWAY for {seconds(now - self._away_since)}: {why}", away=True)

    def _head(self, said: str, *, away: bool) -> None:
        head = self.query_one("#head", Static)
        clock = time.strftime("%H:%M:%S")
        head.update(_cut(Text(f"{clock}  {said}"), self.size.width))
        head.set_class(away, "away")

    def _say(self, said: str) -> None:
        self.query_one("#said", Static).update(_cut(Text(text(said, 400)), self.size.width))


def _fill(
    table: DataTable[Text], columns: Iterable[str], found: Iterable[tuple[Hashable, Row]]
) -> None:
    """Written anew; the cursor stays where it was."""
    row, scroll_y = table.cursor_row, table.scroll_y
    table.clear(columns=True)
    table.add_columns(*columns)
    table.add_rows(cells for _, cells in found)
    table.move_cursor(row=min(row, max(0, table.row_count - 1)), scroll=False)
    table.scroll_to(y=scroll_y, animate=False)


def _cut(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(max(1, width), overflow="ellipsis")
    return line
