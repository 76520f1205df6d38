# The daemon's image. It needs nothing but Python; the driver's library comes from the host, by the
# NVIDIA container toolkit.
#
#   docker build -t ghcr.io/warpwatch/warpwatch .
#   docker run --rm --read-only --tmpfs /tmp -p 9400:9400 ghcr.io/warpwatch/warpwatch

# Of all platforms (an index), as docker-library/repo-info lists it. A newer one, for each release:
#   docker buildx imagetools inspect python:3.12-slim-bookworm
ARG BASE_IMAGE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml requirements-image.txt requirements-build.txt hatch_build.py README.md LICENSE ./
COPY client client
COPY daemon daemon
COPY dashboards dashboards
COPY detection detection
COPY devices devices
COPY diagnosis diagnosis
COPY exporters exporters
COPY fleet fleet
COPY runtime runtime
COPY serving serving
COPY capturing capturing
COPY telemetry telemetry
# Without pip in it; compiled, as nothing can be written later, and without times, so that two builds are
# equal. Whatever comes from a package index is checked against its hash. The client also as a plain folder, for `COPY --from` into images of other Pythons.
RUN python3 -m venv /build \
    && python3 -m venv --without-pip /opt/warpwatch \
    && export PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: \
    && /build/bin/pip install --require-hashes --requirement requirements-build.txt \
    && /build/bin/pip wheel --no-deps --no-build-isolation --check-build-dependencies --wheel-dir /wheels ./client . \
    && /build/bin/pip --python /opt/warpwatch/bin/python3 install --no-compile --require-hashes --requirement requirements-image.txt \
    && /build/bin/pip --python /opt/warpwatch/bin/python3 install --no-compile --no-index /wheels/*.whl \
    && /build/bin/pip install --no-index --no-compile --no-deps --target /opt/warpwatch/client /wheels/warpwatch_client-*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/warpwatch/lib

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG VERSION=0.2.0
ARG REVISION=
LABEL org.opencontainers.image.title="warpwatch" \
      org.opencontainers.image.description="Watches the GPUs of a node and the training jobs on them" \
      org.opencontainers.image.source="https://github.com/warpwatch/warpwatch" \
      org.opencontainers.image.documentation="https://github.com/warpwatch/warpwatch/blob/main/docs/kubernetes.md" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Nothing installs anything here. The folder is any user's, as whoever mounts none gets a volume.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3.*/ensurepip /usr/local/lib/python3.*/site-packages/pip* \
    && install -d -m 1777 /var/lib/warpwatch
COPY --from=build /opt/warpwatch /opt/warpwatch
ENV PATH=/opt/warpwatch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    # Any user may run it, also one without a home: what is shared lies in volumes.
    HOME=/tmp \
    WARPWATCH_HTTP__LISTEN=0.0.0.0:9400
VOLUME ["/var/lib/warpwatch"]
EXPOSE 9400
USER 65532:65532
# Not `warpwatch status`, whose exit status tells of anomalies.
HEALTHCHECK --interval=30s --timeout=10s --start-period=20s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9400/healthz', timeout=5)"]
ENTRYPOINT ["warpwatch"]
CMD ["daemon"]
