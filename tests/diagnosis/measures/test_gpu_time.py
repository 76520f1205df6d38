"""Kernels, copies, streams and launches of one device and of several."""

from pathlib import Path

from warpwatch_diagnosis.measures.gpu_work import classify, copy_kind

PINNED = "Memcpy HtoD (Pinned -> Device)"
# From traces of many versions and devices: class and name.
CLASSES = Path(__file__).parents[1] / "fixtures" / "kernel_classes.tsv"


def test_the_class_of_a_kernel_follows_from_its_name() -> None:
    names = [line.split("\t") for line in CLASSES.read_text().splitlines()]
    found = [[classify(name), name] for _, name in names]
    assert len(found) > 40
    assert found == names


def test_a_copys_name_has_direction_and_memory() -> None:
    kinds = {
        "Memcpy HtoD (Pageable -> Device)": ("HtoD", "pageable"),
        PINNED: ("HtoD", "pinned"),
        "Memcpy DtoH (Device -> Pageable)": ("DtoH", "pageable"),
        "Memcpy DtoD (Device -> Device)": ("DtoD", None),
        "Memcpy PtoP (Device -> Device)": ("PtoP", None),
        "Memcpy HtoD (Host -> Device)": ("HtoD", None),
        "CopyDeviceToHost": ("DtoH", None),
        "Memset (Device)": ("memset", None),
        "something": ("unknown", None),
    }
    assert {name: copy_kind(name) for name in kinds} == kinds
