#!/bin/bash
# The agents of all nodes with GPUs that Slurm knows, in a file for `fleet.targets_files`, or for
# Prometheus.
#
#   fleet-targets.sh FILE [PORT]
#
# GRES (gpu) names the generic resource of these nodes; with `GRES=` all nodes are listed.
# Run it each minute where sinfo works: by cron, or a systemd timer. Where Slurm does not answer, or
# knows no node, FILE stays as it was, and the exit status says so.
set -euo pipefail

file=${1:?usage: fleet-targets.sh FILE [PORT]}
port=${2:-9400}

# A line for each node and partition: host name and state. Nodes that are powered down (~) have no
# agent; those that are down or drained may, and then belong to the list.
nodes=$(sinfo --noheader --Node --format='%n %T %G' |
  awk -v gres="${GRES-gpu}" '$2 !~ /~|^future/ && (gres == "" || $3 ~ "(^|,)" gres ":") { print $1 }' | sort -u)
if [[ -z $nodes ]]; then
  echo "fleet-targets.sh: sinfo names no node with ${GRES-gpu} that is powered; $file stays as it was" >&2
  exit 1
fi

# Renamed, so that no reader sees half of it; the name matches no `*.json` until then.
new=$(mktemp "$file.XXXXXX")
trap 'rm -f "$new"' EXIT
{
  printf '[{"targets": ['
  separator=''
  while read -r node; do
    printf '%s"%s:%s"' "$separator" "$node" "$port"
    separator=', '
  done <<<"$nodes"
  printf '], "labels": {"scheduler": "slurm"}}]\n'
} >"$new"
chmod 644 "$new"
mv "$new" "$file"
