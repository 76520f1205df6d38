"""The hooks of SGLang on a stand-in that has the names which they use, as in SGLang 0.5.23."""

import pytest

from tests.client.servers.ends import WAITS, ended

BEGINS = """
import os, sys
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
load_plugins()
said = dict(tp_size=2, pp_size=2, dp_size=2, enable_dp_attention=False, served_model_name="chat")
"""
SCHEDULER = f"""{BEGINS}
from sglang.srt.managers.scheduler import Scheduler, batch
scheduler = Scheduler(SimpleNamespace(**said))
assert os.environ["WARPWATCH_REPLICA"].isdigit()
{WAITS}
scheduler.on_idle()
scheduler.idle = False
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
SchedulerMetricsCollector().log_stats(SimpleNamespace(token_usage=0.25))
# With overlapping the next batch is launched before the results of one are processed.
batches = [batch("extend", 1, tokens=40, kv=40), batch("decode", 2, kv=42)]
batches += [batch("mixed", 3, tokens=10, decoding=2), batch("idle", 0)]
for index, one in enumerate(batches):
    scheduler.get_next_batch_to_run()
    assert scheduler.run_batch(one) == "result"
    if index:
        scheduler.process_batch_result(batches[index - 1], "result")
scheduler.process_batch_result(batches[-1], "result")
scheduler.idle = True
scheduler.on_idle()
"""
FRONT_END = f"""{BEGINS}
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector
TokenizerManager(SimpleNamespace(**said, enable_metrics=sys.argv[1] == "1"))
collector = TokenizerMetricsCollector()
assert collector.observe_time_to_first_token({{}}, 0.05) == 0.05
assert collector.observe_inter_token_latency({{}}, 0.024, num_new_tokens=3) == 3
"""


def test_a_scheduler_is_a_rank_and_its_batches_are_iterations(folder):
    ring = ended(folder, SCHEDULER)
    said = ring.metadata
    assert (said["job"], said["role"], said["server"]) == ("chat", "rank", "sglang 0.5.23")
    # The second of two engines without attention in data parallel is a replica of its own.
    assert (said["rank"], said["world_size"], said["run"][-4:]) == (2, 4, "-dp1")
    assert said["parallel"] == {"tensor": [0, 2], "pipeline": [1, 2]}
    # Only the first stage counts tokens.
    assert ring.works == [(0, 40, 0, 40), (0, 0, 2, 42), (0, 8, 2, 0)]
    assert sorted(said["phases"]) == ["forward", "sample", "schedule"]
    assert ring.seconds[-1][4] == 250_000_000  # of the KV cache, in 1e-9
    assert (said["faults"], ring.event_names()) == (0, ["exit"])


@pytest.mark.parametrize(
    ("metrics", "note"),
    [("1", ""), ("0", "no latencies and KV cache: SGLang's metrics are off (--enable-metrics)")],
)
def test_a_front_end_reports_the_latencies_that_sglang_measures(folder, metrics, note):
    ring = ended(folder, FRONT_END, metrics, WARPWATCH_REPLICA="7")
    said = ring.metadata
    assert (said["rank"], said["role"], said.get("note", "")) == (4, "frontend", note)
    assert said["run"] == "7"
    # One first token after 50 ms, three tokens after 8 ms each.
    assert ring.latencies == [(0, 41, 1), (1, 22, 3)]


@pytest.mark.parametrize(
    ("change", "environ", "note"),
    [
        ("import warpwatch.hooks; warpwatch.hooks.install()", {"SGLANG_PLUGINS": "other"},
         "SGLANG_PLUGINS leaves warpwatch out: add it to see iterations"),
        ("from sglang.srt.plugins import hook_registry; del hook_registry.HookType", {},
         "hook does not fit: AttributeError: module 'sglang.srt.plugins.hook_registry' has no "
         "attribute 'HookType'"),
    ],
)  # fmt: skip
def test_hooks_that_are_left_out_or_do_not_fit_are_named_in_the_status(
    folder, change, environ, note
):
    assert ended(folder, f"{change}\n{BEGINS}", **environ).metadata["note"] == note
