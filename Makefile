# `make train` and `make test` need Python 3.11 or newer and nothing else: they make .venv and install what is pinned.
# `make train` trains on the embedded data set; `make test` runs every check and the default tests. Variables: PYTHON
# (interpreter for .venv), WORKERS (parallel test processes), PYTEST_ARGS (more arguments for pytest), TRAIN_ARGS (more
# arguments for slimstart train), TORCH and TESTS (version to try and tests to run in make package).

PYTHON ?= $(shell for python in python3.11 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
WORKERS ?= 2
PYTEST_ARGS ?=
TRAIN_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed
INSTALLED := $(VENV)/.installed-with-tools
TRAINERS := $(VENV)/.installed-with-trainers
DOCS := $(VENV)/.installed-for-docs
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input

# One thread for each test process: torch's own threads would fight the workers for the cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := --numprocesses $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install trainers train results docs test lint types unit slow gpu package format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED)  ## Make .venv with everything pinned by constraints.txt

$(RUNTIME): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found; name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt hatchling editables
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[lab]'
	@touch $@

$(INSTALLED): $(RUNTIME)
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# The pin of torch is met by what is installed: nothing here replaces it.
$(TRAINERS): $(INSTALLED)
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev,trainers]'
	@touch $@

$(DOCS): $(RUNTIME)
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	@touch $@

trainers: $(TRAINERS)  ## Add Lightning, transformers, Accelerate, timm and torchao, whose tests are else skipped

train: $(RUNTIME)  ## Train on the embedded data, narrow from step one: a table and runs/*/report.html
	$(BIN)/slimstart train --recipe fashion $(TRAIN_ARGS)

results: $(RUNTIME)  ## Write the tables, pages and figures of the documents from the records under results/
	$(BIN)/python benchmarks/make_results.py

# Not --quiet, which would hide warnings from --strict.
docs: $(DOCS)  ## Build the documentation site in site/; broken links and missing pages are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: lint types unit  ## Every check and the default tests

lint: $(INSTALLED)  ## Style, formatting and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED)  ## mypy, strict
	$(BIN)/mypy

unit: $(INSTALLED)  ## The default tests alone: neither slow nor gpu
	$(PYTEST) $(PARALLEL) $(PYTEST_ARGS)

# pytest's status 5 means that no test was selected, which is no failure here.
slow: $(INSTALLED)  ## The slow tests
	$(PYTEST) $(PARALLEL) -m "slow and not gpu" $(PYTEST_ARGS) || test $$? -eq 5

gpu: $(INSTALLED)  ## The tests that need a CUDA device, slow ones too
	$(PYTEST) -m gpu $(PYTEST_ARGS)

package: $(INSTALLED)  ## Build wheel and sdist, and try them in a clean environment
	$(BIN)/python scripts/check_package.py $(if $(TORCH),--torch $(TORCH)) $(if $(TESTS),--tests '$(TESTS)')

format: $(INSTALLED)  ## Format and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove .venv, caches and build results
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
