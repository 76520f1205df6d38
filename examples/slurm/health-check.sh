#!/bin/bash
# HealthCheckProgram of Slurm: drains this node for a GPU that must be served.
#
# Of the daemon on this node it takes active anomalies of hardware that are critical. It drains no node
# that is drained or down already, no more than MAX_DRAINED nodes at once, and gives none back: that is
# for who has served it. Whatever fails, it drains nothing. It ends with 0, and says in the system log
# what it did. /etc/warpwatch/health-check.conf may set MAX_DRAINED (1) and DRY_RUN (empty).
set -uo pipefail
trap 'exit 0' EXIT

PREFIX='warpwatch: '
MAX_DRAINED=1
DRY_RUN=''
# shellcheck source=/dev/null
[[ -r ${CONF:=/etc/warpwatch/health-check.conf} ]] && source "$CONF"
node=${SLURMD_NODENAME:-$(hostname -s)}

say() { logger --tag warpwatch-health-check --stderr -- "$*" || true; }

# Of each node once: name, state, when and why it was taken out of service.
nodes() { timeout 10 sinfo --noheader --Node --format='%N|%T|%H|%E' | sort -u; }

# Those that this script took out, the first of them first.
drained() { grep -F "|$PREFIX" <<<"$1" | sort -t '|' -k 3,3 -k 1,1 | cut -d '|' -f 1; }

# The first fault, as Slurm may keep it: printable, short, nothing that its parser reads.
fault() {
  timeout 15 warpwatch status --json | python3 -c '
import json, re, sys
KINDS = """device_needs_service device_lost device_stuck xid ecc_uncorrectable row_remap thermal_throttle power_brake clock_drop
    pcie_degraded nvlink_error network_link_down network_errors device_idle overheating""".split()
for one in json.load(sys.stdin)["anomalies"]:
    if one["kind"] in KINDS and one["severity"] == "critical" and one["end_time"] is None:
        text = one["kind"] + ": " + one["summary"]
        print(re.sub(r"[^\w .:%/()-]", " ", text, flags=re.ASCII)[:200])
        break'
}

why=$(fault)
[[ -n $why ]] || exit
before=$(nodes) || { say "sinfo does not answer: not drained for $why"; exit; }
awk -F '|' -v node="$node" '$1 == node && $2 ~ /^(drain|down|fail|maint)/ { out = 1 } END { exit !out }' <<<"$before" && exit
if (($(drained "$before" | grep -c .) >= MAX_DRAINED)); then
  say "$MAX_DRAINED nodes are drained already: not drained for $why"
  exit
fi
if [[ -n $DRY_RUN ]]; then
  say "would drain $node for $why"
  exit
fi
timeout 10 scontrol update NodeName="$node" State=DRAIN Reason="$PREFIX$why" || {
  say "scontrol refuses to drain $node"
  exit
}
# All nodes are asked at once: of those that saw room at the same time, only the first stay drained.
sleep "${SETTLE_S:-2}"
after=$(nodes) || exit
if drained "$after" | head -n "$MAX_DRAINED" | grep -qxF "$node"; then
  say "drained $node for $why"
else
  timeout 10 scontrol update NodeName="$node" State=UNDRAIN
  say "given back at once, as $MAX_DRAINED others were drained before: $why"
fi
