"""The cases of a module of tests, in the YAML file beside it."""

from pathlib import Path
from typing import Any

import yaml


def cases(module: str) -> dict[str, Any]:
    """Return the tables of ``NAME.yaml`` for ``test_NAME.py``."""
    path = Path(module)
    text = path.with_name(f"{path.stem.removeprefix('test_')}.yaml").read_text()
    loaded: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)
    return loaded
