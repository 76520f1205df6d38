"""Acceptance: a fault fires an alert, the alert asks for the capture, and both are over with it.

Prometheus, Alertmanager, daemons and training are real. The rules are the repository's, but that
they are evaluated each second and wait for two: what they wait for otherwise is for people.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import warpwatch_dashboards
from tests.dashboards.fleet import DRIVER_NODE, Fleet, fleet
from tests.loop.node import poll
from tests.loop.trainings import NOT_CAPTURED, ON_A_BUSY_MACHINE

pytestmark = [pytest.mark.alerts, pytest.mark.torch]

RULES = Path(warpwatch_dashboards.__file__).parent / "rules"
TOKEN = "only-alertmanager-and-the-daemon-know-it"
ALERT, WAIT = "WarpwatchStraggler", "2s"


def hurried(folder: Path) -> list[Path]:
    """Copies of the rules that wait for next to nothing; the alert says what to capture."""
    folder.mkdir()
    copies = []
    for path in sorted(RULES.glob("*.yaml")):
        rules: dict[str, Any] = yaml.safe_load(path.read_text())
        for group in rules["groups"]:
            group.pop("interval", None)
            for rule in group["rules"]:
                if "alert" in rule:
                    rule["for"] = WAIT
                if rule.get("alert") == ALERT:
                    rule["labels"]["capture"] = "torch"
        copy = folder / path.name
        copy.write_text(yaml.safe_dump(rules))
        copies.append(copy)
    return copies


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Fleet]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    config: dict[str, Any] = {
        "http": {"token_file": str(token)},
        "detection": ON_A_BUSY_MACHINE,
        # Only the alert requests a capture, and gives the reason itself.
        "triggers": {"recipes": {"straggler": None} | NOT_CAPTURED, "baseline": {"enabled": False}},
    }
    rules, webhook = hurried(tmp_path / "rules"), (ALERT, token)
    with fleet(tmp_path, rules=rules, webhook=webhook, **config) as found:
        found.start_training()
        yield found


def test_an_alert_asks_for_the_capture_and_resolves_when_the_fault_ends(running: Fleet) -> None:
    assert running.alertmanager is not None
    manager, node = running.alertmanager, running.nodes[DRIVER_NODE]

    def straggler() -> list[dict[str, str]]:
        return [a for a in manager.active() if a["alertname"] == ALERT]

    running.wait_for('warpwatch_steps_total{rank="3"} > 150')
    assert straggler() == []
    running.go_wrong(slow=3)
    (alert,) = poll(straggler, "the alert fires: " + node.log("daemon"))
    assert (alert["training_job"], alert["rank"], alert["node"]) == ("llama-7b", "3", DRIVER_NODE)

    taken = "the capture is taken: " + node.log("daemon")
    (capture,) = poll(lambda: node.ended(trigger="alert"), taken)
    assert capture["outcome"] == "complete", capture
    assert capture["request"]["job"] == "llama-7b"
    assert 3 in [rank["rank"] for rank in capture["ranks"]]
    running.go_wrong()
    poll(lambda: not straggler(), "the alert is resolved: " + node.log("daemon"))
    # It was sent again and again while it fired; one capture was taken of it.
    assert len(node.captures(trigger="alert")) == 1
