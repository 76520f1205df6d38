"""A network port that goes down, errors of one that rise, and what they explain."""

from collections.abc import Iterator

import pytest

from tests.detection.life import LLAMA, Life
from tests.detection.streams import EPOCH_S, detection, opened
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import PortReading

PORT = "mlx5_0/1"


def key(name: str, *labels: str) -> SeriesKey:
    return f"network_port_{name}", ("mlx5_0", "1", *labels)


# The lifetime counts of a good port: one has stopped at its maximum.
GOOD = {
    key("up"): 1.0,
    key("errors_total", "port_rcv_errors"): 14.0,
    key("errors_total", "local_link_integrity_errors"): 15.0,
    key("errors_total", "link_downed"): 3.0,
    key("errors_total", "symbol_error"): 0.0,
    key("errors_total", "out_of_sequence"): 0.0,
}


def seen(begin: int, end: int, up: float = 1.0, **rates: float) -> Iterator[PortReading]:
    for second in range(begin, end, 5):
        grown = {key("errors_total", kind): rate * (second - begin) for kind, rate in rates.items()}
        yield PortReading(EPOCH_S + second, PORT, GOOD | grown | {key("up"): up})


def test_a_port_that_goes_down_is_found_and_over_when_it_is_back():
    engine = detection()
    assert opened(engine, seen(0, 300)) == []
    (found,) = opened(engine, seen(300, 345, up=0.0))
    assert (found.kind, found.severity, found.device) == ("network_link_down", "critical", PORT)
    assert found.summary == "the network port mlx5_0/1 is down"
    assert opened(engine, seen(345, 400)) == []
    assert engine.active == ()


def test_a_port_that_never_was_up_and_one_that_is_trained_anew_raise_nothing():
    assert opened(detection(), seen(0, 600, up=0.0)) == []
    engine = detection()
    assert opened(engine, [*seen(0, 300), *seen(300, 315, up=0.0), *seen(315, 600)]) == []


def test_few_errors_and_what_a_port_had_before_raise_nothing(golden_report):
    engine = detection()
    assert opened(engine, seen(0, 1800, symbol_error=0.5, out_of_sequence=20.0)) == []
    golden_report(engine)


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
