"""Output and exit status of commands for a node that has everything."""

import os
import re
import time
from dataclasses import replace

import msgspec

from tests.cases import cases
from tests.daemon.http.conftest import NOW, socket_of
from tests.daemon.http.everything import fill
from warpwatch_daemon.cli import main, status
from warpwatch_daemon.cli.capture import describe
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import RunSummary

CASES = cases(__file__)
LIMITS = ("MAX_ACTIVE", "MAX_ENDED", "MAX_JOBS", "MAX_TROUBLED", "MAX_CAPTURES")


def test_what_commands_print_is_golden(
    client, agent, url, shared_server, capsys, monkeypatch, golden_case
):
    fill(agent)
    agent.runs += msgspec.convert(CASES["runs"], list[RunSummary])
    monkeypatch.setattr(time, "localtime", time.gmtime)
    monkeypatch.setattr(status.main, "__defaults__", (lambda: NOW,))
    captures = [*agent.now.captures, replace(agent.now.captures[0], outcome="refused_disk")]
    text = ""
    for line in CASES["lines"]:
        how, given = line[0], line.lstrip("!<0123456789 ").split()
        agent.refusal = Refused("refused_busy", "rank 1 is being captured") if how == "!" else None
        if how.isdigit():
            agent.request_capture = lambda *_, how=how: captures[int(how)]
        with monkeypatch.context() as few:
            for limit in LIMITS if how == "<" else ():
                few.setattr(status, limit, 1)
            try:
                ended = main(given)
            except SystemExit as error:
                ended = int(str(error.code))
        out, err = capsys.readouterr()
        text += f"$ warpwatch {line}\n{out}{err}exit {ended}\n\n"
    asked = "\n".join(map(str, agent.asked))
    described = [line for one in agent.now.captures for line in describe(one, "URL")]
    text = text.replace(str(socket_of(shared_server)), "SOCKET").replace(url, "URL")
    text = re.sub(r"login[^\s\",]+", "login…", text).replace(f"uid {os.getuid()}\n", "uid UID\n")
    golden_case(text + "\n".join((asked, *described)) + "\n")
