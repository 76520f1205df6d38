"""The configuration: a file of any bytes, and any tree with environment variables on top."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.choices import Choices
from tests.fuzz.watch import Target
from warpwatch_daemon.config import loading
from warpwatch_daemon.config.sections import Config
from warpwatch_telemetry.errors import UsageError

TREE, FILE = b"\0", b"\1"
VALUES = ("5GiB", "14d", "9" * 400 + "d", "-1", "file:///x", "127.0.0.1:1", "h100", "Mon-Fri 1-2")
# What YAML has beside JSON; its tags make PyYAML's constructors raise whatever they like.
WORDS = (
    b"!!int", b"!!float", b"!!bool", b"!!timestamp", b"!!binary", b"!!omap", b"!!set", b"!!python",
    b"&a", b"*a", b"<<:", b"? ", b"|\n", b"---\n", b"2026-01-01", b"0x", b"1:60", b".inf", b"\t",
)  # fmt: skip


class Configuration:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "fuzz.yaml"
        self._keys = [*dict.fromkeys(keys(loading.as_tree(Config()))), *VALUES]

    def run(self, data: bytes) -> None:
        try:
            if data[:1] == FILE:
                self._path.write_bytes(data[1:])
                config = loading.load(self._path, {})
            else:
                config = self._of_tree(Choices(data[1:]))
        except UsageError as error:
            check_line(error)
            return
        tree = loading.as_tree(config)
        assert loading.parse(json.loads(json.dumps(tree)), "again") == config

    def _of_tree(self, choices: Choices) -> Config:
        tree = {choices.of(self._keys): choices.value(self._keys) for _ in range(choices.number(5))}
        path = [choices.of(self._keys) for _ in range(choices.number(5))]
        loading.overlay(tree, {"WARPWATCH_" + "__".join(path).upper(): choices.text()})
        return loading.parse(tree, "fuzz")


def check_line(error: UsageError) -> None:
    """One line that somebody can read."""
    text = str(error)
    assert text and "\n" not in text, text
    assert len(text) < 20_000, "an endless line"


def keys(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from keys(value)


def target(folder: Path) -> Target:
    whole = loading.as_tree(Config())
    files = [yaml.safe_dump({name: section}).encode() for name, section in whole.items()]
    files += [
        b"a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        b"triggers: {recipes: {hang: {steps: 2}}}",
    ]
    seeds = [TREE + bytes(range(1, 99)), *(FILE + text[:1500] for text in files)]
    return Target(Configuration(folder).run, seeds, WORDS, 2048)
