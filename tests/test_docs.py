"""Checks every command, key, file and block of code in the documents against the source.

A command of ours is parsed by its own parser, which refuses an unknown option. It checks only files
and values of commands that need a cluster (helm, kubectl).
"""

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
import yaml

from warpwatch_daemon.cli import GROUP, main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples/README.md"]
FENCED = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# A prompt or an indented line, then the program.
PROGRAMS = "warpwatch|make|pip|helm|python|/opt/warpwatch/bin/(?:warpwatch|pip)"
COMMAND = re.compile(rf"^(?:[$#] | {{4}})((?:{PROGRAMS}) (?:.*\\\n)*.*)$", re.MULTILINE)
INLINE = re.compile(r"`(warpwatch [a-z][^`]*)`")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    text = page.read_text()
    for line in [*COMMAND.findall(text), *INLINE.findall(text)]:
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        end = next((n for n, word in enumerate(words) if word in ("|", "&&", ">", "<")), None)
        yield [Path(words[0]).name, *words[1:end]]


# A file or folder in backticks. A … stands for the folders between.
NAMED = re.compile(r"`([\w./…-]+(?:/|\.(?:csv|md|py|toml)))`")

CASES = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)}")
    for page in PAGES
    for words in commands(page)
]


class ParsedError(Exception):
    """Raised instead of running a command whose arguments are right."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *args: object, **options: object) -> None:
        parse(self, *args, **options)
        raise ParsedError

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, parsed)


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("words", CASES)
def test_a_documented_command_exists_with_its_options(words: list[str]) -> None:
    program, *rest = words
    if words[:2] == ["warpwatch", "run"]:
        options = itertools.takewhile(lambda word: word != "--", rest)
        subprocess.run([sys.executable, "-m", "warpwatch", *options, "--", "true"], check=True)
    elif program == "warpwatch" and len(rest) == 1:
        assert rest[0] in metadata.entry_points(group=GROUP).names
    elif program == "warpwatch":
        # An address would be fetched before the options are parsed.
        rest = ["trace.json" if word.startswith("s3://") else word for word in rest]
        with pytest.raises(ParsedError):
            main(rest)
    elif program == "make":
        assert rest[0] in TARGETS
    elif program == "pip":
        assert not [word for word in rest if re.match(r"warpwatch($|\[)", word)], "not published"
        extras = re.findall(r"\.\[([\w,-]+)\]", " ".join(rest))
        assert set(",".join(extras).split(",")) - {""} <= EXTRAS.keys()
    elif program == "helm":
        check_helm(rest)


def check_helm(words: list[str]) -> None:
    values = yaml.safe_load((ROOT / "helm/warpwatch/values.yaml").read_text())
    for option, text in itertools.pairwise(words):
        if option == "-f":
            assert (ROOT / text).is_file()
        if option == "--set":
            parent, _, key = text.partition("=")[0].rpartition(".")
            node = values
            for part in parent.split(".") if parent else ():
                node = node[part]
            assert not node or key in node


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_a_page_are_code_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for language, block in FENCED.findall(text):
        if language == "python":
            compile(block, str(page), "exec")
        elif language == "yaml":
            list(yaml.safe_load_all(block))
        elif language == "json":
            msgspec.json.Decoder().decode_lines(block) if "\n{" in block else json.loads(block)
    links = re.findall(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)", text)
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor[1:] in anchors(target), f"{path}{anchor}"


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_a_document_names_exist(page: str) -> None:
    found = [path for package in ROOT.glob("*/warpwatch*/") for path in package.rglob("*")]
    paths = "\n".join(f"{path}{'/' * path.is_dir()}" for path in found)
    names = set(NAMED.findall((ROOT / page).read_text()))
    rest = {name for name in names if not (ROOT / name).exists()}
    patterns = {name: rf"/{re.escape(name).replace('…', '.+')}$" for name in rest}
    assert names - rest
    assert not [name for name in rest if not re.search(patterns[name], paths, re.MULTILINE)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found)
    return {*plain, *re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text())}
