"""Names of kernels, copies and devices."""

from tests.conftest import Cases
from warpwatch_diagnosis.measures.gpu_work import classify, copy_kind
from warpwatch_diagnosis.measures.roofline import peaks_of


def test_the_class_of_a_kernel_follows_from_its_name(cases: Cases) -> None:
    """The names are from traces of many versions and devices."""
    cases("diagnosis/kernels.txt", classify)


def test_a_copys_name_has_direction_and_memory(cases: Cases) -> None:
    cases("diagnosis/copies.txt", copy_kind)


def test_a_devices_name_finds_its_data_sheet(cases: Cases) -> None:
    """A part of a GPU has none, and no data sheet has some rates."""
    cases("diagnosis/peaks.txt", peaks_of)
