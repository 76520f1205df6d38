"""The configuration: a file of any bytes, and any tree with environment variables on top."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnosis.trace.odd_traces import ODD
from tests.fuzz.watch import Target, of_bytes
from warpwatch_daemon.config import Config
from warpwatch_runtime import loading
from warpwatch_telemetry.errors import UsageError

TREE, FILE = b"\0", b"\1"
TEXTS = ["5GiB", "14d", "9" * 400 + "d", "-1", "file:///x", "127.0.0.1:1", "h100", "Mon-Fri 1-2"]
# The syntax that YAML adds to JSON; tags make PyYAML's constructors raise any exception.
TOKENS = (
    b"!!int", b"!!float", b"!!bool", b"!!timestamp", b"!!binary", b"!!omap", b"!!set", b"!!python",
    b"&a", b"*a", b"<<:", b"? ", b"|\n", b"---\n", b"2026-01-01", b"0x", b"1:60", b".inf", b"\t",
)  # fmt: skip


def keys(tree: Any) -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield key
        yield from keys(value)


KEYS = st.sampled_from(list(dict.fromkeys(keys(loading.as_tree(Config())))))
VALUES: st.SearchStrategy[Any] = st.recursive(
    ODD | st.sampled_from(TEXTS),
    lambda inner: st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=8,
)


@settings(database=None)
@given(
    tree=st.dictionaries(KEYS, VALUES, max_size=5),
    path=st.lists(KEYS, max_size=4),
    text=st.text(max_size=12),
)
def read_tree(tree: dict[str, Any], path: list[str], text: str) -> None:
    try:
        loading.overlay(tree, {"WARPWATCH_" + "__".join(path).upper(): text})
        config = loading.parse(Config, tree, "fuzz")
    except UsageError as error:
        check_line(error)
    else:
        check_again(config)


def check_line(error: UsageError) -> None:
    """One line that somebody can read."""
    assert 0 < len(str(error)) < 20_000 and "\n" not in str(error), str(error)


def check_again(config: Config) -> None:
    """Check that a configuration that is shown can be read."""
    tree = json.loads(json.dumps(loading.as_tree(config)))
    assert loading.parse(Config, tree, "again") == config


def target(folder: Path) -> Target:
    path = folder / "fuzz.yaml"
    trees = of_bytes(read_tree)

    def run(data: bytes) -> None:
        if data[:1] == TREE:
            trees.run(data[1:])
            return
        path.write_bytes(data[1:])
        try:
            config = loading.load(Config, path, {})
        except UsageError as error:
            check_line(error)
        else:
            check_again(config)

    sections = loading.as_tree(Config()).items()
    files = [yaml.safe_dump({name: section}).encode()[:1500] for name, section in sections]
    files.append(b"a: &a [1]\nb: &b [*a, *a]\ntriggers: {recipes: {hang: {steps: 2}}}")
    seeds = [TREE + seed for seed in trees.seeds] + [FILE + text for text in files]
    return Target(run, seeds, TOKENS, 2048)
