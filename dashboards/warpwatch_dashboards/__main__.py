"""``python -m warpwatch_dashboards``: rewrites every generated file of this package.

Needs grafana-foundation-sdk, which the daemon does not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from warpwatch_dashboards import agent, fleet, inference_server, node, rule_files, training_job

FOLDER = Path(__file__).parent

# The generated files, by path inside this package.
FILES: dict[str, Callable[[], str]] = {
    "fleet.json": lambda: fleet.page().json(),
    "inference-server.json": lambda: inference_server.page().json(),
    "node.json": lambda: node.page().json(),
    "training-job.json": lambda: training_job.page().json(),
    "warpwatch.json": lambda: agent.page().json(),
    "provisioning/alert-rules.yaml": rule_files.grafana_rules,
}


def main() -> None:
    for name, text in FILES.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
