"""The HTML report: the answer first, all that a person needs, and nothing that a trace can do."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.diagnosis.captures import diagnosed, kernel, loading, operator, stepped
from tests.diagnosis.conftest import Simulations
from tests.diagnosis.traces import TraceFile, cpu_rank
from warpwatch_diagnosis.diagnosis import Diagnosis, diagnose
from warpwatch_diagnosis.measures.steps import Lane, LaneSpan, StepTimeline
from warpwatch_diagnosis.report import html
from warpwatch_diagnosis.report.html import render_html
from warpwatch_diagnosis.report.text import render_text
from warpwatch_diagnosis.rules import RULES
from warpwatch_diagnosis.words import COLUMN_HEADS, LANES, PARTS, VERDICTS, title

HOSTILE = "</script></title></style><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
STYLE = Path(html.__file__).with_name("style.css").read_text()
VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """The elements, which must nest, and every tag and attribute that occurs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def eight_ranks(simulations: Simulations) -> Diagnosis:
    return simulations.diagnosis("straggler_host", 5)


def page_of(folder: Path, trace: TraceFile) -> str:
    return render_html(diagnosed(folder, trace))


def test_the_page_needs_no_network_and_no_script(eight_ranks: Diagnosis) -> None:
    page = render_html(eight_ranks)
    parsed = Page(page)
    assert not parsed.tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    assert not {name for name in parsed.attributes if name.startswith("on")}
    assert not parsed.attributes & {"src", "href"}
    assert "url(" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert f"<style>{STYLE}</style></head>" in page


def test_names_from_a_trace_cannot_act_in_the_report(tmp_path: Path) -> None:
    parts = [loading(6000)]
    for at in range(6000, 9800, 95):
        parts += [operator(at, 90), kernel(at + 12, 80, at + 2)]
    trace = stepped(*parts, deviceProperties=[{"id": 0, "name": HOSTILE * 1000}])
    for number, event in enumerate(trace.events):
        if not event["name"].startswith("ProfilerStep"):
            event["name"] += f"{HOSTILE}\x1b[2J\ud800\u202e"
        if event["cat"] == "kernel":
            event["tid"] = f"{HOSTILE}{number % 3}"
    path = trace.write(tmp_path / "'\"<script>.json")
    found = diagnose([path, trace.write(tmp_path / "a\x1b.json")], [path])
    page = render_html(found)
    page.encode()
    parsed = Page(page)
    assert not parsed.tags & {"script", "img"}
    assert "onerror" not in parsed.attributes
    assert not {"\x1b", "\u202e", "\ud800"} & set(page + render_text(found))
    assert "&lt;script&gt;alert(1)" in page
    assert len(page) < 200_000


def test_a_huge_step_makes_no_huge_report(tmp_path: Path) -> None:
    trace = TraceFile(steps=2, distributedInfo={"rank": 0})
    for begin in trace.each_step():
        for number in range(3000):
            name = f"void kernel_{number % 50}<{'x' * 3000}>(elementwise)"
            at = begin + 3.3 * number
            trace.kernel(at + 1, 1.5 + number % 2, launched_us=at, name=name, launch_us=1)
            trace.events[-2]["tid"] = number % 12
    assert len(page_of(tmp_path, trace).encode()) < 300_000


@pytest.mark.parametrize(("count", "us", "drawn"), [(2000, 4, 2000), (2001, 4, 667), (2001, 0, 1)])
def test_a_drawing_has_at_most_2000_rectangles(tmp_path, count, us, drawn):
    found = diagnosed(tmp_path, stepped(kernel(0, 10_000, -50)))
    begins = [us * n for n in range(count)]
    spans = [LaneSpan(at, at + 0.75 * us, ("gemm", "copy")[at // 4 % 2], None) for at in begins]
    step = StepTimeline(3, 10_000, (Lane("0/7", "stream", tuple(spans)),))
    page = render_html(replace(found, measures=(replace(found.measures[0], timeline=step),)))
    lanes = page[page.index("The longest step") : page.index("Where the time goes")]
    assert len(re.findall(r"M\d|<rect", lanes)) == drawn


def test_a_large_capture_makes_no_huge_report(tmp_path: Path) -> None:
    loads = [1000 + 500 * (rank == 50) for rank in range(70)]
    ranks = [cpu_rank(k, loading_us=us, waiting_us=1000 + 20 * k) for k, us in enumerate(loads)]
    for rank, trace in enumerate(ranks):
        for at in range(0, 8000, 80):
            trace.operator(at + 1000, 30 + rank % 20)
    found = diagnosed(tmp_path, *ranks)
    page = render_html(found)
    Page(page)
    assert len(page.encode()) < 300_000
    assert "\n   and 6 more\n" in render_text(found)
    assert "38 more ranks are not shown." in page and '<b class="problem">' in page
    assert "6 more ranks are not shown." in page


def test_the_longest_of_many_steps_are_drawn_and_the_one_with_most_waiting(tmp_path: Path) -> None:
    ranks = [cpu_rank(k, host_us=1000, waiting_us=1000, steps=26) for k in range(2)]
    for trace in ranks:
        waits = [one for one in trace.events if one["name"] == "gloo:all_reduce"]
        del waits[6 : 6 + (trace is ranks[0])]
        for shorter in (*trace.events[:2], *waits):
            shorter["dur"] -= 500
    page = render_html(diagnosed(tmp_path, *ranks))
    assert re.findall(r">Step (\d+) ·", page) == [str(number) for number in range(5, 29)]
    assert "Step 9 on every rank" in page


def test_every_label_has_a_colour_and_every_kind_a_title(golden):
    for pattern in (r"\.p-(\w+)\{fill", r"\.b-(\w+)\{background"):
        assert re.findall(pattern, STYLE) == list(dict.fromkeys(re.findall(r"--p-(\w+):#", STYLE)))
    assert Counter(re.findall(r"--p-(\w+):#", STYLE)) == dict.fromkeys(LANES, 2)
    assert set(COLUMN_HEADS) == set(PARTS)
    assert {rule.kind for rule in RULES} | {"healthy", "inconclusive"} == set(VERDICTS)
    titles = [f"{kind}: {name}; on the CPU: {title(kind, ())}" for kind, name in VERDICTS.items()]
    golden("diagnosis/titles.txt", "\n".join(titles).encode())
