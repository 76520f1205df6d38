#!/bin/bash
# Writes the newest verdict on each running Slurm job into its AdminComment.
#
# Run it each minute as an operator of Slurm, with the fleet's WARPWATCH_URL, WARPWATCH_HTTP__TOKEN_FILE
# and WARPWATCH_CA_FILE. A run names its Slurm job itself: it is believed only where the user whose
# processes it has, as the agent found them, is the job's. Comments that others wrote stay.
set -uo pipefail

# Job, uid and text of the newest diagnosis of each run. What a job wrote has no other characters left.
verdicts() {
  # Its status tells of anomalies.
  { timeout 60 warpwatch status --json || (($? == 1)); } | python3 -c '
import json, re, sys
newest = {}
for one in sorted(json.load(sys.stdin)["captures"], key=lambda one: one["time"]):
    owner = re.fullmatch(r"uid/(\d+)", one["request"]["owner"])
    run = re.fullmatch(r"(\d{1,10})(-\d+)?", one["request"]["run"])
    if owner and run and one["diagnosis"]:
        said = one["diagnosis"]["verdict"] + ": " + one["diagnosis"]["summary"]
        said = re.sub(r"[^\w .:%/()-]", " ", said, flags=re.ASCII)[:300]
        newest[run[1]] = (run[1], owner[1], "warpwatch: " + said + " (capture " + one["id"] + ")")
for line in newest.values():
    print(*line, sep="\t")'
}

# Of each running job: id, uid, what its comment is.
jobs=$(timeout 30 squeue --noheader --states=RUNNING,COMPLETING --Format='JobID:|,UserID:|,AdminComment:|') || {
  echo 'job-verdicts.sh: squeue does not answer' >&2
  exit 1
}
said=$(verdicts) || { echo 'job-verdicts.sh: no answer of the agent or fleet' >&2; exit 1; }
failed=0
while IFS=$'\t' read -r job uid text; do
  comment=$(grep -m 1 "^$job|$uid|" <<<"$jobs" | cut -d '|' -f 3-) || continue
  comment=${comment%|}
  [[ $comment == "$text" || (-n $comment && $comment != 'warpwatch: '* && $comment != '(null)') ]] && continue
  timeout 10 scontrol update JobId="$job" AdminComment="$text" || failed=1
done < <(printf '%s' "${said:+$said$'\n'}")
exit "$failed"
