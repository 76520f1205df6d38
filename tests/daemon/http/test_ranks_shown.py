"""What the page, the API and ``warpwatch status`` say of a rank."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from tests.daemon.http.conftest import MemoryAgent
from warpwatch_daemon.cli import status


def one_rank(agent: MemoryAgent, **changes: object) -> None:
    first = replace(agent.now.ranks[0], **changes)  # type: ignore[arg-type]
    agent.now = replace(agent.now, ranks=(first,), anomalies=(), captures=())


def rank_line(capsys: pytest.CaptureFixture[str]) -> str:
    assert status.main([]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "llama-7b rank 0" in line)
    return line.strip()


def test_a_rank_shows_its_step_clock_and_throughput(
    client: httpx.Client, agent: MemoryAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    one_rank(
        agent,
        step_clock="deepspeed",
        steps_per_s=3.016,
        samples_per_s=48.25,
        tokens_per_s=97_000.0,
        recent_s=(0.25,),
    )
    page = client.get("/").text
    assert "step clock: deepspeed" in page
    assert "48.2 samples/s" in page
    assert "97k tokens/s" in page
    (rank,) = client.get("/api/v1/ranks").json()["ranks"]
    assert (rank["step_clock"], rank["samples_per_s"]) == ("deepspeed", 48.25)
    assert rank_line(capsys) == (
        "llama-7b rank 0: running, step 480, median step 250 ms, 3.02 steps/s, 48.2 samples/s, "
        "97k tokens/s, step clock deepspeed"
    )


def test_a_rank_without_a_step_shows_the_line_that_mends_it(
    client: httpx.Client, agent: MemoryAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    one_rank(agent, recent_s=(), calls_without_step=130)
    line = "no end of a step seen in 130 backwards and optimizer steps; put `with warpwatch."
    assert line in client.get("/").text
    assert line in rank_line(capsys)


def test_a_rank_shows_its_places_in_parallelism(
    client: httpx.Client, agent: MemoryAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    one_rank(agent, parallel={"pipeline": (3, 4), "data": (0, 2), "tensor": (0, 1)})
    assert "DP 0 of 2, PP 3 of 4<" in client.get("/").text
    assert "DP 0 of 2, PP 3 of 4," in rank_line(capsys)
    (rank,) = client.get("/api/v1/ranks").json()["ranks"]
    assert rank["parallel"]["pipeline"] == [3, 4]


def test_a_silent_rank_shows_whether_it_was_stopped_or_holds_the_gil(
    client: httpx.Client, agent: MemoryAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    one_rank(agent, status="stopped", silent_reason="holds the GIL")
    assert "a C call holds the GIL: no other thread runs" in client.get("/").text
    assert "rank 0: stopped (holds the GIL), step 480" in rank_line(capsys)
    one_rank(agent, status="stopped", silent_reason="stopped")
    assert "stopped by a signal, a debugger or a frozen container" in client.get("/").text
    assert "rank 0: stopped, step 480" in rank_line(capsys)


def test_what_a_rank_does_not_say_is_not_shown(
    client: httpx.Client, agent: MemoryAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    one_rank(
        agent, step_clock="", steps_per_s=None, samples_per_s=None, tokens_per_s=None, recent_s=()
    )
    page = client.get("/").text
    assert "step clock" not in page
    assert "samples/s" not in page
    assert rank_line(capsys) == "llama-7b rank 0: running, step 480, no step yet"
