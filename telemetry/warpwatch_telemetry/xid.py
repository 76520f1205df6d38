"""What an entry of the catalogue of XIDs says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Blame = Literal["application", "driver", "hardware", "system", "thermal_power", "unknown"]
Severity = Literal["info", "warning", "critical"]

BLAMES: tuple[str, ...] = get_args(Blame)
SEVERITIES: tuple[str, ...] = get_args(Severity)


@dataclass(frozen=True, slots=True)
class Xid:
    """A number that the NVIDIA driver reports an error under, in our words.

    blame: where the cause is most often found: the program on the GPU, the driver and its
        firmware, the GPU and its links, the machine around it, its power and cooling.
    severity: info needs no one, warning ends work or foretells trouble, critical means that
        someone must act on the GPU.
    """

    number: int
    name: str
    meaning: str
    blame: Blame
    severity: Severity
    action: str
