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
KEYS = 90


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


def test_every_key_is_explained_and_there_are_few() -> None:
    there = set(keys(loading.as_tree(Config())))
    patterns = explained()
    # A section's row stands for its keys.
    left = [
        key
        for key in there
        if not any(
            fnmatchcase(key, pattern) or key.startswith(f"{pattern}.") for pattern in patterns
        )
    ]
    assert left == []
    assert len([key for key in there if not key.startswith("triggers.recipes.")]) <= KEYS


def test_no_key_is_explained_that_is_gone() -> None:
    there = set(keys(loading.as_tree(Config())))
    sections = {key.rpartition(".")[0] for key in there}
    # The keys of the fleet are its own, and explained there.
    of_agent = Config.model_fields.keys() - {"fleet"}
    rows = [name for name in explained() if name.split(".")[0] in of_agent]
    assert [
        name
        for name in rows
        if not any(fnmatchcase(key, name) for key in there)
        and not any(section == name or section.startswith(f"{name}.") for section in sections)
    ] == []
