"""Registers the rules in alphabetical order.

A new rule is one class, one line here and its advice in advice.toml; a new kind has its words in
words.toml, too.
"""

from __future__ import annotations

from warpwatch_diagnosis.rules.base import DiagnosisRule
from warpwatch_diagnosis.rules.communication_bound import CommunicationBoundRule
from warpwatch_diagnosis.rules.host_activities import (
    AllocatorThrashRule,
    CheckpointRule,
    DataLoadingRule,
    GcPauseRule,
    RecompilationRule,
)
from warpwatch_diagnosis.rules.host_bound import (
    HostBoundRule,
    LaunchBoundRule,
    SyncBoundRule,
    TransferBoundRule,
)
from warpwatch_diagnosis.rules.memory_bound import MemoryBoundRule
from warpwatch_diagnosis.rules.pipeline import PipelineBubbleRule, StageImbalanceRule
from warpwatch_diagnosis.rules.serving import (
    KvThrashRule,
    PrefillInterferenceRule,
    SchedulerBoundRule,
    WaitingForWorkRule,
)
from warpwatch_diagnosis.rules.slower_compute import SlowerComputeRule
from warpwatch_diagnosis.rules.straggler import StragglerRule

RULES: tuple[DiagnosisRule, ...] = (
    AllocatorThrashRule(),
    CheckpointRule(),
    CommunicationBoundRule(),
    DataLoadingRule(),
    GcPauseRule(),
    HostBoundRule(),
    KvThrashRule(),
    LaunchBoundRule(),
    MemoryBoundRule(),
    PipelineBubbleRule(),
    PrefillInterferenceRule(),
    RecompilationRule(),
    SchedulerBoundRule(),
    SlowerComputeRule(),
    StageImbalanceRule(),
    StragglerRule(),
    SyncBoundRule(),
    TransferBoundRule(),
    WaitingForWorkRule(),
)
