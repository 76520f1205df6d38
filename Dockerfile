# The daemon's image. It needs nothing but Python; the driver's library comes from the host, by the
# NVIDIA container toolkit.
#
#   docker build -t ghcr.io/warpwatch/warpwatch .
#   docker run --rm --read-only --tmpfs /tmp -p 9400:9400 ghcr.io/warpwatch/warpwatch
ARG BASE_IMAGE=python:3.12-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml constraints-image.txt hatch_build.py README.md LICENSE ./
COPY client client
COPY daemon daemon
COPY dashboards dashboards
COPY detection detection
COPY devices devices
COPY diagnosis diagnosis
COPY exporters exporters
COPY telemetry telemetry
# Without pip in it; compiled, as nothing can be written later. The client also as a plain folder, for
# `COPY --from` into images of other Pythons.
RUN python3 -m venv /build \
    && python3 -m venv --without-pip /opt/warpwatch \
    && /build/bin/pip --python /opt/warpwatch/bin/python3 install --no-cache-dir \
        --constraint constraints-image.txt ./client '.[auth]' \
    && /build/bin/pip install --no-cache-dir --no-compile --no-deps --target /opt/warpwatch/client ./client

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
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
