"""Which job something is of: who owns it, what it is called, and which start of it is meant."""

from __future__ import annotations

import functools
import hashlib
import zlib
from typing import NamedTuple, TypedDict

# A pod with folders of its own, or the user of files in the folders of all.
Owner = int | str


class JobFields(TypedDict):
    """A job as the fields of a record or a document."""

    owner: str
    job: str
    run: str


class JobId(NamedTuple):
    """A job is known by owner, name and run; what any of them says is never looked up elsewhere.

    owner: ``ns/<namespace>`` as the kubelet says it, else ``uid/<n>``; a fact, never a claim. Empty
    in logs of one owner.
    name: as it is shown. A second live run of one owner's name is ``name#<6 digits of run>``.
    run: tells one start from the next; empty where nothing does.
    """

    owner: str
    name: str
    run: str

    def fields(self) -> JobFields:
        return {"owner": self.owner, "job": self.name, "run": self.run}

    @property
    def base_name(self) -> str:
        """What its program calls it, on every node: without the mark of a second live run."""
        return self.name.removesuffix(run_mark(self.run))


def whose(owner: str) -> tuple[str, str]:
    """The namespace, or the user of the node, that an owner is: one of them is empty."""
    kind, _, name = owner.partition("/")
    return (name, "") if kind == "ns" else ("", name)


def run_mark(run: str) -> str:
    """What tells a run from another live one of the same name and owner: ``#<6 digits>``."""
    return f"#{hashlib.sha256(run.encode(errors='replace')).hexdigest()[:6]}"


# Asked of every record that is streamed.
@functools.lru_cache(maxsize=4096)
def shard_key(job: JobId) -> int:
    """Modulo their number, which of several fleets judges the job; the same on all of its nodes."""
    return zlib.crc32("\0".join((job.owner, job.base_name)).encode(errors="replace"))
