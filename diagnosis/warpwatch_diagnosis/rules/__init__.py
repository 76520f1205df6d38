"""The rules, one file each, in alphabetical order. A new rule is one file and one line here."""

from __future__ import annotations

from warpwatch_diagnosis.rules.allocator_thrash import AllocatorThrash
from warpwatch_diagnosis.rules.base import Rule
from warpwatch_diagnosis.rules.checkpoint import Checkpoint
from warpwatch_diagnosis.rules.communication_bound import CommunicationBound
from warpwatch_diagnosis.rules.data_loading import DataLoading
from warpwatch_diagnosis.rules.gc_pause import GcPause
from warpwatch_diagnosis.rules.host_bound import HostBound
from warpwatch_diagnosis.rules.launch_bound import LaunchBound
from warpwatch_diagnosis.rules.memory_bound import MemoryBound
from warpwatch_diagnosis.rules.recompilation import Recompilation
from warpwatch_diagnosis.rules.straggler import Straggler
from warpwatch_diagnosis.rules.sync_bound import SyncBound
from warpwatch_diagnosis.rules.transfer_bound import TransferBound

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
