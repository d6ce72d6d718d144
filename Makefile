# `make demo` and `make test` are all a fresh machine needs. Everything lands in .venv and runs/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export DS_ACCELERATOR ?= cpu

.DEFAULT_GOAL := help
.PHONY: help install demo test elastic lint format docs-check slurm bench-step bench-data clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

install: $(STAMP)  ## make .venv with everything the project and its tests need

$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## the main job on an embedded default; COMPARE=1 sets full fine-tuning beside it
ifdef COMPARE
	PATH="$(CURDIR)/$(BIN):$$PATH" CONFIG=configs/demo_fft.yaml STAGES="tokenize train convert" bash slurm/cpt_korean.sh
endif
	PATH="$(CURDIR)/$(BIN):$$PATH" CONFIG=configs/demo.yaml bash slurm/cpt_korean.sh

slurm:  ## install Slurm, munge and OpenMPI for the cluster tests (Debian or Ubuntu, as root)
	bash tests/slurm/install.sh

test: $(STAMP) slurm lint  ## lint, types, import contract, and every test
	$(BIN)/python -m pytest

lint: $(STAMP)  ## ruff, mypy, the import contract, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v shellcheck >/dev/null; then shellcheck slurm/*.sh tests/slurm/*.sh .ci/run; else echo "shellcheck is not installed: scripts unchecked"; fi

format: $(STAMP)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-check: $(STAMP)  ## links, paths and make targets that the documentation names must exist
	$(BIN)/python -m pytest -q tests/test_docs.py

elastic: $(STAMP)  ## a run is killed and moved over three layouts, exported, and compared with one that nothing befell
	$(BIN)/python benchmarks/elastic.py --folder runs/elastic

bench-step: $(STAMP)  ## what a training step costs under each method, on one base
	$(BIN)/python benchmarks/step_cost.py --json benchmarks/out/step_cost.json

bench-data: $(STAMP)  ## how fast text becomes tokens, and tokens samples (MEGATRON=path/to/Megatron-LM compares with it)
	$(BIN)/python benchmarks/tokenize_throughput.py --json benchmarks/out/tokenize.json $(if $(MEGATRON),--megatron $(MEGATRON))
	$(BIN)/python benchmarks/loader_throughput.py --json benchmarks/out/loader.json

clean:  ## remove what runs and tests left behind (keeps .venv)
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
