"""What the commands ask a daemon with, whom they trust over HTTPS, and what they make of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.daemon.http.conftest import NOW, certified
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


@pytest.mark.parametrize(
    ("name", "said"), [("none", "none.crt: No such"), ("empty", "empty.crt: ")]
)
def test_an_authority_that_is_no_certificate_is_a_usage_error(tmp_path, capsys, name, said):
    (tmp_path / "empty.crt").write_text("")
    path = tmp_path / f"{name}.crt"
    assert main(["status", "--url", "https://127.0.0.1:9", "--ca-file", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_capture_is_asked_for_with_its_options(client, agent, capsys):
    asked_for = "--job llama-7b --with stacks --with shapes --rank 1 --kind torch --steps 3"
    assert main(["capture", *asked_for.split()]) == 0
    (asked,) = agent.asked
    assert (asked.options, asked.ranks, asked.steps) == (("shapes", "stacks"), (1,), 3)
    assert capsys.readouterr().out.startswith("capture 20260921T150000-aaaaaa: begun")


def test_status_ends_with_1_only_where_more_than_information_is_active(client, agent, capsys):
    _, straggler = agent.now.anomalies
    for changes, status in (({}, 1), ({"severity": "info"}, 0), ({"end_time": NOW}, 0)):
        agent.now = replace(agent.now, anomalies=(replace(straggler, **changes),))
        assert main(["status"]) == status
    assert "straggler of llama-7b, over" in capsys.readouterr().out
