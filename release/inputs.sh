#!/bin/bash
# inputs.sh FOLDER: fetches all that build.sh needs, so that it needs no network.
#
# PLATFORMS: for which images. BASE_IMAGE: other than the Dockerfile's; PYTHON_VERSION: of its Python.
# HELM: other than the `helm` that is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?usage: inputs.sh FOLDER}")
platforms=${PLATFORMS:-linux/amd64 linux/arm64}
base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)}

rm -rf "$folder"
mkdir -p "$folder/wheels"
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" --quiet --disable-pip-version-check)
cp "$(command -v "${HELM:-helm}")" "$folder/helm"
"${pip[@]}" install cyclonedx-bom==7.5.0 pyyaml==6.0.3
"${pip[@]}" install --require-hashes --requirement requirements-build.txt

for platform in $platforms; do
  case $platform in
    linux/amd64) machine=x86_64 ;;
    linux/arm64) machine=aarch64 ;;
    *) echo "inputs.sh: no wheels are kept for $platform" >&2; exit 2 ;;
  esac
  for list in requirements-build.txt requirements-image.txt; do
    "${pip[@]}" download --no-deps --require-hashes --only-binary=:all: --dest "$folder/wheels" \
      --python-version "${PYTHON_VERSION:-3.12}" --platform "manylinux_2_28_$machine" \
      --platform "manylinux_2_24_$machine" --platform "manylinux_2_17_$machine" \
      --platform "manylinux2014_$machine" --requirement "$list"
  done
  image=$(buildah pull --quiet --policy missing --platform "$platform" "$base")
  buildah push --quiet "$image" "oci:$folder/base-${platform#*/}"
done
