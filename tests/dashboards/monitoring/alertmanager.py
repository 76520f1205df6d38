"""A real Alertmanager that passes alerts of one name on to a webhook."""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.dashboards.monitoring.prometheus import served
from warpwatch_daemon.demo.processes import free_port


class Alertmanager:
    def __init__(self, client: httpx.Client, port: int) -> None:
        self._client = client
        self.port = port

    def active(self) -> list[dict[str, str]]:
        alerts = self._client.get("/api/v2/alerts").raise_for_status().json()
        return [alert["labels"] for alert in alerts]


def alertmanager(
    folder: Path, webhook: str, token_file: Path, alert: str, repeat: str = "10s"
) -> AbstractContextManager[Alertmanager]:
    """Return an Alertmanager that sends each alert at once, and resolved ones too."""
    credentials = {"credentials_file": str(token_file)}
    receiver: dict[str, Any] = {
        "name": "warpwatch",
        "webhook_configs": [{"url": webhook, "http_config": {"authorization": credentials}}],
    }
    chosen = {"receiver": "warpwatch", "matchers": [f'alertname="{alert}"']}
    route = {"receiver": "nobody", "routes": [chosen], "group_by": ["..."], "group_wait": "0s"}
    route |= {"group_interval": "1s", "repeat_interval": repeat}
    config = {"route": route, "receivers": [receiver, {"name": "nobody"}]}
    return configured(folder, config)


@contextmanager
def configured(folder: Path, config: dict[str, Any]) -> Iterator[Alertmanager]:
    binary = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if binary is None:
        pytest.skip("prometheus-alertmanager is not installed")
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    # Without an address for its cluster it stays on this machine.
    arguments = [f"--config.file={path}", f"--storage.path={folder / 'alerts'}"]
    arguments += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    with served([binary, *arguments], port, folder / "alertmanager.log") as client:
        yield Alertmanager(client, port)
