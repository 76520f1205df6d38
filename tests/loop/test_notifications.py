"""Acceptance: the recipients of each alert of three agents and a fleet, as they are shipped.

The table in docs/alerts.md has the expected recipients; its times are printed by this test.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import ROOT, LoopNode, poll
from tests.loop.notifying import SCALE, Site, site
from tests.loop.other_users import open_folder

pytestmark = [
    pytest.mark.alerts,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start jobs of other users"),
]

ANN, BOB = 1001, 1002
# (receiver, alert), and labels that the alert has.
Told = tuple[str, str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Fault:
    """``about``: for each thing that alerts are about, the labels that tell it from others."""

    name: str
    begin: Callable[[Site], object]
    end: Callable[[Site], object] = lambda site: None
    about: tuple[Mapping[str, str], ...] = ({},)


def gpu(node: int, index: int) -> dict[str, str]:
    return {"node": f"gpu-{node + 1}", "gpu": str(index)}


def lose(site: Site, *gpus: tuple[int, int]) -> None:
    for node, index in gpus:
        site.drivers[node].set(index, lost=True)


def serve(site: Site, *gpus: tuple[int, int]) -> None:
    """Bring them back, and resolve what is latched once nothing else of them is active."""
    for node, index in gpus:
        site.drivers[node].set(index, lost=None)
        own = site.cluster.nodes[node]
        latched = poll(partial(only_latched, own), "nothing else of it is left")
        for one in latched:
            own.http.post(f"/api/v1/anomalies/{one['id']}/resolve").raise_for_status()


def only_latched(node: LoopNode) -> list[dict[str, Any]]:
    active = [one for one in node.get("anomalies") if one["end_time"] is None]
    return active if {one["kind"] for one in active} == {"device_needs_service"} else []


def lose_under_a_job(site: Site) -> None:
    lose(site, (2, 0))
    site.tell("llama", "hang 4")

    def hangs() -> bool:
        found = site.cluster.get("anomalies")
        return any(one["kind"] == "hang" and one["end_time"] is None for one in found)

    poll(hangs, "the fleet knows that the job hangs")


def serve_under_a_job(site: Site) -> None:
    site.tell("llama")
    serve(site, (2, 0))


def interrupt(site: Site) -> None:
    site.signal_job("bert", signal.SIGINT)

    def crashes() -> list[tuple[str, str]]:
        found = [one for one in site.cluster.get("anomalies") if one["kind"] == "crash"]
        return [(one["job"], one["severity"]) for one in found]

    poll(lambda: crashes() == [("bert", "info")], lambda: f"the fleet knows of {crashes()}")


def restart_agent(site: Site, node: int, token: str) -> None:
    own = site.cluster.nodes[node]
    (site.folder / "other").write_text("another token")
    old = own.config.read_text()
    own.config.write_text(re.sub(r"token_file: .*", f"token_file: {site.folder / token}", old))
    own.terminate_daemon()
    site.start_agent(node)


def refuse_configuration(site: Site) -> None:
    node = site.cluster.nodes[0]
    text = node.config.read_text()
    node.config.write_text(f"{text}\nnonsense: 1\n")
    node.daemon.send_signal(signal.SIGHUP)
    poll(lambda: node.metric("warpwatch_config_reloads_total", result="failed"), "refused")
    node.config.write_text(text)


def tell(job: str, *words: str) -> Callable[[Site], object]:
    return lambda site: site.tell(job, *words)


def terminate(job: str) -> Callable[[Site], object]:
    return lambda site: site.signal_job(job, signal.SIGTERM)


def heat(reasons: int | None) -> Callable[[Site], object]:
    return lambda site: site.drivers[2].set(4, throttle_reasons=reasons)


JOB, BERT, GPT = ({"training_job": name} for name in ("llama", "bert", "gpt"))
# The faults of a group start together, and end before the next group's start.
GROUPS = (
    (
        Fault("a rank computes 80 % longer than its peers on other nodes",
              tell("llama", "slow 3"), tell("llama"), (JOB | {"rank": "3"} | gpu(1, 1),)),
        Fault("XID 31, a program's error, on the GPU of a rank",
              lambda site: site.drivers[1].xid(2, 31), about=(BERT | {"rank": "0"} | gpu(1, 2),)),
        Fault("heat slows an idle GPU down", heat(0x20), heat(None), (gpu(2, 4),)),
        Fault("an agent refuses its new configuration",
              refuse_configuration, about=({"node": "gpu-1"},)),
    ),
    (
        Fault("a rank of a job on three nodes stops in a step",
              tell("llama", "hang 0"), tell("llama"), (JOB,)),
        Fault("both ranks of a job wait for their data",
              tell("bert", "data 0", "data 1"), tell("bert"), (BERT | {"node": "gpu-2"},)),
        Fault("two idle GPUs of two nodes fall off the bus (XID 79)",
              lambda site: lose(site, (0, 5), (2, 5)), lambda site: serve(site, (0, 5), (2, 5)),
              (gpu(0, 5), gpu(2, 5))),
    ),
    (
        Fault("the GPU of a rank falls off the bus, and its job stands still",
              lose_under_a_job, serve_under_a_job, (JOB | {"rank": "4"} | gpu(2, 0),)),
        Fault("Ctrl-C ends a job", interrupt),
    ),
    (
        Fault("a rank raises an exception, and the launcher ends the others",
              tell("llama", "crash 5"), terminate("llama"), (JOB | {"rank": "5"} | gpu(2, 1),)),
        Fault("a rank runs out of memory",
              tell("gpt", "oom 1"), terminate("gpt"), (GPT | {"rank": "1"} | gpu(0, 3),)),
    ),
    (
        Fault("an agent ends", lambda site: site.cluster.nodes[2].kill_daemon(),
              lambda site: site.start_agent(2), ({"node": "gpu-3"},)),
        Fault("an agent does not accept the fleet's token any more",
              lambda site: restart_agent(site, 1, "other"),
              lambda site: restart_agent(site, 1, "token"), ({"node": "gpu-2"},)),
    ),
    (
        Fault("the only process of the fleet ends",
              lambda site: site.cluster.kill_fleet(), lambda site: site.cluster.start_fleet()),
    ),
)  # fmt: skip


def documented() -> Iterator[tuple[str, str, list[str]]]:
    """Fault, alert and receivers of each line of the table; without an alert both are empty."""
    text = (ROOT / "docs/alerts.md").read_text().split("<!-- told:begin -->")[1]
    for line in text.split("<!-- told:end -->")[0].strip().splitlines()[2:]:
        fault, alert, people, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        yield fault, alert.strip("`"), [one.strip() for one in people.split(",") if one.strip()]


def expected(fault: Fault) -> set[Told]:
    return {
        (receiver, alert, tuple(sorted(about.items())))
        for name, alert, people in documented()
        for receiver in people
        for about in fault.about
        if name == fault.name and receiver != "nobody"
    }


def notified(site: Site) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Each alert in each notification, with its receiver and when it came."""
    for path, notes in list(site.inbox.posted.items()):
        for note in list(notes):
            yield from ((path[1:], alert, note["received"]) for alert in note["alerts"])


def has(told: Told, receiver: str, alert: dict[str, Any]) -> bool:
    labels = alert["labels"]
    name, about = labels["alertname"], told[2]
    return told[:2] == (receiver, name) and all(labels.get(key) == text for key, text in about)


def first(site: Site, told: Told, status: str, since: float) -> float | None:
    times = [at for who, alert, at in notified(site)
             if alert["status"] == status and has(told, who, alert) and at > since]  # fmt: skip
    return min(times, default=None)


def test_exactly_the_documented_people_are_told_of_each_fault(fake_nvml: Path) -> None:
    faults = [fault for group in GROUPS for fault in group]
    assert [fault.name for fault in faults] == list(dict.fromkeys(row[0] for row in documented()))
    with open_folder() as folder, site(folder, fake_nvml) as (found, server):
        found.start_job("llama", ANN, (0, 1, 2))
        found.start_job("bert", BOB, (1,), gpu=2)
        found.start_job("gpt", ANN, (0,), gpu=2)
        learned = "min(warpwatch_steps_total) > 150 and count(warpwatch_steps_total) == 10"
        poll(lambda: server.query(learned), "the ranks train")
        assert list(notified(found)) == []
        for group in GROUPS:
            play(found, group)
        once_each(found, {told for fault in faults for told in expected(fault)})


def play(found: Site, group: tuple[Fault, ...]) -> None:
    """Start the faults, wait for all notifications, end them, and wait for their ends."""
    wanted = {told: fault for fault in group for told in expected(fault)}
    begun = {}
    for fault in group:
        begun[fault.name] = found.now()
        fault.begin(found)
    times: dict[Told, list[float]] = {told: [] for told in wanted}
    for status in ("firing", "resolved"):
        for told, fault in wanted.items():
            times[told].append(await_note(found, told, status, begun[fault.name]))
        if status == "firing":
            detected = {told: found_after(found, told, begun[wanted[told].name]) for told in wanted}
            for fault in group:
                begun[fault.name] = found.now()
                fault.end(found)
    for told, (after_s, over_s) in times.items():
        found_s = detected[told]
        told_s = found_s + SCALE * (after_s - found_s)
        print(f"{told[1]} to {told[0]}: {wanted[told].name}")
        print(
            f"  found after {found_s:.0f} s, told after {told_s:.0f} s, over after {over_s:.0f} s"
        )


def found_after(found: Site, told: Told, since: float) -> float:
    alerts = [alert["labels"] for who, alert, _ in notified(found) if has(told, who, alert)]
    kinds = {labels["kind"] for labels in alerts if "kind" in labels}
    about = dict(told[2])
    times = [
        one["time"] - since
        for one in (found.cluster.get("anomalies") if kinds else ())
        if one["kind"] in kinds and one["time"] > since
        if about.get("training_job", one["job"]) == one["job"]
        if about.get("node", one["node"]) == one["node"]
    ]
    return float(min(times, default=0.0))


def await_note(found: Site, told: Told, status: str, since: float) -> float:
    def known() -> str:
        return f"{told} is {status}: {[alert['labels'] for _, alert, _ in notified(found)]}"

    at: float = poll(lambda: first(found, told, status, since), known)
    return at - since


def once_each(found: Site, wanted: set[Told]) -> None:
    """Check that each fault causes one alert, with any labels, and nothing else is sent."""
    alerts: dict[Told, set[str]] = {told: set() for told in wanted}
    unexpected = []
    for who, alert, _ in notified(found):
        # A muted alert is in the message about its end.
        if alert["status"] == "resolved":
            continue
        meant = [told for told in wanted if has(told, who, alert)]
        for told in meant:
            alerts[told].add(alert["fingerprint"])
        if not meant:
            unexpected.append((who, alert["labels"]["alertname"], alert["labels"].get("summary")))
    assert unexpected == []
    assert {told: len(found) for told, found in alerts.items()} == dict.fromkeys(wanted, 1)
