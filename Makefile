# `make` prints the targets. PYTHON chooses the interpreter that makes the environment, VENV where it lies.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
CHECKPOINT := build/ds3
SMALL := build/ds3-small
MAIN_JOB := --layer 3 --ranks 2 --tokens 64

.DELETE_ON_ERROR:
.PHONY: help venv run test stress multihost lint format features sanitize gpu clean

help:  ## print the targets
	@awk -F ':.*##' '/^[a-z]+:.*##/ {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED)  ## make the environment and install into it, if pyproject.toml or constraints.txt changed

$(INSTALLED):
	@test -x $(BIN)/python || { echo "venv      $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "install   moe-mk and what it needs"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

run: venv $(CHECKPOINT)/model.safetensors.index.json  ## one DeepSeek-V3 MoE layer on 2 ranks, verified
	@echo "run       $(CHECKPOINT) $(MAIN_JOB)"
	@$(BIN)/moe-mk run $(CHECKPOINT) $(MAIN_JOB)

$(CHECKPOINT)/model.safetensors.index.json: | $(INSTALLED)
	@echo "write     $(CHECKPOINT), a checkpoint in the official layout"
	@$(BIN)/moe-mk make-checkpoint $(CHECKPOINT) --experts 32

test: venv  ## every test that needs neither a GPU nor minutes
	@echo "pytest    not gpu, not slow"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu and not slow" -n $(WORKERS) --dist loadfile

stress: venv  ## the tests that take minutes
	@echo "pytest    slow"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow and not gpu"

multihost: venv  ## a layer over two hosts made of network namespaces, and a cut cable
	@test -d $(SMALL) || $(BIN)/moe-mk make-checkpoint $(SMALL) --hidden 256 --intermediate 128
	@echo "multihost $(SMALL)"
	@$(BIN)/python tools/multihost.py --checkpoint $(SMALL)

lint: venv  ## ruff and mypy
	@echo "ruff      check"
	@$(BIN)/ruff check --quiet .
	@echo "ruff      format"
	@$(BIN)/ruff format --check --quiet .
	@echo "mypy      strict"
	@$(BIN)/mypy --no-error-summary

format: venv  ## let ruff format and mend what it can
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

features: venv  ## write docs/capabilities.md from tests/rows.yaml and the marks, docs/transports.md from the registry
	@$(BIN)/python tools/features.py
	@$(BIN)/python tools/transports.py

sanitize: venv  ## run the native kernels under the sanitizers
	@echo "sanitize  kernels"
	@$(BIN)/python tools/sanitize_kernels.py

gpu:  ## tests, tuning and measurement on a GPU; no network, goes on where it stopped
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tools/gpu.py $(GPU)

clean:  ## remove what was built, the environment not
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find moe_mk tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
