# `make` prints the targets. PYTHON chooses the interpreter that makes the environment, VENV where it lies.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
CONTRIB := contrib/moe_mk_contrib

# Compiled tests and modules are kept, whatever the shell says: the second run collects in half the time.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml $(CONTRIB)/pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
CHECKPOINT := build/ds3
SMALL := build/ds3-small
MAIN_JOB := --layer 3 --ranks 2 --tokens 64
DOCS := .venv-docs
DOCS_INSTALLED := $(DOCS)/.installed-$(shell cksum < constraints.txt | cut -d' ' -f1)
HF := .venv-hf-oldest
HF_NEEDS := tests/integrations/hf/oldest.txt
HF_INSTALLED := $(HF)/.installed-$(shell cat $(HF_NEEDS) pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

TESTS := tests $(CONTRIB)/tests
EVERY := not gpu and not stress
QUICK := not gpu and not stress and not slow
# Files in the order of collection, which tests/conftest.py begins with those that take long.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

ENGINES := .venv-engines
ENGINES_NEED := tests/integrations/engines/needs.txt
ENGINES_ALONE := tests/integrations/engines/alone.txt
ENGINES_INSTALLED := $(ENGINES)/.installed-$(shell cat $(ENGINES_NEED) $(ENGINES_ALONE) pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

NIXL := .venv-nixl
NIXL_NEEDS := tests/comm/network/nixl.txt
NIXL_INSTALLED := $(NIXL)/.installed-$(shell cat $(NIXL_NEEDS) pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
NIXL_TESTS := tests/comm/network tests/prepare_finalize/one_sided

WHEEL := .venv-wheel
WHEEL_NEEDS := hatchling auditwheel ziglang
WHEEL_INSTALLED := $(WHEEL)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

# What an environment lacks, it takes from $(VENV), so that torch lies on the disk once.
site = $(1)/bin/python -c 'import site; print(site.getsitepackages()[0])'
after = echo "import site; site.addsitedir('$$(cd $$($(call site,$(VENV))) && pwd)')" > $$($(call site,$(1)))/after.pth

.DELETE_ON_ERROR:
.PHONY: help venv run test matrix hf engines seams nixl nixl-hosts chaos mutants mutants-cpp stress test-all multihost lint format features certify docs wheel sanitize bench-cpu bench-amx gpu clean

help:  ## print the targets
	@awk -F ':.*##' '/^[a-z-]+:.*##/ {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED)  ## make the environment and install into it, if pyproject.toml or constraints.txt changed

$(INSTALLED):
	@test -x $(BIN)/python || { echo "venv      $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "install   moe-mk, moe-mk-contrib and what they need"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]' -e $(CONTRIB)
	@rm -f $(VENV)/.installed-*
	@touch $@

run: venv $(CHECKPOINT)/model.safetensors.index.json  ## one DeepSeek-V3 MoE layer on 2 ranks, verified
	@echo "run       $(CHECKPOINT) $(MAIN_JOB)"
	@$(BIN)/moe-mk run $(CHECKPOINT) $(MAIN_JOB)

$(CHECKPOINT)/model.safetensors.index.json: | $(INSTALLED)
	@echo "write     $(CHECKPOINT), a checkpoint in the official layout"
	@$(BIN)/moe-mk make-checkpoint $(CHECKPOINT) --experts 32

test: venv  ## the quick tests: every room, in about five minutes on two cores
	@echo "pytest    quick"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "$(QUICK)" $(SPREAD) --junitxml build/junit/quick.xml $(TESTS)

test-all: venv  ## the quick tests and the slow ones: what CI runs, in about half an hour
	@echo "pytest    quick and slow"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "$(EVERY)" $(SPREAD) --junitxml build/junit/all.xml $(TESTS)

matrix: venv  ## the quick tests with the oldest and the newest torch and numpy; CELLS="python3.14:==2.15.0:>=2" selects others
	@echo "pytest    benchmarks/results/matrix.json; then make features"
	@$(BIN)/python tools/matrix.py $(CELLS)

hf: $(HF_INSTALLED)  ## the tests of transformers on the oldest version that is supported; `make test` has the newest
	@echo "pytest    $$($(HF)/bin/python -c 'import transformers; print("transformers", transformers.__version__)')"
	@OMP_NUM_THREADS=1 $(HF)/bin/python -m pytest -q -m "$(EVERY)" $(SPREAD) tests/integrations/hf

$(HF_INSTALLED): | $(INSTALLED)
	@echo "venv      $(HF)"
	@rm -rf $(HF) && $(BIN)/python -m venv $(HF)
	@$(call after,$(HF))
	@$(HF)/bin/python -m pip install -qq --disable-pip-version-check -r $(HF_NEEDS)
	@touch $@

engines: $(ENGINES_INSTALLED)  ## the adapters on vLLM's build for CPUs, SGLang and torchtitan, where they install; takes minutes
	@echo "pytest    tests/integrations/engines"
	@OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -q --junitxml build/junit/engines.xml tests/integrations/engines

seams: venv  ## read the sources of every version of the engines that is supported: what the adapters use must be there
	@$(BIN)/python -m tests.integrations.engines.sources build/engines
	@echo "pytest    tests/integrations/engines/test_seams.py"
	@$(BIN)/python -m pytest -q tests/integrations/engines/test_seams.py

# vLLM asks for torchvision, torchaudio and torchcodec, whose wheels are for CUDA and fail to load beside torch for CPUs.
$(ENGINES_INSTALLED): | $(INSTALLED)
	@echo "venv      $(ENGINES)"
	@rm -rf $(ENGINES) && $(BIN)/python -m venv $(ENGINES)
	@$(call after,$(ENGINES))
	@$(ENGINES)/bin/python -m pip install -qq --disable-pip-version-check --only-binary :all: -r $(ENGINES_NEED)
	@$(ENGINES)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(ENGINES)/bin/python -m pip install -qq --disable-pip-version-check --only-binary :all: --no-deps -r $(ENGINES_ALONE)
	@touch $@

nixl: $(NIXL_INSTALLED)  ## the tests of the network transport over NIXL, where it installs
	@echo "pytest    $$($(NIXL)/bin/python -c 'import importlib.metadata as m; print("nixl-cu12", m.version("nixl-cu12"))')"
	@OMP_NUM_THREADS=1 $(NIXL)/bin/python -m pytest -q -m "$(EVERY)" -k nixl $(SPREAD) \
	    --junitxml build/junit/nixl.xml $(NIXL_TESTS)

nixl-hosts: $(NIXL_INSTALLED)  ## the same over two hosts made of network namespaces, and a cut cable
	@test -d $(SMALL) || $(BIN)/moe-mk make-checkpoint $(SMALL) --hidden 256 --intermediate 128
	@echo "multihost $(SMALL)"
	@$(NIXL)/bin/python tools/multihost.py --checkpoint $(SMALL) --transports one_sided_network --cut one_sided_network \
	    --link nixl

# What it asks for, torch and numpy, is in $(VENV).
$(NIXL_INSTALLED): | $(INSTALLED)
	@echo "venv      $(NIXL)"
	@rm -rf $(NIXL) && $(BIN)/python -m venv $(NIXL)
	@$(call after,$(NIXL))
	@$(NIXL)/bin/python -m pip install -qq --disable-pip-version-check --only-binary :all: --no-deps -r $(NIXL_NEEDS)
	@touch $@

stress: venv  ## every test, the full product of settings too, and 1000 runs with one fault each: hours
	@echo "pytest    everything"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu" --junitxml build/junit/stress.xml
	@echo "chaos     1000 worlds; python tools/pages.py docs_faults --report build/chaos-1000.json commits the result"
	@mkdir -p build
	@OMP_NUM_THREADS=1 $(BIN)/moe-mk chaos --worlds 1000 --out build/chaos-1000.json

mutants: venv  ## break the library in small ways: the tests of each row must notice
	@$(BIN)/python tools/mutants.py --workers $(WORKERS) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(ROWS),--rows $(ROWS)) \
	    $(if $(RANDOM),--random $(RANDOM)) $(if $(SEED),--seed $(SEED)) $(if $(ROOMS),--rooms $(ROOMS))

mutants-cpp: venv  ## change the C++ kernels at random, NUMBER=20 times: their tests must notice
	@$(BIN)/python tools/mutants_cpp.py $(or $(NUMBER),20) --seed $(or $(SEED),0) 2>/dev/null

chaos: venv  ## 60 worlds of processes with one fault each, over every built-in transport that runs between CPU processes
	@echo "chaos     60 worlds"
	@mkdir -p build
	@OMP_NUM_THREADS=1 $(BIN)/moe-mk chaos --worlds 60 --out build/chaos.json

multihost: venv  ## a layer over two hosts made of network namespaces, and a cut cable
	@test -d $(SMALL) || $(BIN)/moe-mk make-checkpoint $(SMALL) --hidden 256 --intermediate 128
	@echo "multihost $(SMALL)"
	@$(BIN)/python tools/multihost.py --checkpoint $(SMALL)

lint: venv  ## ruff, mypy, and the limits of tools/house.py
	@echo "ruff      check"
	@$(BIN)/ruff check --quiet .
	@echo "ruff      format"
	@$(BIN)/ruff format --check --quiet .
	@echo "mypy      strict"
	@$(BIN)/mypy --no-error-summary
	@echo "house     limits"
	@$(BIN)/python tools/house.py --check

format: venv  ## let ruff format and mend what it can
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

features: venv  ## write docs/capabilities.md from tests/rows.yaml, the marks and the results of the last tests, docs/transports.md from the registry, figures in README.md and docs/results-*.md
	@$(BIN)/python tools/features.py
	@$(BIN)/python tools/pages.py

certify: venv  ## certify every backend of this repository and write the table of docs/certify.md; takes minutes
	@OMP_NUM_THREADS=1 $(BIN)/python tools/pages.py docs_certified

docs: $(DOCS_INSTALLED)  ## build the site into build/site, strictly: every page has its place and every link leads somewhere
	@echo "mkdocs    build/site"
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet

$(DOCS_INSTALLED):
	@echo "venv      $(DOCS)"
	@rm -rf $(DOCS) && $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	@touch $@

wheel: $(WHEEL_INSTALLED)  ## wheels for x86-64 and aarch64 with the kernels inside, into dist/, and their checks; ONLY=x86_64 for one
	@$(WHEEL)/bin/python tools/wheel.py $(if $(ONLY),--only $(ONLY))

$(WHEEL_INSTALLED): | $(INSTALLED)
	@echo "venv      $(WHEEL)"
	@rm -rf $(WHEEL) && $(BIN)/python -m venv $(WHEEL)
	@$(call after,$(WHEEL))
	@$(WHEEL)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(WHEEL_NEEDS)
	@touch $@

sanitize: venv  ## run the native kernels under the sanitizers
	@echo "sanitize  kernels"
	@$(BIN)/python tools/sanitize_kernels.py

bench-cpu: venv  ## every instruction set of this processor by format and rows, which is chosen; under 10 minutes, on an idle machine
	@echo "bench     benchmarks/results/processors"
	@$(BIN)/python benchmarks/processor.py --json "$$($(BIN)/python benchmarks/processor.py --file)"
	@$(BIN)/python tools/pages.py results

bench-amx: venv  ## the experts on a processor with AMX; about 8 minutes; VLLM=folder of a wheel adds vLLM
	@echo "bench     benchmarks/results/experts_amx.json; then make features"
	@$(BIN)/python benchmarks/experts_amx.py $(if $(VLLM),--vllm $(VLLM)) \
	    --json benchmarks/results/experts_amx.json

gpu:  ## tests, tuning and measurement on a GPU; no network, goes on where it stopped
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tools/gpu.py $(GPU)

clean:  ## remove what was built, the environment not
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find moe_mk contrib tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
