# On a fresh machine, `make demo` and `make test` install everything they need.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test lint test-long test-gpu bench bench-gpu clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.core ## Find a planted bottleneck, fix it and compare
	$(BIN)/python examples/demo/demo.py

test: lint ## Linters, type checks and all tests except long tests and GPU tests
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not long and not gpu and not quiet"
	$(PYTEST) -m "quiet and not long and not gpu"

lint: $(VENV)/.dev ## Linters, type checks and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test-long: $(VENV)/.dev ## Long tests, and a search for new failing cases of property-based tests
	$(PYTEST) -m long --timeout 1200
	$(PYTEST) -m hypothesis --hypothesis-profile search --timeout 1200

test-gpu: ## GPU tests; set PYTHON to an interpreter with PyTorch: make test-gpu PYTHON=...
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(PYTHON) -m pytest -m gpu --timeout 600 tests/contract tests/gpu

bench: $(VENV)/.dev ## CPU benchmarks; results are written to benchmarks/results/
	$(BIN)/python benchmarks/monitor_cost.py
	$(BIN)/python benchmarks/live_view.py
	$(BIN)/python benchmarks/pump.py
	$(BIN)/python benchmarks/trial_noise.py
	$(BIN)/python benchmarks/explain.py --device cpu
	$(BIN)/python benchmarks/explain_cost.py
	$(BIN)/python benchmarks/study_overhead.py
	$(BIN)/python benchmarks/example_study.py two_cores

bench-gpu: ## GPU benchmarks; set PYTHON to an interpreter with PyTorch
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(PYTHON) benchmarks/gpu_sensors.py
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(PYTHON) benchmarks/bare_loop.py
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(PYTHON) benchmarks/explain.py --device gpu
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(PYTHON) benchmarks/example_study.py one_gpu
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/benchmarks:$$PYTHONPATH $(PYTHON) -m max_batch --state max_batch.json --seconds 7200
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/benchmarks:$$PYTHONPATH $(PYTHON) -m max_batch --state max_batch.json --tables

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable ".[torch]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable ".[dev]"
	touch $@ $(VENV)/.core

clean: ## Remove the virtual environment, runs and builds
	rm -rf $(VENV) runs build dist
