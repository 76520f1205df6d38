"""The text of the web page and the commands, and nothing beside it."""

import base64
import hashlib
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.daemon.http.conftest import NOW, STRAGGLER, MemoryAgent, around_straggler
from tests.daemon.http.everything import fill
from warpwatch_daemon.cli import status
from warpwatch_serving.page.findings import headline, when
from warpwatch_telemetry.anomalies import AnomalyContext, ContextSeries
from warpwatch_telemetry.samples import SourceHealth
from warpwatch_telemetry.state import State

NOTHING = State(time=0.0, version="0.1.0", hostname="h")
HOSTILE = '<script>alert(1)</script>\n"onload=x\x00\x1b[31m&' + "y" * 2**20


def test_the_headline_is_the_worst_of_what_is_known(agent, golden):
    now = agent.now
    quiet = replace(now, anomalies=())
    _, straggler = now.anomalies
    crash = replace(straggler, severity="critical", time=0.0, summary="rank 0 died")
    lost = replace(quiet.devices[3], up=False, reason="lost", values={})
    dead = replace(quiet.ranks[1], status="died")
    ended = tuple(replace(rank, status="exited") for rank in quiet.ranks)
    states = {
        "an anomaly": now,
        "a critical one before a newer warning": replace(now, anomalies=(straggler, crash)),
        "a lost device and a dead rank": replace(quiet, devices=(lost,), ranks=(dead,)),
        "a dead rank": replace(quiet, ranks=(quiet.ranks[0], dead)),
        "nothing wrong": quiet,
        "no rank": replace(quiet, ranks=(), jobs=()),
        "all have ended": replace(quiet, ranks=ended),
        "nothing at all": NOTHING,
    }
    found = {name: headline(state) for name, state in states.items()}
    lines = [f"{name}: {one.level}: {one.sentence} {one.notes}" for name, one in found.items()]
    golden("http/headlines.txt", "\n".join(lines).encode())
    brief = replace(straggler, end_time=straggler.time + 0.2)
    assert when(brief, now).endswith("; it lasted less than 1 s")


def test_what_a_link_is_about_is_on_top_however_old_it_is(client, agent):
    now = agent.now
    over = tuple(
        replace(now.anomalies[1], id=f"over-{age}", time=now.time - 60 * age, end_time=now.time,
                summary=f"{age} minutes ago")
        for age in range(10, 30)
    )  # fmt: skip
    captures = tuple(
        replace(now.captures[0], id=f"capture-{age}", time=now.time - 60 * age, detail=f"at -{age}")
        for age in range(10, 40)
    )
    agent.now = replace(now, anomalies=now.anomalies + over, captures=captures)
    plain = client.get("/").text
    assert ("29 minutes ago" in plain, "at -39" in plain) == (False, False)
    page = client.get("/?show=over-29").text
    assert page.index("29 minutes ago") < page.index("10 minutes ago")
    page = client.get("/?show=capture-39").text
    assert page.index("at -39") < page.index("at -10")
    assert client.get("/?show=<script>").text == plain


def test_empty_sections_say_what_to_do_next(client, agent):
    agent.now = NOTHING
    page = client.get("/").text
    commands = ("warpwatch run -- python train.py", "warpwatch doctor", "warpwatch capture --wait")
    assert [said for said in (*commands, "No anomaly, and none") if said not in page] == []


def test_hostile_texts_are_escaped_and_cut(client, agent):
    now = agent.now
    capture = now.captures[1]
    device = replace(now.devices[0].device, name=HOSTILE)
    phases = {HOSTILE + str(number): 1.0 for number in range(50)}
    names = dict.fromkeys(("job", "name", "host", "status"), HOSTILE)
    request = replace(capture.request, job=HOSTILE, reason=HOSTILE)
    diagnosis = {"verdict": HOSTILE, "findings": [{"advice": HOSTILE, "share": "x"}]}
    about = {"request": request, "diagnosis": diagnosis, "files": (HOSTILE[:300],)}
    agent.now = replace(
        now,
        hostname=HOSTILE,
        devices=(replace(now.devices[0], device=device),),
        sources=(SourceHealth(HOSTILE, up=False, reason=HOSTILE),),
        ranks=(replace(now.ranks[0], phases_s=phases, **names),),
        jobs=(replace(now.jobs[0], name=HOSTILE),),
        anomalies=(replace(now.anomalies[1], job=HOSTILE, summary=HOSTILE, kind=HOSTILE),),
        captures=(replace(capture, detail=HOSTILE, **about),),
    )
    page = client.get("/").text
    assert page.count("<script>") == 1
    assert "alert(1)" in page
    assert [part for part in ("\x00", "\x1b", '"onload') if part in page] == []
    assert len(page) < 60_000


def test_a_diagnosis_of_another_form_does_not_break_the_page(client, agent):
    diagnoses: list[dict[str, Any]] = [{}, {"findings": "no"}, {"findings": [7]}]
    for diagnosis in (*diagnoses, {"verdict": None, "findings": []}):
        capture = replace(agent.now.captures[-1], diagnosis=diagnosis)
        agent.now = replace(agent.now, captures=(capture,))
        assert client.get("/").status_code == 200


def test_a_thousand_ranks_and_many_anomalies_stay_one_short_page(client, agent, capsys):
    rank = agent.now.ranks[0]
    many = tuple(replace(rank, job=f"job-{i % 100}", name=str(i)) for i in range(1000))
    jobs = tuple(replace(agent.now.jobs[0], name=f"job-{i}") for i in range(100))
    anomalies = tuple(replace(STRAGGLER, id=f"b{number}") for number in range(40))
    contexts = {anomaly.id: around_straggler() for anomaly in anomalies}
    agent.now = replace(agent.now, ranks=many, jobs=jobs, anomalies=anomalies, contexts=contexts)
    page = client.get("/").text
    assert "And 79 more jobs" in page and "And 20 more active anomalies" in page
    assert (page.count('class="rank"'), page.count('class="minutes"')) == (8, 3)
    ended = [replace(one, status="exited", job="job-1") for one in many[:300]]
    ended[:8] = [replace(one, status="stopped") for one in ended[:8]]
    agent.now = replace(agent.now, ranks=(*ended, *many[300:]))
    assert status.main([], lambda: NOW) == 1
    listed = capsys.readouterr().out
    assert "    and 3 more ranks in trouble: --ranks" in listed
    assert listed.count("    rank ") == 5


def test_the_browser_may_run_exactly_what_the_policy_names(client):
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert " style=" not in answer.text
    assert not re.search(r"\son\w+=", answer.text)
    assert "http://www.w3.org/2000/svg" in answer.text
    assert set(re.findall(r'(?:src|href)="(https?:[^"]*)', answer.text)) == set()


def series(times: list[int], values: list[float | None]) -> ContextSeries:
    moments = tuple(NOW + time for time in times)
    durations = {"step_duration_s": tuple(values)}
    return ContextSeries(moments, (1,) * len(times), durations, job="llama-7b")


@pytest.mark.parametrize(
    "values", [[], [1.0], [None, None, None], [float("nan"), float("inf"), 1.0], [0.0, 0.0, 0.0]]
)
def test_what_cannot_be_drawn_is_left_out_and_breaks_nothing(client, agent, values):
    strange = AnomalyContext(10.0, (series(list(range(len(values))), values),))
    agent.now = replace(agent.now, contexts={"a7": strange})
    for path in ("/", "/api/v1/anomalies/a7"):
        assert client.get(path).status_code == 200


@pytest.fixture
def full(agent: MemoryAgent) -> MemoryAgent:
    fill(agent)
    return agent


def test_the_page_is_the_golden_one(client, full, golden):
    full.runs = []
    golden("http/page.html", client.get("/").content)
