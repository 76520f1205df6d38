"""The rules, one file each, in alphabetical order. A new rule is one file and one line here; a
new kind also has its words in report/words.py."""

from __future__ import annotations

from warpwatch_diagnosis.rules.allocator_thrash import AllocatorThrashRule
from warpwatch_diagnosis.rules.base import Rule
from warpwatch_diagnosis.rules.checkpoint import CheckpointRule
from warpwatch_diagnosis.rules.communication_bound import CommunicationBoundRule
from warpwatch_diagnosis.rules.data_loading import DataLoadingRule
from warpwatch_diagnosis.rules.gc_pause import GcPauseRule
from warpwatch_diagnosis.rules.host_bound import HostBoundRule
from warpwatch_diagnosis.rules.launch_bound import LaunchBoundRule
from warpwatch_diagnosis.rules.memory_bound import MemoryBoundRule
from warpwatch_diagnosis.rules.pipeline_bubble import PipelineBubbleRule
from warpwatch_diagnosis.rules.recompilation import RecompilationRule
from warpwatch_diagnosis.rules.stage_imbalance import StageImbalanceRule
from warpwatch_diagnosis.rules.straggler import StragglerRule
from warpwatch_diagnosis.rules.sync_bound import SyncBoundRule
from warpwatch_diagnosis.rules.transfer_bound import TransferBoundRule

RULES: tuple[Rule, ...] = (
    AllocatorThrashRule(),
    CheckpointRule(),
    CommunicationBoundRule(),
    DataLoadingRule(),
    GcPauseRule(),
    HostBoundRule(),
    LaunchBoundRule(),
    MemoryBoundRule(),
    PipelineBubbleRule(),
    RecompilationRule(),
    StageImbalanceRule(),
    StragglerRule(),
    SyncBoundRule(),
    TransferBoundRule(),
)
