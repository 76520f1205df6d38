"""Waiting for other ranks is ``comm``: two gloo ranks, of which the second comes late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.daemon_side import ROOT

LATE_S = 0.15
EXPLICIT = ("all_reduce", "wait", "barrier", "object", "functional")

Found = dict[str, Any]
Ranks = tuple[Found, Found]


def two_ranks(folder: Path, hooks: str) -> list[Ranks]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "client"),
        "WARPWATCH_DIR": str(folder / "nowhere"),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    script = str(Path(__file__).with_name("two_ranks.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(folder / f"meet-{hooks}"), hooks],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        reported = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], reported[0][1] + reported[1][1]
    return list(zip(*(json.loads(output) for output, _ in reported), strict=True))


@pytest.fixture(scope="module")
def without_and_with(tmp_path_factory: pytest.TempPathFactory) -> list[Ranks]:
    return two_ranks(tmp_path_factory.mktemp("ranks"), "late")


@pytest.fixture(scope="module")
def plain(without_and_with: list[Ranks]) -> Ranks:
    return without_and_with[0]


@pytest.fixture(scope="module")
def hooked_late(without_and_with: list[Ranks]) -> Ranks:
    """Hooks that came after torch."""
    return without_and_with[1]


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return two_ranks(tmp_path_factory.mktemp("ranks"), "early")[0]


@pytest.mark.parametrize("ranks", ["hooked", "hooked_late"])
def test_the_rank_that_is_on_time_waits_and_the_late_one_does_not(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    on_time, late = request.getfixturevalue(ranks)
    for name in EXPLICIT:
        assert on_time[name] > 0.8 * LATE_S, name
        assert late[name] < on_time[name] / 2, name


def test_ddp_waits_from_the_last_gradient_to_the_end_of_backward(
    hooked: Ranks,
) -> None:
    on_time, late = hooked
    # Two backwards to learn which gradient is the last.
    for name in ("ddp", "frozen", "compiled_ddp"):
        assert on_time[name]["waits"][:2] == [0, 0]
        assert min(on_time[name]["waits"][2:]) > 0.8 * LATE_S
        assert sum(late[name]["waits"]) < sum(on_time[name]["waits"]) / 2
    assert sorted(on_time["ddp_hooks"]) == [0, 0, 0, 1]


def test_ddp_learns_again_when_the_last_gradient_does_not_come(plain: Ranks, hooked: Ranks) -> None:
    assert hooked[0]["last_gradients"] == [["first"], ["second"]]
    assert plain[0]["last_gradients"] == [[], []]


def test_a_backward_without_communication_waits_for_no_one(hooked: Ranks) -> None:
    assert [rank["no_sync"] for rank in hooked] == [0, 0]


def test_fsdp2_steps_are_counted_and_its_waiting_on_the_cpu_is_seen(
    hooked: Ranks,
) -> None:
    on_time, late = hooked
    assert on_time["fsdp2_steps"] == late["fsdp2_steps"] == 5
    assert min(on_time["fsdp2"]["waits"]) > 0.8 * LATE_S


def test_training_is_the_same_bit_for_bit(plain: Ranks, hooked: Ranks) -> None:
    for name in ("alone", "ddp", "frozen", "fsdp2", "compiled_ddp"):
        assert [rank[name]["losses"] for rank in hooked] == [rank[name]["losses"] for rank in plain]


def test_compiled_collectives_are_those_of_an_unobserved_program(
    plain: Ranks, hooked: Ranks
) -> None:
    for rank in range(2):
        assert hooked[rank]["compiled"] == [[5.0, 5.0], [3.0] * 4]
        for name in ("compiled", "broken", "warnings", "ddp_compilation"):
            assert hooked[rank][name] == plain[rank][name], name


def test_the_calls_keep_their_signature_identity_and_derived_classes(
    plain: Ranks, hooked: Ranks
) -> None:
    for name in ("signature", "same", "derived"):
        assert hooked[0][name] == plain[0][name], name


def test_hooks_that_come_after_torch_do_the_same(plain: Ranks, hooked_late: Ranks) -> None:
    for name in ("alone", "compiled", "signature", "same", "derived"):
        late, unobserved = hooked_late[0][name], plain[0][name]
        assert late == unobserved or late["losses"] == unobserved["losses"], name
