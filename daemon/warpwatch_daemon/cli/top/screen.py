"""The terminal: three parts below each other, and what a key does."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static

from warpwatch_daemon.cli.top import rows
from warpwatch_daemon.cli.top.rows import Reading, TopClient, rank_key
from warpwatch_runtime.quantities import seconds, text
from warpwatch_telemetry.errors import WarpwatchError
from warpwatch_telemetry.state import RankState

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
    """The screen. interval_s: between two readings; after a failure it tries again."""

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
        yield Static(rows.LEGEND, id="legend", markup=False)
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
            said = rows.capture_text(capture).plain.strip()
        self.call_from_thread(self._say, said)

    def _selected(self) -> RankState | None:
        table = self.query_one("#ranks", DataTable)
        ranks = self._reading.state.ranks if self._reading else ()
        if not ranks or not table.row_count:
            return None
        keys = [key for key, _ in rows.rank_rows(self._reading, False)] if self._reading else []
        chosen = keys[min(table.cursor_row, len(keys) - 1)]
        return next(one for one in ranks if rank_key(one) == chosen)

    # --- searching ---

    def action_search(self) -> None:
        self.query_one("#search").add_class("open").focus()

    def action_end_search(self) -> None:
        search = self.query_one("#search", Input)
        search.value = ""
        search.remove_class("open")
        self.query_one("#ranks").focus()

    def on_input_changed(self) -> None:
        if self._whole is not None:
            self._show(self._whole)

    def on_input_submitted(self) -> None:
        self.query_one("#ranks").focus()

    # --- showing ---

    def on_resize(self) -> None:
        if self._whole is not None:
            self._show(self._whole)

    def _show(self, reading: Reading) -> None:
        self._whole, self._away_since = reading, None
        self._reading = reading = reading.narrowed(self.query_one("#search", Input).value)
        wide = self.size.width >= rows.WIDE
        self._head(f"{rows.headline(reading.state)}  {reading.url}", away=False)
        _fill(self.query_one("#gpus", DataTable), rows.device_columns(wide),
              rows.device_rows(reading.state, wide))  # fmt: skip
        _fill(self.query_one("#ranks", DataTable), rows.rank_columns(wide),
              rows.rank_rows(reading, wide))  # fmt: skip
        limit = 3 if self.size.height < 40 else 8
        # Two lines each, where words are not divided.
        width = 2 * self.size.width - MAX_WORD
        lines = [_cut(line, width) for line in rows.finding_lines(reading.state, limit)]
        self.query_one("#findings", Static).update(Text("\n").join(lines))
        own = [one for one in reading.state.captures if one.id == self._asked_for]
        if own:
            self._say(rows.capture_text(own[0]).plain.strip())

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
    table: DataTable[Text], columns: Iterable[str], found: Iterable[tuple[Hashable, rows.Row]]
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
