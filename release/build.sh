#!/bin/bash
# build.sh INPUTS OUT: all files of a release of the commit that is checked out, without network.
#
# Two builds of one commit from the same inputs are equal, byte by byte. INPUTS: of inputs.sh, for
# the same PLATFORMS. A platform that is not this machine's needs an emulator (binfmt_misc).
set -euo pipefail
umask 022
release=$(realpath "$(dirname "$0")")
inputs=$(realpath "${1:?usage: build.sh INPUTS OUT}")
out=$(realpath -m "${2:?usage: build.sh INPUTS OUT}")
cd "$release/.."
revision=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH TZ=UTC LC_ALL=C
python=$inputs/venv/bin/python

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source" "$work/image"
# What is committed, and nothing else that lies here.
git archive HEAD | tar -x -C "$work/source"
cd "$work/source"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' client/warpwatch/_version.py)
rm -rf "$out"
mkdir -p "$out"

# The same bytes for the same files.
pack() { tar --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner "$@"; }

notes=$(awk -v version="$version" '/^## /{ found = $2 == version; next } found' CHANGELOG.md)
[[ -n ${notes//[[:space:]]/} ]] || { echo "build.sh: CHANGELOG.md has no section $version" >&2; exit 1; }
printf '# Warpwatch %s\n%s\n' "$version" "$notes" >"$out/release-notes.md"

for project in . client; do
  (cd "$project" && "$python" -m hatchling build --directory "$out" >/dev/null)
done
"$inputs/venv/bin/cyclonedx-py" requirements requirements-image.txt --pyproject pyproject.toml \
  --output-reproducible --output-file "$out/warpwatch-$version.cdx.json"

printf '[global]\nno-index = true\nfind-links = /wheelhouse\n' >"$work/pip.conf"
list=localhost/warpwatch-release-$$
trap 'buildah manifest rm "$list" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
buildah manifest create "$list" >/dev/null
for platform in ${PLATFORMS:-linux/amd64 linux/arm64}; do
  base=$(buildah pull --quiet "oci:$inputs/base-${platform#*/}")
  buildah build --quiet --platform "$platform" --manifest "$list" --isolation chroot --network host --pull-never \
    --no-cache --format oci --timestamp "$SOURCE_DATE_EPOCH" \
    --build-arg "BASE_IMAGE=$base" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --volume "$inputs/wheels:/wheelhouse:ro" --volume "$work/pip.conf:/etc/pip.conf:ro" . >/dev/null
done
buildah manifest push --quiet --all "$list" "oci:$work/image:ghcr.io/warpwatch/warpwatch:$version" >/dev/null
pack -C "$work/image" -cf "$out/warpwatch-image-$version.oci.tar" blobs index.json oci-layout

digest=$("$python" "$release/chart.py" digest "$work/image")
sed -i "0,/^  digest: \"\"/s//  digest: $digest/" helm/warpwatch/values.yaml
grep -qx "  digest: $digest" helm/warpwatch/values.yaml
"$inputs/helm" package --version "$version" --app-version "$version" --destination "$work" helm/warpwatch >/dev/null
mkdir "$work/packaged"
tar -xf "$work/warpwatch-$version.tgz" -C "$work/packaged"
pack -C "$work/packaged" -c warpwatch | gzip --no-name -9 >"$out/warpwatch-chart-$version.tgz"
"$python" "$release/chart.py" layout "$out/warpwatch-chart-$version.tgz" "$work/chart"
pack -C "$work/chart" -cf "$out/warpwatch-chart-$version.oci.tar" blobs index.json oci-layout

cd "$out"
sha256sum -- * >"$work/SHA256SUMS"
mv "$work/SHA256SUMS" .
