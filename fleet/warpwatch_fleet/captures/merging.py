"""One diagnosis of what all nodes brought: their reductions or stacks, fetched and read together.

Traces stay where they are. What agents send is read in a process of its own, as an agent does it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from warpwatch_capturing import usable
from warpwatch_capturing.children import child
from warpwatch_capturing.children.confinement import Run, run
from warpwatch_capturing.children.documents import read_diagnosis
from warpwatch_capturing.children.verification import UNREADABLE
from warpwatch_diagnosis.trace.files import reduction_name
from warpwatch_fleet.captures.part import Part
from warpwatch_fleet.following import AgentError, Agents
from warpwatch_fleet.node import FILE
from warpwatch_runtime import files
from warpwatch_telemetry import capture_id as ids
from warpwatch_telemetry.captures import Capture, RankCapture

_CAPTURE_ID = re.compile(ids.PATTERN)
logger = logging.getLogger(__name__)

# Of one rank: the most that a reduction has, and more than stacks do.
MAX_BYTES = 2 * 2**20
FETCH_TIMEOUT_S = 60.0
# Files on their way, and diagnoses that are made, at once.
MAX_FETCHES = 8
MAX_CHILDREN = 1
# What is shown of a diagnosis; the rest is in its file.
SHOWN = ("schema", "verdict", "summary", "findings", "collectives")


@dataclass(slots=True)
class _Fetched:
    """Names in the capture's folder; missing: ranks without, and why."""

    ranks: dict[int, str] = field(default_factory=dict)
    baseline: list[str] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)


class Merging:
    """For one event loop."""

    def __init__(
        self, agents: Agents, monotonic: Callable[[], float] = time.monotonic, run: Run = run
    ) -> None:
        self._agents = agents
        self._monotonic = monotonic
        self._run = run
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._children = asyncio.Semaphore(MAX_CHILDREN)

    async def diagnose(self, capture: Capture, parts: Sequence[Part]) -> Capture:
        """The capture, which has a folder and has ended, with what it says and its files."""
        folder, kind = Path(str(capture.folder)), capture.request.kind
        fetched = await self._fetch(capture, parts, folder)
        nodes, asked = usable.nodes(capture.ranks), child.asked(capture.request)
        result = "no files"
        while fetched.ranks:
            names = [fetched.ranks[rank] for rank in sorted(fetched.ranks)]
            baseline = [folder / name for name in fetched.baseline]
            async with self._children:
                result = await asyncio.to_thread(
                    child.diagnose, kind, folder, names, fetched.missing, baseline, nodes, asked,
                    self._run,
                )  # fmt: skip
            if not _without_unread(fetched, result):
                break
        read = list(fetched.ranks.values())
        made = [name for name in child.made_of(kind, read)
                if (folder / name).is_file()]  # fmt: skip
        ranks = tuple(_with_loss(rank, fetched.missing) for rank in capture.ranks)
        lost = "; ".join(
            f"{rank.node}: rank {rank.rank}: {fetched.missing[rank.rank]}"
            for rank in capture.ranks
            if rank.rank in fetched.missing and usable.is_usable(rank)
        )
        partial = capture.outcome == "complete" and (lost or result != "ok")
        return replace(
            capture,
            ranks=ranks,
            outcome="partial" if partial else capture.outcome,
            detail="; ".join(filter(None, (capture.detail, lost or (result if partial else "")))),
            files=tuple(dict.fromkeys((*made, *read, *fetched.baseline, *capture.files))),
            diagnosis=shown(read_diagnosis(folder)) if made else None,
            diagnosis_outcome=result,
        )

    async def _fetch(self, capture: Capture, parts: Sequence[Part], folder: Path) -> _Fetched:
        """All that can be had."""
        fetched = _Fetched(missing=usable.missing(capture.ranks))
        by_node = {part.node: part for part in parts}
        wanted = [
            (rank, part)
            for rank in capture.ranks
            if usable.is_usable(rank) and rank.file and (part := by_node.get(rank.node or ""))
        ]
        await asyncio.gather(
            *(self._fetch_rank(capture, rank, part, folder, fetched) for rank, part in wanted)
        )
        return fetched

    async def _fetch_rank(
        self, capture: Capture, rank: RankCapture, part: Part, folder: Path, fetched: _Fetched
    ) -> None:
        file, said = str(rank.file), part.said
        name = reduction_name(file) if capture.request.kind == "torch" else file
        if said is None or not FILE.fullmatch(name) or f"rank{rank.rank}." not in name:
            fetched.missing[rank.rank] = "its agent names no file of it"
            return
        try:
            await self._get(part, said.id, name, folder / name)
            fetched.ranks[rank.rank] = name
        except (AgentError, OSError) as error:
            fetched.missing[rank.rank] = str(error)
            return
        if said.baseline_id is not None and _CAPTURE_ID.fullmatch(said.baseline_id):
            of_baseline = usable.BASELINE + name
            try:
                await self._get(part, said.baseline_id, name, folder / of_baseline)
                fetched.baseline.append(of_baseline)
            except (AgentError, OSError) as error:
                logger.info("capture %s: no baseline of rank %d: %s", capture.id, rank.rank, error)

    async def _get(self, part: Part, capture_id: str, name: str, path: Path) -> None:
        async with self._fetches:
            chunks = self._agents.download(part.target, f"captures/{capture_id}/{name}")
            content = await asyncio.to_thread(_bounded, chunks, self._monotonic)
            await asyncio.to_thread(files.write, path, content, durable=False)


def shown(diagnosis: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Without what grows with the number of ranks."""
    return diagnosis and {key: diagnosis[key] for key in SHOWN if key in diagnosis}


def _bounded(chunks: Iterator[bytes], monotonic: Callable[[], float]) -> bytes:
    content, deadline = b"", monotonic() + FETCH_TIMEOUT_S
    for chunk in chunks:
        content += chunk
        if len(content) > MAX_BYTES or monotonic() > deadline:
            raise AgentError(f"more than {MAX_BYTES} bytes or {FETCH_TIMEOUT_S:g} s")
    return content


def _without_unread(fetched: _Fetched, result: str) -> bool:
    """Whether it was one rank's file that could not be read, which is left out from now on."""
    for rank, name in fetched.ranks.items():
        about = f"{child.UNREADABLE}{name}: "
        if result.startswith(about):
            fetched.missing[rank] = result.removeprefix(about)
            del fetched.ranks[rank]
            return True
    for name in fetched.baseline:
        if result.startswith(f"{child.UNREADABLE}{name}: "):
            fetched.baseline.remove(name)
            return True
    return False


def _with_loss(rank: RankCapture, missing: Mapping[int, str]) -> RankCapture:
    """A rank whose trace is there, but was not read."""
    why = missing.get(rank.rank)
    if why is None or not usable.is_usable(rank):
        return rank
    problems = (*rank.problems, f"{UNREADABLE}: {why}")
    return replace(rank, detail=why, problems=problems, verified=False)
