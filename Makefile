# Everything a person types: each target sets up what it needs first.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_TEST := $(VENV)/.ready-test
BENCH := .venv-bench
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help train test lint types unit chaos bench-peers browser clean

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

train: $(READY) ## Train on scikit-learn's digits
	@$(BIN)/echelon train examples/digits/job.yaml

test: lint types unit ## Lint, types and the whole test suite

lint: $(READY_TEST)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY_TEST)
	@$(BIN)/mypy

unit: $(READY_TEST)
	@$(BIN)/pytest -n 2

# Smooth, so that rounding is not amplified, and long enough for twenty faults in each run.
EPOCHS ?= 600
chaos: $(READY) ## A hundred random faults in five runs (about ten minutes)
	@$(BIN)/echelon chaos examples/digits/job.yaml epochs=$(EPOCHS) threads=1 model.dropout=0 \
		model.activation=tanh 'optimizer={name: momentum, lr: 0.02}' track.report=false \
		--workers 4 --random 20 --runs 5 --seed 1

bench-peers: ## Build the environment with the frameworks Echelon is compared to
	@test -d $(BENCH) || $(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python $(INSTALL) torch==2.13.0
	@$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r benchmarks/requirements-peers.txt
	@$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .

browser: $(READY_TEST) ## Look at a report in a real browser (needs chromium)
	@$(BIN)/python $(INSTALL) playwright
	@$(BIN)/python tests/browser/check_report.py

clean: ## Remove environments and caches (runs are kept)
	@rm -rf $(VENV) $(BENCH) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch comes first and alone: whatever is installed after it can only accept this build.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; about a minute)" >&2
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(INSTALL) torch==2.13.0
	@$(BIN)/python $(INSTALL) -e .
	@touch $@

$(READY_TEST): $(READY)
	@$(BIN)/python $(INSTALL) -e '.[test]'
	@touch $@
