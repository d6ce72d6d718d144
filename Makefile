# `make demo` and `make test` are all a fresh machine needs. Everything lands in .venv and runs/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Half of the time of the tests goes by in waiting: for ranks, for Slurm, for locks to grow stale.
TEST_WORKERS ?= 2
export DS_ACCELERATOR ?= cpu

.DEFAULT_GOAL := help
.PHONY: help install demo reproduce-korean reproduce-biography test elastic faults lint format docs-check slurm bench-step bench-data bench-checkpoint clean

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

KOREAN := korean$(if $(QUICK),_quick)
reproduce-korean: $(STAMP)  ## the paper's Korean comparison, an hour and a quarter of two cores (QUICK=1: under ten minutes; DATA=folder of other texts; ABLATIONS=1)
	$(BIN)/python tools/run_study.py configs/studies/$(KOREAN).yaml $(if $(DATA),--data $(DATA))
	$(BIN)/python tools/report.py runs/$(subst _,-,$(KOREAN)) --beside docs/results/paper-korean --output runs/$(subst _,-,$(KOREAN))/report.html
ifdef ABLATIONS
	$(BIN)/python tools/run_study.py configs/studies/korean_ablations.yaml $(if $(DATA),--data $(DATA))
endif

# The study, and how many people it has: half are pretrained on, a quarter are Task 0's, a tenth Task 1's.
BIOGRAPHY := biography$(if $(QUICK),_quick)
PEOPLE := $(if $(QUICK),--people 400 --vocab-size 1024,--people 2000 --vocab-size 2048)
reproduce-biography: $(STAMP)  ## the paper's biographies, under an hour of two cores; QUICK=1: under ten minutes
	$(BIN)/python tools/make_biographies.py $(PEOPLE) --pool-fraction 0.1 --output runs/$(subst _,-,$(BIOGRAPHY))/texts
	$(BIN)/python tools/run_study.py configs/studies/$(BIOGRAPHY).yaml --data runs/$(subst _,-,$(BIOGRAPHY))/texts
	$(BIN)/python tools/show_biographies.py runs/$(subst _,-,$(BIOGRAPHY))
	$(BIN)/python tools/report.py runs/$(subst _,-,$(BIOGRAPHY)) --output runs/$(subst _,-,$(BIOGRAPHY))/report.html

slurm:  ## install Slurm, munge and OpenMPI for the cluster tests (Debian or Ubuntu, as root)
	bash tests/slurm/install.sh

test: $(STAMP) slurm lint  ## lint, types, import contract, and every test
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile

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

faults: $(STAMP) slurm  ## break runs on a real Slurm in every way known, and compare each with one that nothing befell
	$(BIN)/python -m tests.faults $(if $(ONLY),--only $(ONLY))

bench-step: $(STAMP)  ## what a training step costs under each method, on one base
	$(BIN)/python benchmarks/step_cost.py --json benchmarks/out/step_cost.json

bench-data: $(STAMP)  ## how fast text becomes tokens, and tokens samples (MEGATRON=path/to/Megatron-LM compares with it)
	$(BIN)/python benchmarks/tokenize_throughput.py --json benchmarks/out/tokenize.json $(if $(MEGATRON),--megatron $(MEGATRON))
	$(BIN)/python benchmarks/loader_throughput.py --json benchmarks/out/loader.json

bench-checkpoint: $(STAMP)  ## what a checkpoint weighs and takes, beside DeepSpeed's default
	$(BIN)/python benchmarks/checkpoint.py --json benchmarks/out/checkpoint.json

clean:  ## remove what runs and tests left behind (keeps .venv)
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
