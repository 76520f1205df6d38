# Two commands do everything: `make demo` and `make test`. Both set up what they need in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
SEEDS ?= 24
SBOM ?= build/sbom.cdx.json

.PHONY: demo test acceptance fuzz soak check format bench judge docs protobuf requirements sbom release-inputs release clean

demo: $(VENV)/.demo
	@$(BIN)/warpwatch demo $(ARGS)

# Everything that a change must pass, on all cores. The many processes that it starts share what the
# first one compiled.
test: $(VENV)/.dev
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest $(ARGS)

# Before a release: what takes minutes, or needs what is not installed everywhere, one group at a
# time. ARGS=loops|bus|alerts|hostile|deploy|serve.
acceptance: $(VENV)/.dev
	$(BIN)/pytest -m "$(or $(ARGS),loops or bus or alerts or hostile or deploy or serve)"

# Hostile bytes for all that reads what a stranger wrote; one JSON line a target. MINUTES=10.
fuzz: MINUTES ?= 10
fuzz: $(VENV)/.fuzz
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

# Healthy trainings among jobs that come and go, captures, restarts and a clock that is set: nothing
# is found in them, and nothing of the daemon grows. MINUTES=30.
soak: MINUTES ?= 30
soak: $(VENV)/.dev
	SOAK_MINUTES=$(MINUTES) $(BIN)/pytest -n 0 -m soak $(ARGS) tests/loop/test_soak.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One JSON object; each figure with the limit or the peer measured in the same run.
bench: $(VENV)/.bench
	@$(BIN)/python -m benchmarks $(ARGS)

# Recall and false alarms of the detectors on labelled logs, into docs/detection-methods.md. SEEDS=24.
judge: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.judge --seeds $(SEEDS) $(ARGS)

docs: $(VENV)/.dev
	$(BIN)/python -m warpwatch_telemetry.catalogue > docs/metrics.md
	$(BIN)/python -m warpwatch_telemetry.xids > docs/xids.md
	$(BIN)/python -m warpwatch_dashboards
	$(BIN)/python -m warpwatch_dashboards.rule_files docs/alerts.md

protobuf: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -I devices --python_out=devices \
		devices/warpwatch_devices/attribution/podresources.proto

# Hashes of the wheels that the image is built of, after a change of a version.
requirements: $(VENV)/.demo
	$(BIN)/python release/hash_requirements.py requirements-image.txt requirements-build.txt

# What the image holds besides its base, as CycloneDX JSON.
sbom: $(VENV)/.sbom
	@mkdir -p $(dir $(SBOM))
	$(BIN)/cyclonedx-py requirements requirements-image.txt --pyproject pyproject.toml \
		--output-reproducible --output-file $(SBOM)

# What can be fetched only from the network: wheels, base images, tools. docs/release.md
release-inputs:
	release/inputs.sh build/release-inputs

# Without network, of what is committed; twice the same bytes.
release:
	release/build.sh build/release-inputs dist

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

# The set-up speaks on standard error: `make demo ARGS=--json` prints nothing but JSON.
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	@$(BIN)/pip install --quiet --editable '.[demo]' --constraint constraints.txt >&2
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	@$(BIN)/pip install --quiet --editable '.[demo,dev]' --constraint constraints.txt >&2
	@touch $(VENV)/.demo $@

# Where atheris has no wheel, mutations of the seeds do.
$(VENV)/.fuzz: $(VENV)/.dev
	@$(BIN)/pip install --quiet --editable '.[demo,dev,fuzz]' --constraint constraints.txt >&2 \
		|| echo 'without atheris: not guided by coverage' >&2
	@touch $@

$(VENV)/.sbom: $(VENV)/.demo
	@$(BIN)/pip install --quiet cyclonedx-bom==7.5.0 >&2
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(BIN)/pip install --quiet --editable '.[demo,dev,bench]' --constraint constraints.txt >&2
	@touch $@
