#!/bin/sh
# Fetches into benchmarks/gpu/wheels what the daemon needs, for a machine that has no network but
# Python 3.12 on x86-64 Linux with torch.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}

rm -rf "$here/wheels"
mkdir "$here/wheels"
"$python" -c 'import tomllib; print(*tomllib.load(open("/dev/stdin", "rb"))["project"]["dependencies"], sep="\n")' \
    <"$root/pyproject.toml" >"$here/wheels/requirements.txt"
"$python" -m pip download --quiet --only-binary :all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --constraint "$root/constraints-image.txt" --requirement "$here/wheels/requirements.txt" \
    --dest "$here/wheels"
