"""Which job something is of: who owns it, what it is called, and which start of it is meant."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


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
