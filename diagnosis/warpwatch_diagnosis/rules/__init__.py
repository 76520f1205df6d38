"""The rules, one file each, in alphabetical order. A new rule is one file and one line here."""

from __future__ import annotations

from warpwatch.diagnosis.rules.allocator_thrash import AllocatorThrash
from warpwatch.diagnosis.rules.base import Rule
from warpwatch.diagnosis.rules.checkpoint import Checkpoint
from warpwatch.diagnosis.rules.communication_bound import CommunicationBound
from warpwatch.diagnosis.rules.data_loading import DataLoading
from warpwatch.diagnosis.rules.gc_pause import GcPause
from warpwatch.diagnosis.rules.host_bound import HostBound
from warpwatch.diagnosis.rules.launch_bound import LaunchBound
from warpwatch.diagnosis.rules.memory_bound import MemoryBound
from warpwatch.diagnosis.rules.recompilation import Recompilation
from warpwatch.diagnosis.rules.straggler import Straggler
from warpwatch.diagnosis.rules.sync_bound import SyncBound
from warpwatch.diagnosis.rules.transfer_bound import TransferBound

RULES: tuple[Rule, ...] = (
    AllocatorThrash(),
    Checkpoint(),
    CommunicationBound(),
    DataLoading(),
    GcPause(),
    HostBound(),
    LaunchBound(),
    MemoryBound(),
    Recompilation(),
    Straggler(),
    SyncBound(),
    TransferBound(),
)
