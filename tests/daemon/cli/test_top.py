"""`warpwatch top` in textual's own terminal, over a real daemon."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from tests.daemon.http.conftest import CAPTURE, NOW, STRAGGLER, node_in_trouble
from tests.loop.node import LoopNode, loop_node
from tests.loop.programs import STEPPING
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch_daemon.api_client import ApiClient, socket_path
from warpwatch_daemon.cli import top_screen
from warpwatch_daemon.cli.status import to_state
from warpwatch_daemon.cli.top_screen import Reading, Top, TopClient
from warpwatch_telemetry.errors import Refused, WarpwatchError
from warpwatch_telemetry.state import State

SMALL, LARGE = (80, 24), (200, 50)
PAUSE_S = 0.1


class Screen:
    def __init__(self, app: Top, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    def cells(self, table: str) -> list[list[str]]:
        found = self.app.query_one(table, DataTable)
        return [[str(cell) for cell in found.get_row_at(row)] for row in range(found.row_count)]

    def line(self, name: str) -> str:
        return str(self.app.query_one(name, Static).render())

    async def until(self, is_so: Callable[[], object]) -> None:
        """``eventually``, while the application goes on."""
        for _ in range(int(DEADLINE_S / PAUSE_S)):
            if is_so():
                return
            await self.pilot.pause(PAUSE_S)
        pytest.fail(f"{self.line('#head')}, {self.line('#said')}, {self.cells('#ranks')}")


async def look_capture_and_restart(node: LoopNode) -> None:
    reader = TopClient(lambda: ApiClient(node.url, socket_path=socket_path(node.run_dir)))
    app = Top(reader, 0.5)
    async with app.run_test(size=SMALL) as pilot:
        screen = Screen(app, pilot)
        cells, line, until = screen.cells, screen.line, screen.until
        # Both with a step.
        await until(lambda: [row[2].isdigit() for row in cells("#ranks")] == [True, True])
        assert "8 GPUs, 2 ranks, 0 active anomalies" in line("#head")
        assert [row[0] for row in cells("#gpus")] == [str(number) for number in range(8)]
        job, rank, *_, state = cells("#ranks")[1]
        assert (job, rank, state) == ("stepping", "1", "running")
        assert app.screen.size == SMALL
        await pilot.press("slash", *"nobody")
        await until(lambda: ", 0 ranks" in line("#head") and cells("#ranks") == [])
        await pilot.press("escape")
        await until(lambda: len(cells("#ranks")) == 2 and app.query_one("#ranks").has_focus)
        assert app.query_one("#ranks").virtual_size.width <= SMALL[0]
        await pilot.press("c")
        await until(lambda: "of stepping" in line("#said") and "asking" not in line("#said"))
        node.terminate_daemon()
        await until(lambda: "AWAY" in line("#head"))
        assert len(cells("#ranks")) == 2
        node.start_daemon(wait=False)
        await until(lambda: "8 GPUs, 2 ranks" in line("#head"))
        assert not app.query_one("#head").has_class("away")
        await pilot.resize_terminal(*LARGE)
        gpus = app.query_one("#gpus", DataTable)
        await until(lambda: len(gpus.columns) == 9)
        assert cells("#gpus")[0][7] != ""


def test_it_shows_a_daemon_asks_for_captures_and_survives_a_restart(tmp_path):
    with loop_node(tmp_path) as node:
        node.start_daemon()
        for number in range(2):
            node.start_rank(number, STEPPING, "0.02")
        asyncio.run(look_capture_and_restart(node))
        assert node.get("captures") != []


def test_a_connection_is_kept_until_an_answer_fails():
    parts = ("devices", "jobs", "ranks", "anomalies", "captures")
    answers: dict[str, object] = {f"/api/v1/{part}": {part: ()} for part in parts}
    answers["/readyz"] = {"sources": ()}
    connected: list[object] = []

    def connect() -> ApiClient:
        connected.append(SimpleNamespace(where="there", get=lambda path, **_: answers[path]))
        return cast(ApiClient, connected[-1])

    reader = TopClient(connect)
    assert [reader.read().url, reader.read().url] == ["there", "there"]
    assert len(connected) == 1
    answered = answers.pop("/readyz")
    with pytest.raises(KeyError):
        reader.read()
    answers["/readyz"] = answered
    reader.read()
    assert len(connected) == 2


Play = tuple[str, Callable[[], object], tuple[str, ...]]


async def screens(app: Top, plays: Sequence[Play]) -> str:
    """Return the screen after each play: a reading or failure, then keys, or ``tall``."""
    text = ""
    async with app.run_test(size=SMALL) as pilot:
        screen, ranks = Screen(app, pilot), app.query_one("#ranks", DataTable)
        await app.workers.wait_for_complete()
        for name, begin, keys in plays:
            begin()
            app.poll()
            await app.workers.wait_for_complete()
            if name == "tall":
                await pilot.resize_terminal(*LARGE)
            await pilot.press(*keys)
            await app.workers.wait_for_complete()
            await pilot.pause()
            rows = [" ".join(row[:2]) for row in screen.cells("#ranks")]
            lines = (screen.line(one) for one in ("#head", "#said", "#findings"))
            text += "\n".join((f"{name} {keys}", f"{ranks.cursor_row} of {rows}", *lines, "\n"))
        text += f"{screen.line('#legend')}\n{app.query('.open').nodes}\n"
        await pilot.press("q")
        return f"{text}{app.is_running}\n"


def test_the_screen_after_keys_readings_and_failures_is_golden(monkeypatch, golden_case):
    here, clock = node_in_trouble(), ManualClock(wall=NOW)
    seen = SimpleNamespace(time=clock.wall, strftime=lambda _: "12:00:00")
    monkeypatch.setattr(top_screen, "time", seen)
    found = [replace(STRAGGLER, id=str(n), summary=f"slow {n}", time=NOW - n) for n in range(9)]
    ranks = tuple(replace(here.ranks[0], rank=n, name=str(n), job=f"job{n}") for n in range(3))
    full = replace(here, anomalies=tuple(found), ranks=ranks, captures=(CAPTURE,))
    asked = replace(CAPTURE, id="c7", outcome=None, diagnosis=None)
    done = replace(full, captures=(replace(CAPTURE, id="c7"), CAPTURE))
    read = Mock(side_effect=WarpwatchError("it starts"))
    refused = Refused("refused_busy", "it is being captured")
    capture = Mock(side_effect=[asked, refused, asked])
    reader = cast(TopClient, SimpleNamespace(read=read, request_capture=capture))

    def reads(state: State | str, later_s: float = 0.0) -> Callable[[], None]:
        def begin() -> None:
            clock.advance(later_s)
            failure = WarpwatchError(state) if isinstance(state, str) else None
            read.configure_mock(side_effect=failure, return_value=Reading(cast(State, state), "U"))

        return begin

    plays = [
        ("all", reads(full), ("down", "down")), ("again", reads(full), ("c",)),
        ("the capture ends", reads(done), ()), ("away", reads("gone"), ()),
        ("away", reads("still gone", 90.0), ()), ("back", reads(full, 5.0), ("c",)),
        ("away", reads("gone", 7.0), ("slash", *"job1")), ("back", reads(full), ("enter", "c")),
        ("all", reads(full), ("escape",)), ("none", reads(replace(full, ranks=())), ("c",)),
        ("tall", reads(full), ()),
    ]  # fmt: skip
    text = asyncio.run(screens(Top(reader, 3600.0), plays))
    golden_case(text + "".join(f"{one.args[0].job}\n" for one in capture.call_args_list))


def test_rows_of_all_that_the_api_answers_are_golden(golden_case):
    api = json.loads((Path(__file__).parents[2] / "golden/http/api.json").read_bytes())
    names = ("devices", "jobs", "ranks", "anomalies", "captures")
    lists = {name: api[f"get /api/v1/{name}"][name] for name in names}
    state = to_state({**lists, "sources": []}, 1.79e9)
    phases = {state.ranks[0].key: {"forward": 0.25, "backward": 0.5, "comm": 0.125}}
    phases[state.ranks[3].key] = {"data_wait": 0.75, "comm": 0.5}  # They overlap.
    reading = Reading(state, "http://gpu-17:9400", phases)
    lines = [top_screen.headline(state), *map(str, top_screen.finding_lines(state, 3))]
    lines += map(str, top_screen.finding_lines(State(0.0, "", ""), 3))
    lines += [str(top_screen.capture_text(capture)) for capture in state.captures]
    for wide in (False, True):
        lines += [str(top_screen.device_columns(wide)), str(top_screen.rank_columns(wide))]
        for key, row in (
            *top_screen.device_rows(state, wide),
            *top_screen.rank_rows(reading, wide),
        ):
            parts = ((cell, cell.style, *(span.style for span in cell.spans)) for cell in row)
            cells = ("|".join(map(str, part)) for part in parts)
            lines.append(f"{key}: {'  '.join(cells)}")
    golden_case("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("hidden", "said"), [("", "needs a terminal"), ("textual", "install the extra warpwatch[top]")]
)
def test_without_a_terminal_or_textual_one_line_says_what_to_do(hidden, said):
    program = (
        "import sys; from warpwatch_daemon.cli import top; from warpwatch_telemetry import errors\n"
        f"hidden = {hidden!r}\n"
        "if hidden:\n"
        "    sys.modules[hidden] = None\n"
        "    sys.stdin.isatty = sys.stdout.isatty = lambda: True\n"
        "try: top.main([])\n"
        "except errors.UsageError as error: print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert said in ended.stdout and len(ended.stdout.splitlines()) == 1
