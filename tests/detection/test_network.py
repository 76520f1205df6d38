"""Faults that errors of a network port explain."""

import pytest

from tests.detection.life import LLAMA, Life

PORT = "mlx5_0/1"


@pytest.mark.parametrize("beyond", [True, False])
def test_it_explains_slow_communication_of_a_job_that_goes_beyond_the_node(beyond):
    slow, errors = "communication takes 40 % longer", {"device": PORT}
    for errors_first in (False, True):
        life = Life()
        for rank in life.rank_devices.jobs[LLAMA].values():
            rank.world_size = 16 if beyond else 8
        if errors_first:
            life.found("network_errors", 10, **errors)
        life.found("comm_slow", 20, slow)
        life.found("network_errors", 30, **errors)
        kinds = {one.kind: one.summary for one in life.register.active}
        assert kinds.keys() == {"network_errors", *([] if beyond else ["comm_slow"])}
        assert (f"in llama {slow}" in kinds["network_errors"]) == beyond
        assert not beyond or life.register.active[-1].job == "llama"
