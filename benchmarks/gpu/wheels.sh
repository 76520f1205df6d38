#!/bin/sh
# Fetches into benchmarks/gpu/wheels what the daemon needs, for a machine that has no network but
# Python 3.12 on x86-64 Linux with torch.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

rm -rf "$here/wheels"
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --require-hashes --requirement "$here/../../requirements-image.txt" --dest "$here/wheels"
