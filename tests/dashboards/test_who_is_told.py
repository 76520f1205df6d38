"""The receivers of each alert, with kube-prometheus-stack's own routing in a real Alertmanager.

Detection, exporter, rules, Prometheus and Alertmanager are real; only the waits are short.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from tests.dashboards.monitoring.alertmanager import configured
from tests.dashboards.monitoring.prometheus import every_second, prometheus
from tests.dashboards.monitoring.web import Web
from tests.detection.gpus import Node, key
from tests.detection.streams import EPOCH_S, detection, fed
from tests.devices.ports import BRIDGE, INFINIBAND, ROCE, make
from tests.waiting import eventually
from warpwatch_dashboards import rule_files
from warpwatch_devices.host import read_ports
from warpwatch_exporters.prometheus import render
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import Clock, PortReading, RankEvent, RankSeen
from warpwatch_telemetry.state import State

EXAMPLE = Path(__file__).parents[2] / "examples/prometheus/alertmanager.yml"


def told(inbox: Web, path: str) -> set[tuple[str, str]]:
    """Names of alerts, with the node, in all notifications to a receiver."""
    alerts = [alert for note in inbox.posted.get(path, ()) for alert in note["alerts"]]
    return {(one["labels"]["alertname"], one["labels"].get("node", "")) for one in alerts}


def of_gpus(number: str) -> tuple[Anomaly, ...]:
    node, engine = Node(), detection()
    fed(engine, [*node.seen(), *node.readings(150)])
    fed(engine, node.readings(10, lambda *_: {key("xid_errors_total", number): 1.0}))
    return engine.active


def of_an_end(owner: str, job: str, error: str) -> tuple[Anomaly, ...]:
    engine = detection()
    fed(engine, [RankSeen(EPOCH_S, job, 0, owner=owner)])
    detail = {"type": error, "message": error}
    fed(engine, [RankEvent(EPOCH_S + 60, job, 0, "exception", detail, owner=owner)])
    fed(engine, [Clock(EPOCH_S + 70)])
    return engine.active


def of_ports(sys: Path) -> tuple[Anomaly, ...]:
    """Two ConnectX-7: the link of the InfiniBand port goes down, symbols are lost at the RoCE's."""
    link = make(sys, "mlx5_0", INFINIBAND, f"{BRIDGE}/0000:18:00.0")
    engine = detection()
    for second in range(0, 300, 5):
        make(
            sys, "mlx5_2", ROCE | {"counters/symbol_error": f"{20 * max(0, second - 100)}"}, BRIDGE
        )
        if second == 200:
            (link / "state").write_text("1: DOWN\n")
        fed(engine, [PortReading(EPOCH_S + second, *port) for port in read_ports(sys)])
    return engine.active


def straggler(owner: str) -> tuple[Anomaly, ...]:
    words = "rank 3 computes longer than its peers"
    return (Anomaly(EPOCH_S, "warning", words, "llama", 3, owner=owner, id="1", kind="straggler"),)


def page(node: str, anomalies: tuple[Anomaly, ...]) -> Callable[[], bytes]:
    return lambda: render(State(EPOCH_S, "1", node, anomalies=anomalies))


def stock(port: int) -> dict[str, Any]:
    """Return the stock configuration with a receiver for each of its routes, and our inhibition."""
    config: dict[str, Any]
    config = yaml.safe_load(Path(__file__).with_name("stock_alertmanager.yaml").read_text())
    receivers: list[dict[str, Any]] = [{"name": "null"}]
    for name in (route["receiver"] for route in config["route"]["routes"]):
        hook = {"url": f"http://127.0.0.1:{port}/{name}"}
        receivers.append({"name": name, "webhook_configs": [hook]})
    ours = yaml.safe_load(EXAMPLE.read_text())["inhibit_rules"]
    return config | {"receivers": receivers, "inhibit_rules": config["inhibit_rules"] + ours}


def test_exactly_who_should_be_told_is_told(tmp_path: Path) -> None:
    anomalies = {
        "gpu-1": of_gpus("79"),
        # A warning of the same kind on another node, which a critical one must not mute.
        "gpu-2": of_gpus("31"),
        "gpu-3": of_an_end("ns/ml", "bert", "KeyError"),
        "gpu-4": of_an_end("ns/ml", "gpt", "KeyboardInterrupt"),
        "gpu-5": straggler("ns/web"),
        "gpu-6": of_ports(tmp_path / "sys"),
    }
    webs = {node: Web({"/metrics": page(node, found)}) for node, found in anomalies.items()}
    inbox = Web({})
    wanted = {
        "/pager": {("WarpwatchDeviceNeedsService", "gpu-1"), ("WarpwatchNetworkLinkDown", "gpu-6")},
        "/operators": {("WarpwatchXid", "gpu-2"), ("WarpwatchNetworkErrors", "gpu-6")},
        "/ml": {("WarpwatchCrash", "gpu-3")},
        "/web": {("WarpwatchStraggler", "gpu-5")},
    }
    targets = {web.port: {"node": node} for node, web in webs.items()}
    with ExitStack() as stack:
        for web in (inbox, *webs.values()):
            stack.enter_context(web.serving())
        manager = stack.enter_context(configured(tmp_path, stock(inbox.port)))
        rules = [every_second(rule_files.FOLDER / "anomalies.yaml", tmp_path, wait="0s")]
        server = stack.enter_context(
            prometheus(tmp_path, targets, rules=rules, alertmanager=manager.port)
        )
        everybody = lambda: {path: told(inbox, path) for path in wanted} == wanted  # noqa: E731
        eventually(everybody, "each is told of what is theirs")
        # The rules have looked at the node of the Ctrl-C, too.
        judged = "min(count_over_time(warpwatch_build_info[5m])) >= 5"
        eventually(lambda: server.query(judged), "all nodes are scraped and judged")
        # One fault is one page: the XID itself is muted.
        expected = {one for alerts in wanted.values() for one in alerts}
        expected.add(("WarpwatchXidCritical", "gpu-1"))
        assert {(one["alertname"], one["node"]) for one in server.firing()} == expected
        assert {(one["alertname"], one["node"]) for one in manager.active()} == expected
    assert inbox.posted.keys() == wanted.keys()
