#!/bin/bash
# Prolog of Slurm: refuses a job whose GPUs have a critical fault, and drains the node.
#
# The daemon on this node is asked through its socket. A job without GPUs starts always. At first the
# system log only says what would be refused: REFUSE=1 in /etc/warpwatch/prolog.conf refuses, as long
# as fewer than MAX_DRAINED (3) nodes are drained so. If the daemon or Slurm does not answer, the job
# starts.
set -uo pipefail

PREFIX='warpwatch: '
MAX_DRAINED=3
REFUSE=''
# shellcheck source=/dev/null
[[ -r ${CONF:=/etc/warpwatch/prolog.conf} ]] && source "$CONF"
node=${SLURMD_NODENAME:-$(hostname -s)}

say() { logger --tag warpwatch-prolog --stderr -- "job ${SLURM_JOB_ID:-?}: $*" || true; }

# The first fault of a GPU of the job, in characters that Slurm's parser takes. The indices are the
# node's own. A fault without an index may be of any GPU.
fault() {
  timeout 10 warpwatch anomalies --json | python3 -c '
import json, re, sys
KINDS = """device_needs_service device_lost device_stuck xid ecc_uncorrectable row_remap thermal_throttle power_brake clock_drop
    pcie_degraded nvlink_error network_link_down network_errors device_idle overheating""".split()
mine = sys.argv[1].split(",")
for one in json.load(sys.stdin)["anomalies"]:
    near = one.get("gpu") is None or str(one["gpu"]) in mine
    if near and one["kind"] in KINDS and one["severity"] == "critical" and one["end_time"] is None:
        text = one["kind"] + ": " + one["summary"]
        print(re.sub(r"[^\w .:%/()-]", " ", text, flags=re.ASCII)[:200])
        break' "$SLURM_JOB_GPUS"
}

[[ -n ${SLURM_JOB_GPUS:-} ]] || exit 0
why=$(fault)
[[ -n $why ]] || exit 0
if [[ -z $REFUSE ]]; then
  say "would refuse it for $why"
  exit 0
fi
nodes=$(timeout 10 sinfo --noheader --Node --format='%N|%E' | sort -u) || {
  say "sinfo does not answer: not refused for $why"
  exit 0
}
if (($(grep -v "^$node|" <<<"$nodes" | grep -cF "|$PREFIX") >= MAX_DRAINED)); then
  say "$MAX_DRAINED nodes are drained already: not refused for $why"
  exit 0
fi
say "refused for $why"
# The status drains the node, too, but says no reason.
timeout 10 scontrol update NodeName="$node" State=DRAIN Reason="$PREFIX$why" ||
  say "scontrol refuses to drain $node"
exit 1
