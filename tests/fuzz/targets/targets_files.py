"""Files of targets, as Prometheus's file_sd has them: what others write for the fleet."""

from pathlib import Path

from tests.fuzz.watch import Target
from warpwatch_fleet.config import FleetConfig
from warpwatch_fleet.targets import MAX_TARGETS, Targets


def target(folder: Path) -> Target:
    path = folder / "targets.json"
    targets = Targets(FleetConfig(targets_files=(path,)))

    def run(data: bytes) -> None:
        path.write_bytes(data)
        found = targets.read()
        assert len(found) <= MAX_TARGETS
        for address, one in found.items():
            assert address.isprintable() and " " not in address and "/" not in address, address
            assert one.owner is None or isinstance(one.owner, str)
        assert all("\n" not in line for line in targets.failing), targets.failing

    seeds = [
        b'[{"targets": ["gpu-1:9400", "[::1]:9400"], "labels": {"owner": "ns/team"}}]',
        b"- targets: [gpu-1:9400]\n  labels: {scheduler: slurm}\n- targets: []\n", b"[]",
    ]  # fmt: skip
    tokens = (
        b'"targets":', b'"labels":', b"null", b"&a", b"*a", b"<<:", b"!!python/object:os.system",
        b"\t", b"\\ud800", b"\xff", b"[[[[", b"{{{{", b"9" * 60, b"---\n", b"user@host:1", b"?x=:1",
    )  # fmt: skip
    return Target(run, seeds, tokens, 1024)
