#!/bin/sh
# Checks Warpwatch against the GPU and driver of this machine, within ten minutes and without a
# network; docs/gpu.md says more. What the Python there lacks may lie as wheels in
# benchmarks/gpu/wheels (wheels.sh fetches them).
#
#   benchmarks/gpu/run.sh [--fake] [--quick] [--only CHECK] [--out FOLDER]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}

path=$root
for package in "$root"/*/warpwatch*/__init__.py; do
    path="$path:${package%/*/*}"
done
if ls "$here"/wheels/*.whl >/dev/null 2>&1; then
    site=$(mktemp -d "${TMPDIR:-/tmp}/warpwatch-gpu-site.XXXXXX")
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" "$here"/wheels/*.whl >&2
    path="$path:$site"
fi
cd "$root"
PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" "$python" -m benchmarks.gpu "$@"
