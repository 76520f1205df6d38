"""Captures over HTTP: what can be asked for, and what the page and the command line say of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from warpwatch_daemon.cli.capture import describe, main
from warpwatch_daemon.http.models import OneCapture
from warpwatch_daemon.http.page.captures import residual
from warpwatch_telemetry.captures import Capture, RankCapture, Residual


@pytest.fixture
def verified(agent: Any) -> Capture:
    """A capture of five of eight steps that slowed the job down for good."""
    capture: Capture = agent.now.captures[1]
    capture = replace(
        capture,
        request=replace(capture.request, steps=8),
        start_step=430,
        steps=5,
        ranks=tuple(replace(rank, verified=True, events=41_200) for rank in capture.ranks),
        cost_s=1.25,
        residual=Residual(1.12, 20, True),
    )
    show(agent, capture)
    return capture


def show(agent: Any, capture: Capture) -> None:
    agent.now = replace(agent.now, captures=(capture,))


def shown(capture: Capture) -> Any:
    """As the API answers it."""
    return OneCapture(capture).model_dump(mode="json")


def lacking(capture: Capture) -> Capture:
    problems = ("no_kernels: the rank computes on a GPU",)
    last = replace(capture.ranks[1], verified=False, problems=problems)
    detail = f"rank 1 is not verified ({problems[0]})"
    return replace(capture, ranks=(capture.ranks[0], last), detail=detail, residual=None)


def test_options_are_asked_for(client: Any, agent: Any) -> None:
    body = {"job": "llama-7b", "options": ["stacks", "shapes", "shapes"]}
    assert client.post("/api/v1/captures", json=body).status_code == 202
    (asked,) = agent.asked
    assert asked.options == ("shapes", "stacks")


def test_of_a_capture_over_nodes_each_rank_has_its_node(verified: Capture) -> None:
    ranks = tuple(replace(rank, node=f"gpu-{rank.rank}") for rank in verified.ranks)
    said = describe(shown(replace(verified, ranks=ranks)), "http://fleet")
    assert "  rank 1 on gpu-1: written\n" in said
    assert "  rank 1: written\n" in describe(shown(verified), "http://node")


def test_the_page_says_what_was_verified_and_what_it_cost(
    client: Any, agent: Any, verified: Capture
) -> None:
    page = client.get("/").text
    assert "430 to 434, 5 of 8 asked for: more make a trace too long" in page
    assert "verified, 41,200 events a rank at most" in page
    assert "1.25 s of training" in page
    assert "slower since: +12 % over 20 steps" in page
    assert 'class="badge good">complete 2/2<' in page


def test_the_page_says_what_a_trace_lacks(client: Any, agent: Any, verified: Capture) -> None:
    show(agent, lacking(verified))
    page = client.get("/").text
    assert "1 of 2 traces not verified" in page
    assert "rank 1 is not verified (no_kernels: the rank computes on a GPU)" in page
    assert 'class="badge bad">complete 2/2<' in page


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Residual(1.004, 20, False), "as before: +0 % over 20 steps"),
        (Residual(1.19, 11, False), "within its noise: +19 % over 11 steps"),
    ],
)
def test_a_residual_that_chance_explains_is_none(found: Residual, said: str) -> None:
    assert residual(found) == said


def test_the_command_line_asks_for_options(
    client: httpx.Client, agent: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_for = "--job llama-7b --with stacks --with shapes --rank 1 --kind torch --steps 3"
    assert main(asked_for.split()) == 0
    (asked,) = agent.asked
    assert (asked.options, asked.ranks, asked.steps) == (("shapes", "stacks"), (1,), 3)
    assert capsys.readouterr().out.startswith("capture 20260921T150000-aaaaaa: begun")


def test_the_command_line_says_the_same(verified: Capture) -> None:
    said = describe(shown(verified), "http://localhost:9400").splitlines()
    assert said[0].endswith(": complete 2/2, verified")
    assert "  5 of 8 steps: more make a trace too long" in said
    assert "  cost: 1.25 s of training" in said
    assert "  step after / before: 1.120 over 20 steps; the job is slower since" in said
    said = describe(shown(lacking(verified)), "").splitlines()
    assert said[0].endswith(": complete 2/2, 1 not verified")
    assert said[2] == "  rank 1: written (no_kernels: the rank computes on a GPU)"


def test_a_capture_that_was_just_begun_says_no_more(verified: Capture) -> None:
    begun = Capture("c", verified.request, 0.0, ranks=(RankCapture(0),), steps=8)
    assert describe(shown(begun), "") == "capture c: begun\n  rank 0: asked"
