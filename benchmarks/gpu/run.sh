#!/bin/sh
# Checks Warpwatch against the GPU and driver of this machine, within ten minutes; docs/gpu.md says
# more. What the Python there lacks may lie as wheels in benchmarks/gpu/wheels: no network is used.
#
#   benchmarks/gpu/run.sh [--fake] [--quick] [--only CHECK] [--out FOLDER]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
site=

if ls "$here"/wheels/*.whl >/dev/null 2>&1; then
    site=$(mktemp -d "${TMPDIR:-/tmp}/warpwatch-gpu-site.XXXXXX")
    trap 'rm -rf "$site"' EXIT
    # Beside the packages that are there, which stay as they are.
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" "$here"/wheels/*.whl >&2
    # Readable for the part that gives up root's rights.
    chmod -R a+rX "$site"
fi

path=$root
for folder in client daemon dashboards diagnosis exporters telemetry; do
    path="$path:$root/$folder"
done
cd "$root"
PYTHONPATH="$path${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}" "$python" -m benchmarks.gpu "$@"
