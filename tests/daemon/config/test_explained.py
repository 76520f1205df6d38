"""docs/configuration.md explains each key, and none that is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from warpwatch_daemon.config import loading
from warpwatch_daemon.config.sections import Config

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def keys(tree: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def explained() -> list[str]:
    """What the table's first column names; ``.b`` after ``a.c`` is ``a.b``."""
    found: list[str] = []
    for cell in re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), flags=re.M):
        for name in re.findall(r"`([^`]+)`", cell):
            whole = found[-1].rpartition(".")[0] + name if name.startswith(".") else name
            one_of = re.search(r"\{(.*)\}", whole)
            names = one_of[1].split(",") if one_of else [""]
            found += [re.sub(r"\{.*\}", each, whole.replace("<kind>", "*")) for each in names]
    return found


def stands_for(name: str, key: str) -> bool:
    """A section's row stands for its keys."""
    return fnmatchcase(key, name) or key.startswith(f"{name}.")


def test_every_key_is_explained_and_none_that_is_gone():
    there, names = list(keys(loading.as_tree(Config()))), explained()
    assert [key for key in there if not any(stands_for(name, key) for name in names)] == []
    # The keys of the fleet are its own, and explained there.
    of_agent = Config.model_fields.keys() - {"fleet"}
    own = [name for name in names if name.split(".")[0] in of_agent]
    assert [name for name in own if not any(stands_for(name, key) for key in there)] == []
