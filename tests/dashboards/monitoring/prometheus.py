"""A real Prometheus in a folder of its own, for tests that ask it what it scraped."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.loop.node import poll
from tests.processes import running
from warpwatch_daemon.demo.processes import free_port

# One core, and memory rather than time: a process lives for some seconds.
FRUGAL = {"GOMAXPROCS": "1", "GOGC": "400"}


class Prometheus:
    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.url = str(client.base_url)

    def get(self, path: str, **parameters: str) -> Any:
        """The ``data`` of what its API answers; what cannot be evaluated fails the test."""
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        assert not answer.is_client_error, (parameters, answer.text)
        return answer.raise_for_status().json()["data"]

    def query(self, promql: str, at: float | None = None) -> list[Any]:
        """The series of an instant vector, now or at a time."""
        moment = {} if at is None else {"time": str(at)}
        result: list[Any] = self.get("query", query=promql, **moment)["result"]
        return result

    def query_range(self, promql: str, begin: float, end: float, step_s: float) -> list[Any]:
        window = {"start": str(begin), "end": str(end), "step": str(step_s)}
        result: list[Any] = self.get("query_range", query=promql, **window)["result"]
        return result

    def firing(self) -> list[dict[str, str]]:
        """The labels of the alerts that fire."""
        alerts = self.get("alerts")["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]


def prometheus(
    folder: Path,
    targets: Mapping[int, Mapping[str, str]],
    *,
    rules: Sequence[Path] = (),
    alertmanager: int | None = None,
    interval: str = "1s",
) -> AbstractContextManager[Prometheus]:
    """Return a server that scrapes these ports, with labels, and evaluates the rules.

    It starts with the data in the folder ``tsdb``.
    """
    scraped = {
        "job_name": "warpwatch",
        "honor_labels": True,
        "static_configs": [
            {"targets": [f"127.0.0.1:{port}"], "labels": dict(labels)}
            for port, labels in targets.items()
        ],
    }
    config: dict[str, Any] = {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "evaluation_interval": interval,
        },
        "scrape_configs": [scraped],
        "rule_files": [str(path) for path in rules],
    }
    if alertmanager is not None:
        managers = [{"targets": [f"127.0.0.1:{alertmanager}"]}]
        config["alerting"] = {"alertmanagers": [{"static_configs": managers}]}
    return configured(folder, config)


@contextmanager
def configured(folder: Path, config: Mapping[str, Any]) -> Iterator[Prometheus]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    arguments = [f"--config.file={folder / 'prometheus.yml'}"]
    arguments += [
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with served([binary, *arguments], port, folder / "prometheus.log") as client:
        yield Prometheus(client)


def every_second(rules: Path, folder: Path, interval: str = "1s", wait: str | None = None) -> Path:
    """A copy of these rules, evaluated that often; what they make of their own series, too.

    ``wait``: what their alerts wait for.
    """
    read = yaml.safe_load(rules.read_text())
    for group in read["groups"]:
        group["interval"] = interval
        for alert in (rule for rule in group["rules"] if "alert" in rule and wait is not None):
            alert["for"] = wait
    text = yaml.safe_dump(read).replace("[10m:30s]", "[10m:1s]").replace("[6h:10m]", "[6h:1s]")
    copy = folder / rules.name
    copy.write_text(text)
    return copy


@contextmanager
def served(command: Sequence[str], port: int, log: Path) -> Iterator[httpx.Client]:
    """A server of the Prometheus family from when it is ready to the end of the block."""
    with (
        running(command, log, cwd=log.parent, env={**os.environ, **FRUGAL}),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client,
    ):
        poll(lambda: client.get("/-/ready").status_code == 200, f"ready: see {log}")
        yield client
