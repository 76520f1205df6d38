"""`warpwatch top` in textual's own terminal, over a real daemon."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from tests.loop.node import LoopNode, loop_node
from tests.loop.programs import STEPPING
from tests.waiting import DEADLINE_S
from warpwatch_daemon.api_client import ApiClient, socket_path
from warpwatch_daemon.cli import top_screen
from warpwatch_daemon.cli.status import to_state
from warpwatch_daemon.cli.top_screen import Reading, Top, TopClient
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Device, DeviceSample
from warpwatch_telemetry.state import Histogram, RankState, State

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


def test_shares_of_phases_are_of_the_steps_since_the_look_before():
    reader = TopClient(lambda: pytest.fail("nobody is asked"))
    rank = RankState("j", 0, "0", 1, "node", owner="u")

    def shares(passed_s: float, **phases_s: float) -> object:
        reader._follow([replace(rank, durations=Histogram(sum=passed_s), phases_s=phases_s)])
        return reader._phases["j", "0", "u", ""]

    assert shares(10.0, forward=5.0, comm=5.0) == {"forward": 0.5, "comm": 0.5}
    assert shares(14.0, forward=6.0, comm=5.0) == {"forward": 0.25, "comm": 0.0}
    assert shares(14.0, forward=6.0, comm=5.0) == {"forward": 0.25, "comm": 0.0}
    assert shares(2.0, forward=1.0) == {"forward": 0.5}


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


def test_trouble_is_marked_and_comes_first_and_a_fleets_device_names_its_node():
    device = DeviceSample(Device("GPU-1", 1, "H100"), 0.0)
    lost = DeviceSample(Device("GPU-2", 2, "H100"), 0.0, {}, False, "lost", source="gpu-7")
    known: dict[SeriesKey, float] = {("device_throttle_active", ("hw_thermal",)): 1.0}
    known |= {(f"device_memory_{name}_bytes", ()): 2.0**30 for name in ("used", "total")}
    known["device_temperature_celsius", ("gpu",)] = 95.0
    hot = DeviceSample(Device("GPU-3", 1, "H100"), 0.0, known)
    rank = RankState("llama", 3, "3", 1, "node", device="GPU-1", status="stopped")
    ranks = (rank, replace(rank, rank=4, name="4"))
    state = State(0.0, "", "", devices=(device, hot, lost), ranks=ranks)
    (first, shown), (second, warned), (third, well) = top_screen.device_rows(state, wide=False)
    assert (first, second, third) == ("GPU-2", "GPU-3", "GPU-1")
    assert (str(shown[0]), str(shown[-1])) == ("gpu-7 2", "! lost")
    assert (str(well[0]), str(well[-1])) == ("1", "llama rank 3, llama rank 4")
    assert [(str(warned[place]), warned[place].style) for place in (2, 4)] == [
        ("1 GiB of 1 GiB!", "yellow"), ("95 °C!", "bold red"),
    ]  # fmt: skip


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
