"""Describes this process for its ring: job, rank and other metadata. Every text is bounded."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from warpwatch.protocol import META_MAX_TEXT

# Characters, and bytes of JSON: the whole has to fit into a metadata slot.
MAX_JOB = 128
_MAX_JOB_BYTES = 384
MAX_RUN = 128
_MAX_TEXT = 64
MAX_PHASE = 32

_MADE_UP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def bounded(text: str, characters: int, json_bytes: int) -> str:
    """Return the longest prefix of ``text`` within both limits."""
    text = text[:characters]
    while len(json.dumps(text)) - 2 > json_bytes:
        text = text[:-1]
    return text


def phase_name(text: str) -> str:
    """Return at most 32 letters, digits and ``_.:/-``; other characters become ``_``."""
    name = re.sub(r"[^A-Za-z0-9_.:/-]", "_", text)
    return (name if re.match("[A-Za-z_]", name) else f"_{name}")[:MAX_PHASE]


def job_name(asked: str | None, environ: Mapping[str, str], argv: Sequence[str]) -> str:
    """Return the first of attach(job=), WARPWATCH_JOB, Slurm, torchrun, pod owner and script."""
    slurm = "-".join(filter(None, (environ.get("SLURM_JOB_NAME"), environ.get("SLURM_JOB_ID"))))
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "none")
    script = os.path.basename(argv[0]) if argv else ""
    names = (
        asked,
        environ.get("WARPWATCH_JOB"),
        slurm,
        # A run id that torchrun made up is not a name and differs for each run.
        "" if torchrun == "none" or _MADE_UP.fullmatch(torchrun) else torchrun,
        environ.get("WARPWATCH_POD_OWNER"),
        script if script not in ("-c", "-m") else "",
        "python",
    )
    # A program may pass a number.
    return bounded(str(next(name for name in names if name)), MAX_JOB, _MAX_JOB_BYTES)


def run_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of this start of the job, the same on all of its nodes, or None.

    It is WARPWATCH_RUN, Slurm's job id with its restart count, or torchrun's run id.
    """
    slurm = environ.get("SLURM_JOB_ID")
    restarts = environ.get("SLURM_RESTART_COUNT")
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "none")
    ids = (
        environ.get("WARPWATCH_RUN"),
        f"{slurm}-{restarts}" if slurm and restarts else slurm,
        torchrun if torchrun != "none" else None,
    )
    found = next(filter(None, ids), None)
    return bounded(found, MAX_RUN, MAX_RUN) if found else None


def _master(environ: Mapping[str, str]) -> str | None:
    """Return where the ranks of all nodes meet: it joins nodes without a run id."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return bounded(f"{address}:{port}", _MAX_TEXT, _MAX_TEXT) if address and port else None


def _number(text: str | None) -> int | None:
    try:
        value = int(text or "")
    except ValueError:
        return None
    return value if 0 <= value < 1 << 31 else None


def _first(
    environ: Mapping[str, str], launcher: str, group: int | None, slurm: str, default: int
) -> int:
    """Return the number of the launcher, else the process group's, else Slurm's."""
    values = (_number(environ.get(launcher)), group, _number(environ.get(slurm)))
    return next((value for value in values if value is not None), default)


def _distributed() -> tuple[int | None, int | None]:
    """Return (rank, world size) of the process group, if the process has one."""
    module = sys.modules.get("torch.distributed")
    # It may be half-imported, or in the course of being destroyed by the training thread.
    with suppress(Exception):
        if module is not None and module.is_available() and module.is_initialized():
            return int(module.get_rank()), int(module.get_world_size())
    return None, None


def _model(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the user's figures of the model's FLOPs; invalid numbers are left out."""
    found: dict[str, Any] = {}
    for name in ("flops_per_token", "flops_per_sample"):
        with suppress(KeyError, ValueError):
            value = float(environ[f"WARPWATCH_{name.upper()}"])
            if 0 < value < 1e24:
                found[name] = value
    precision = environ.get("WARPWATCH_PRECISION")
    return {**found, "precision": bounded(precision, 16, 16)} if precision else found


# In the order in which they are removed.
_OPTIONAL = (
    *("note", "server", "parameters", "parallel"),
    *("precision", "flops_per_sample", "flops_per_token"),
)


def fitted(metadata: dict[str, Any]) -> dict[str, Any]:
    """Remove optional keys until the metadata fits into its slot."""
    for name in _OPTIONAL:
        if len(json.dumps(metadata, separators=(",", ":"))) <= META_MAX_TEXT:
            break
        metadata.pop(name, None)
    return metadata


def describe(
    job: str | None, environ: Mapping[str, str], place: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the part of the ring's metadata that does not change.

    ``place`` replaces what the environment says; a job or run that the user names stays.
    """
    group_rank, group_size = _distributed()
    rank = _first(environ, "RANK", group_rank, "SLURM_PROCID", 0)
    local = _first(environ, "LOCAL_RANK", None, "SLURM_LOCALID", rank)
    size = _first(environ, "WORLD_SIZE", group_size, "SLURM_NTASKS", 1)
    torch_version = getattr(sys.modules.get("torch"), "__version__", None)
    pod_uid = environ.get("WARPWATCH_POD_UID")
    replica = _replica(environ, place) if place else None
    where = {"run": replica or run_id(environ), "master": _master(environ)}
    # The name of the served model, unless the user named the job.
    served = None if environ.get("WARPWATCH_JOB") else place.get("job")
    return {
        "job": job_name(job or served, environ, sys.argv),
        **{name: text for name, text in where.items() if text},
        **_model(environ),
        "rank": rank,
        "local_rank": local,
        # Some launchers do not set it; there are at least the ranks up to this one.
        "world_size": max(size, rank + 1),
        "hostname": bounded(socket.gethostname(), _MAX_TEXT, _MAX_TEXT),
        "pod_uid": bounded(pod_uid, _MAX_TEXT, _MAX_TEXT) if pod_uid else None,
        "python": platform.python_version(),
        "torch": bounded(str(torch_version), 32, 32) if torch_version else None,
        **{name: value for name, value in place.items() if name not in ("job", "run", "engine")},
    }


def _replica(environ: Mapping[str, str], place: Mapping[str, Any]) -> str | None:
    """Return the run of a server, one per replica: its pod, else the start of its engine.

    Independent engines of one server, by ``engine``, are replicas of their own after the first.
    """
    names = (environ.get("WARPWATCH_RUN"), environ.get("WARPWATCH_POD_UID"), place.get("run"))
    found = next(filter(None, names), None)
    engine = f"-dp{place['engine']}" if place.get("engine") else ""
    limit = MAX_RUN - len(engine)
    return bounded(str(found), limit, limit) + engine if found else None
