"""The rules, one file each, in alphabetical order. A new rule is one file and one line here."""

from __future__ import annotations

from warpwatch.diagnosis.rules.base import Rule
from warpwatch.diagnosis.rules.communication_bound import CommunicationBound
from warpwatch.diagnosis.rules.data_loading import DataLoading
from warpwatch.diagnosis.rules.host_bound import HostBound
from warpwatch.diagnosis.rules.launch_bound import LaunchBound
from warpwatch.diagnosis.rules.straggler import Straggler

RULES: tuple[Rule, ...] = (
    CommunicationBound(),
    DataLoading(),
    HostBound(),
    LaunchBound(),
    Straggler(),
)
