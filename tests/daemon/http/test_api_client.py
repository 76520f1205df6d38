"""What the commands ask a daemon with, whom they trust over HTTPS, and what they make of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.daemon.http.conftest import ENDED, NOW, STRAGGLER, certified
from warpwatch_daemon.cli import main

NAME = "warpwatch-peers.monitoring.svc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A certificate of a name that does not resolve, and a web-config.yml that names it."""
    return certified(tmp_path_factory.mktemp("certificate"), NAME)


@pytest.fixture
def daemon(serve, folder):
    """Its URL, by address."""
    _, port = serve(web_config=folder / "web.yml").address
    return f"https://127.0.0.1:{port}"


def test_in_a_pod_the_variables_of_the_chart_are_enough(daemon, folder, monkeypatch, capsys):
    monkeypatch.setenv("WARPWATCH_URL", daemon)
    monkeypatch.setenv("WARPWATCH_CA_FILE", str(folder / "tls.crt"))
    monkeypatch.setenv("WARPWATCH_SERVER_NAME", NAME)
    assert main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["devices"]


@pytest.mark.parametrize("wrong", ["authority", "name"])
def test_a_daemon_that_is_not_the_one_meant_is_not_talked_to(daemon, folder, wrong, capsys):
    trusted = [] if wrong == "authority" else ["--ca-file", str(folder / "tls.crt")]
    named = ["--server-name", NAME] if wrong == "authority" else []
    assert main(["status", "--url", daemon, *trusted, *named]) == 3
    assert "certificate verify failed" in capsys.readouterr().err


def test_an_authority_that_is_no_certificate_is_a_usage_error(tmp_path, capsys):
    url = ["--url", "https://127.0.0.1:9"]
    assert main(["status", *url, "--ca-file", str(tmp_path / "none.crt")]) == 2
    assert "none.crt: No such file" in capsys.readouterr().err
    (tmp_path / "empty.crt").write_text("")
    assert main(["status", *url, "--ca-file", str(tmp_path / "empty.crt")]) == 2
    assert "empty.crt: " in capsys.readouterr().err


def test_status_tells_what_is_wrong_now_and_what_was(url, agent, monkeypatch, capsys):
    monkeypatch.setattr("time.time", lambda: NOW)
    info = replace(STRAGGLER, id="a8", severity="info", time=NOW - 1)
    agent.now = replace(agent.now, anomalies=(ENDED, STRAGGLER, info))
    assert main(["status", "--url", url]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "llama-7b, " in line]
    assert lines == [
        "! straggler of llama-7b, found 41 s ago: "
        "rank 1 computes 60 % longer than its peer since step 400",
        "  straggler of llama-7b, found now: "
        "rank 1 computes 60 % longer than its peer since step 400",
        "  data_stall of llama-7b, over 10 min ago: "
        "job llama-7b waits 39 % of its steps for data since step 120",
    ]


def test_status_tells_how_fast_a_job_is_and_what_its_tokens_cost(url, agent, capsys):
    (job, *_) = agent.now.jobs
    rank = replace(agent.now.ranks[0], job=job.name, steps_per_s=2.5, tokens_per_s=12_345.0)
    job = replace(job, model_flops_ratio={"shapes": 0.41})
    job = replace(job, tokens_per_joule=0.0123, memory_ratio=0.76)
    agent.now = replace(agent.now, anomalies=(), ranks=(rank,), jobs=(job,))
    assert main(["status", "--url", url]) == 0
    said = capsys.readouterr().out
    assert "2.5 steps/s" in said and "12.3k tokens/s" in said
    assert f"{job.name}: MFU 41 % (by shapes)" in said
    assert f"{job.name}: tensors take up to 76 % of a GPU's memory" in said
    assert f"{job.name}: 0.0123 tokens/J" in said
