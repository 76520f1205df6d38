"""Waiting for other ranks is ``comm``: two gloo ranks, of which the second comes late."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.client.fork_server import ForkServer

pytestmark = pytest.mark.torch

LATE_S = 5.0
EXPLICIT = ("all_reduce", "wait", "barrier", "object", "functional")
RANK = "import sys\nfrom tests.client import two_ranks\ntwo_ranks.main(*sys.argv[1:])"

Found = dict[str, Any]
Ranks = tuple[Found, Found]


def two_ranks(server: ForkServer, folder: Path, hooks: str) -> list[Ranks]:
    environ = {**os.environ, "WARPWATCH_DIR": str(folder / "nowhere"), "GLOO_SOCKET_IFNAME": "lo"}
    (folder / "spent").write_bytes(bytes(8))
    ranks = [
        server.fork(RANK, str(folder), hooks, environ={**environ, "RANK": str(rank)})
        for rank in range(2)
    ]
    reported = [rank.communicate() for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], reported[0][1] + reported[1][1]
    return list(zip(*(json.loads(output) for output, _ in reported), strict=True))


@pytest.fixture(scope="module")
def without_and_with(
    compiling: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> list[Ranks]:
    return two_ranks(compiling, tmp_path_factory.mktemp("ranks"), "late")


@pytest.fixture(scope="module")
def plain(without_and_with: list[Ranks]) -> Ranks:
    return without_and_with[0]


@pytest.fixture(scope="module")
def hooked_late(without_and_with: list[Ranks]) -> Ranks:
    return without_and_with[1]


@pytest.fixture(scope="module")
def hooked(compiling_with_hooks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return two_ranks(compiling_with_hooks, tmp_path_factory.mktemp("ranks"), "early")[0]


def waits(seconds: list[float]) -> list[int]:
    """How often each lasted as long as the other rank was late."""
    return [round(wait_s / LATE_S) for wait_s in seconds]


@pytest.mark.parametrize("ranks", ["hooked", "hooked_late"])
def test_the_rank_that_is_on_time_alone_waits(ranks: str, request: pytest.FixtureRequest) -> None:
    on_time, late = request.getfixturevalue(ranks)
    assert waits([on_time[name] for name in EXPLICIT]) == [1] * len(EXPLICIT)
    assert waits([late[name] for name in EXPLICIT]) == [0] * len(EXPLICIT)


def test_ddp_waits_from_the_last_gradient_to_the_end_of_backward(hooked: Ranks) -> None:
    on_time, late = hooked
    # Two backwards to learn which gradient is the last.
    for name in ("ddp", "frozen", "compiled_ddp"):
        assert on_time[name]["waits"][:2] == [0, 0]
        assert waits(on_time[name]["waits"][2:]) == [1, 1, 1]
        assert waits(late[name]["waits"]) == [0] * 5
    assert sorted(on_time["ddp_hooks"]) == [0, 0, 0, 1]
    # Without communication it waits for no one.
    assert [on_time["no_sync"], late["no_sync"]] == [0, 0]


def test_fsdp2_steps_are_counted_and_its_waiting_on_the_cpu_is_seen(hooked: Ranks) -> None:
    on_time, late = hooked
    assert on_time["fsdp2_steps"] == late["fsdp2_steps"] == 5
    assert waits(on_time["fsdp2"]["waits"]) == [1] * 5


def test_training_is_the_same_bit_for_bit(plain: Ranks, hooked: Ranks) -> None:
    for name in ("alone", "ddp", "frozen", "fsdp2", "compiled_ddp"):
        assert [rank[name]["losses"] for rank in hooked] == [rank[name]["losses"] for rank in plain]


def test_collectives_are_those_of_a_plain_program(plain: Ranks, hooked: Ranks) -> None:
    for observed, unobserved in zip(hooked, plain, strict=True):
        assert observed["compiled"] == [[5.0, 5.0], [3.0] * 4]
        for name in ("compiled", "ddp_compilation", "signature", "same", "remapped", "derived"):
            assert observed[name] == unobserved[name], name


def test_hooks_that_come_after_torch_do_the_same(plain: Ranks, hooked_late: Ranks) -> None:
    for name in ("alone", "compiled", "signature", "same", "remapped", "derived"):
        late, unobserved = hooked_late[0][name], plain[0][name]
        assert late == unobserved or late["losses"] == unobserved["losses"], name
