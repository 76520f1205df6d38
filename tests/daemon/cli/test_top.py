"""`warpwatch top` in textual's own terminal, over a real daemon and a real fleet."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import DataTable, Static

from tests.loop.cluster import TOKEN, loop_cluster
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.programs import STEPPING
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.api_socket import socket_path
from warpwatch_daemon.cli.top import rows
from warpwatch_daemon.cli.top.reading import Reader, Reading
from warpwatch_daemon.cli.top.screen import Top

SMALL, LARGE = (80, 24), (200, 50)


def cells(app: Top, table: str) -> list[list[str]]:
    found = app.query_one(table, DataTable)
    return [[str(cell) for cell in found.get_row_at(row)] for row in range(found.row_count)]


def line(app: Top, name: str) -> str:
    return str(app.query_one(name, Static).render())


async def until(is_so: Callable[[], object], what: Callable[[], object]) -> None:
    for _ in range(600):
        if is_so():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(what())


def reader_of(node: LoopNode) -> Reader:
    return Reader(lambda: ApiClient(node.url, socket_path=socket_path(node.run_dir)))


async def look_capture_and_restart(node: LoopNode) -> None:
    app = Top(reader_of(node), 0.5)
    async with app.run_test(size=SMALL) as pilot:
        # Both with a step.
        await until(
            lambda: [row[2].isdigit() for row in cells(app, "#ranks")] == [True, True],
            lambda: cells(app, "#ranks"),
        )
        assert "8 GPUs, 2 ranks, 0 active anomalies" in line(app, "#head")
        assert [row[0] for row in cells(app, "#gpus")] == [str(number) for number in range(8)]
        job, rank, *_, state = cells(app, "#ranks")[1]
        assert (job, rank, state) == ("stepping", "1", "running")
        assert app.screen.size == SMALL
        assert app.query_one("#ranks").virtual_size.width <= SMALL[0]
        await pilot.press("c")
        await until(lambda: "no capture" in line(app, "#said") or "capture of stepping" in
                    line(app, "#said"), lambda: line(app, "#said"))  # fmt: skip

        node.terminate_daemon()
        await until(lambda: "AWAY" in line(app, "#head"), lambda: line(app, "#head"))
        assert len(cells(app, "#ranks")) == 2
        node.start_daemon(wait=False)
        await until(lambda: "8 GPUs, 2 ranks" in line(app, "#head"), lambda: line(app, "#head"))
        assert not app.query_one("#head").has_class("away")

        await pilot.resize_terminal(*LARGE)
        gpus = app.query_one("#gpus", DataTable)
        await until(lambda: len(gpus.columns) == 9, lambda: gpus.columns)
        assert cells(app, "#gpus")[0][7] != ""


def test_it_shows_a_daemon_asks_for_captures_and_survives_a_restart(tmp_path: Path) -> None:
    with loop_node(tmp_path) as node:
        node.start_daemon()
        for number in range(2):
            node.start_rank(number, STEPPING, "-1", "0.02")
        poll(lambda: len(node.get("ranks")) == 2, node.log("daemon"))
        asyncio.run(look_capture_and_restart(node))
        assert node.get("captures") != []


@pytest.mark.loops
def test_it_shows_a_fleet_with_its_nodes_gpus(tmp_path: Path) -> None:
    with loop_cluster(tmp_path, 2) as cluster:
        cluster.start()
        cluster.nodes[0].start_rank(0, STEPPING, "-1", "0.02", world_size=1)
        token = tmp_path / "token"
        reader = Reader(lambda: ApiClient(f"http://127.0.0.1:{cluster.port}", token))

        async def look() -> None:
            app = Top(reader, 0.5)
            async with app.run_test(size=SMALL):
                await until(
                    lambda: "16 GPUs, 1 rank" in line(app, "#head"), lambda: line(app, "#head")
                )
                assert {row[0] for row in cells(app, "#gpus")} >= {"gpu-1 0", "gpu-2 7"}
                cluster.kill_fleet()
                await until(lambda: "AWAY" in line(app, "#head"), lambda: line(app, "#head"))
                await asyncio.to_thread(cluster.start_fleet)
                await until(lambda: "16 GPUs" in line(app, "#head"), lambda: line(app, "#head"))

        asyncio.run(look())
        assert token.read_text() == TOKEN


def test_shares_of_phases_are_of_the_steps_since_the_look_before() -> None:
    reader = Reader(lambda: pytest.fail("nobody is asked"))
    rank = {"owner": "u", "job": "j", "run": "", "name": "0"}

    def shares(passed_s: float, **phases_s: float) -> object:
        reader._follow([{**rank, "durations": {"sum": passed_s}, "phases_s": phases_s}])
        return reader._phases["u", "j", "", "0"]

    assert shares(10.0, forward=5.0, comm=5.0) == {"forward": 0.5, "comm": 0.5}
    assert shares(14.0, forward=6.0, comm=5.0) == {"forward": 0.25, "comm": 0.0}
    assert shares(14.0, forward=6.0, comm=5.0) == {"forward": 0.25, "comm": 0.0}
    assert shares(2.0, forward=1.0) == {"forward": 0.5}


def test_a_bar_is_letters_so_that_it_needs_no_colour() -> None:
    assert rows.bar({"forward": 0.25, "comm": 0.5}, 8).plain == "ffcccc.."
    assert rows.bar({"own": 1.0}, 4).plain == "...."


def test_trouble_is_marked_and_comes_first() -> None:
    device = {
        "uuid": "GPU-1", "index": 1, "gpu_instance": "", "name": "H100", "source": "nvml",
        "time": 0.0, "values": {}, "up": True, "reason": "",
    }  # fmt: skip
    lost = {**device, "uuid": "GPU-2", "index": 2, "up": False, "reason": "lost"}
    reading = Reading(0.0, "", [device, lost], [], [], [])
    (first, shown), (second, _) = rows.device_rows(reading, wide=False)
    assert (first, second) == ("GPU-2", "GPU-1")
    assert str(shown[-1]) == "! lost"


@pytest.mark.parametrize(
    ("hidden", "said"),
    [("", "needs a terminal"), ("textual", "pip install 'warpwatch[top]'")],
)
def test_without_a_terminal_or_textual_one_line_says_what_to_do(hidden: str, said: str) -> None:
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
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert said in ended.stdout and len(ended.stdout.splitlines()) == 1
