# Every target does its whole set-up: a machine with Python 3.11 or newer and pip is enough.
#
#   make demo       a byte-level GPT trains on eight ranks under two plans
#   make test       the test suite
#   make test-long  more of the same, on more models and ranks: what is marked long
#   make test-emulated-gpu  all tests on emulated GPUs (tests/emulated_gpu; they need g++ and a torch without CUDA)
#   make test-oldest, make test-newest  the test suite with the oldest and the newest torch that pyproject.toml allows (PYTEST_ARGS='tests/rules')
#   make docs       the documentation as a site, in build/site; a link that leads nowhere is an error
#   make docs-images  the pictures of docs/images, made anew in a headless Chromium
#   make package    a wheel and a source distribution, in dist
#   make sweep      every rule against its operator and under its default plan, mutated files, torch's own databases of samples, more random programs than the suite runs (SWEEP_ARGS='--programs 5000')
#   make operator-database  torch's operators, modules and optimizers with its own samples, and the tables of docs/operator-database.md (SWEEP_ARGS='linalg')
#   make museum     mistakes that others have published, made here on purpose, and what finds them (docs/museum.md)
#   make museum-page  the list in docs/museum.md, written anew
#   make golden     the printed plans of tests/golden, written anew: for a change of decisions that is meant
#   make bench-step seconds of a training step beside hand-written ones (BENCH_ARGS='--ranks 2 --profile')
#   make bench-experts  seconds of a training step of experts beside expert parallelism by hand, gathering and data parallelism (BENCH_ARGS='--ranks 2 --experts 8')
#   make bench-pipeline  seconds of a step of a pipeline beside stages cut by hand on torch's schedules, bubbles measured and simulated (BENCH_ARGS='--ranks 2')
#   make bench-gpu  seconds of training steps of transformers models on one GPU, eager and compiled, beside plain PyTorch's (BENCH_ARGS='--models llama'; without a GPU: '--device cpu --tiny')
#   make bench-gpu-run  what only a GPU can say, in ten minutes and lines of JSON (BENCH_ARGS='--json FILE'; without a GPU: '--dry')
#   make bench-auto seconds of a training step under the plans of every search, predicted and measured (BENCH_ARGS='--models reid')
#   make bench-resnet-modes  ResNet-50 in data_parallel and in auto_parallel mode on eight ranks, step by step in turn (BENCH_ARGS='--ranks 4')
#   make checked-plans  docs/checked-plans.md: every tp plan that ships with the installed transformers, proven or refuted (about 15 minutes)
#   make operators  docs/operators.md, written from the rule tables
#   make names      the names of the dialect in docs/from-mindspore.md
#   make dialect-reference  the dialect beside the reference itself, measured anew in an environment of its own (REFERENCE_PYTHON=python3.11; 0.8 GB), and the list in docs/differences.md
#   make commands   the outputs of the commands in docs/commands.md
#   make zoo        22 models: data parallel, tensor parallel and random plans of each, verified (ZOO_ARGS='--plans 3 swin')
#   make sweep-redistribution  all pairs of layouts against an independent shortest path (about four minutes)
#   make sweep-search  the exact search against all assignments of small graphs, HiGHS and hill climbing (SWEEP_ARGS='--graphs 2000')
#   make sweep-pipelines  500 random cuts of random modules, and the zoo in 2, 3 and 4 stages, proven beside one device (SWEEP_ARGS='-k t5')
#   make sweep-scale  10,000 simulated days of jobs with faults, and what launchers and ranks send by size (SWEEP_ARGS='--days 1000', LAWS='8 64')
#   make sweep-trainer  ShardwiseTrainer on 2 ranks against Trainer in one process, on the architectures of zoo-breadth (SWEEP_ARGS='--minutes 30 opt bert')
#   make bench-redistribution  what redistribution sends beside DTensor's, on every pair that DTensor can express
#   make bench-collectives  predicted against measured seconds of collectives, for published tables of measurements (BENCH_ARGS='--data FOLDER')
#   make bench-kernel-prices  predicted against measured seconds of kernels and of steps on one device, for a file of measurements (BENCH_ARGS='--data FILE')
#   make bench-published-runs  predicted against published seconds of training, for a file of published runs (DATA=FILE, BENCH_ARGS='--all')
#   make bench-known-answers  published settings of large trainings beside the plans that are found for them (BENCH_ARGS='--only-published gpt3-175b-64')
#   make zoo-breadth  140 more architectures of transformers, small: capture and four plans of each (ZOO_ARGS='--plans 1 opt')
#   make bench-memory  predicted against measured bytes of a training step on gloo ranks (BENCH_ARGS='--ranks 2')
#   make sweep-memory  predicted against measured bytes of training steps over models and settings of all levers, on two ranks (SWEEP_ARGS='--cases 60 --seed 3')
#   make bench-published-memory  predicted against published bytes of training, for a file of published runs (BENCH_ARGS='--data FILE')
#   make bench-search  seconds from a module to its plan, to the first verdict and to the remembered answer, for large models on large clusters (BENCH_ARGS='--growth': curves over layers, devices and axes)
#   make bench-compile  seconds of compiling by depth, and bytes kept for backward beside torch.compile (BENCH_ARGS='--layers 2 8')
#   make bench-checkpoints  what a save costs the step beside it, its stall, and seconds to save and load
#   make bench-generation  tokens per second of generate on gloo ranks beside one process, greedily and with beams (BENCH_ARGS='--ranks 2 --width 1024')
#   make bench-planning  how long redistributions take to plan on random layouts (BENCH_ARGS='--pairs 50')
#   make lint       ruff, mypy and import-linter
#   make install    only the set-up: .venv with the pinned torch and this project, editable
#   make openmpi    mpirun for the tests that use it (they are skipped without), where apt-get may install it
#
# PYTHON=python3.12 chooses the interpreter. TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch's smaller
# CPU-only wheel (on Linux, PyPI's has CUDA inside).

SHELL := /bin/bash
unexport PYTHONDONTWRITEBYTECODE  # each of the thousand processes of the tests would compile the package anew
.DEFAULT_GOAL := test
.PHONY: checked-plans demo test test-quick test-long test-emulated-gpu test-oldest test-newest docs docs-images package golden museum museum-page operator-database operators commands dialect-reference names zoo zoo-breadth bench-step bench-pipeline bench-compile bench-gpu bench-gpu-run bench-auto bench-resnet-modes bench-redistribution bench-search bench-planning bench-collectives bench-memory bench-published-memory bench-kernel-prices bench-published-runs bench-experts bench-known-answers bench-checkpoints bench-generation sweep sweep-redistribution sweep-search sweep-pipelines sweep-memory sweep-scale sweep-trainer lint install format clean openmpi

TORCH := torch==2.13.0
REFERENCE := build/reference
REFERENCE_PYTHON ?= python3.11
OLDEST := 2.11.0
NEWEST := 2.14.1
TORCH_INDEX ?=
SEED := 0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

demo: install
	$(BIN)/python examples/demo.py

# Three processes on two cores: tests of ranks wait a good part of their time, for each other and for what times out.
test: install
	$(BIN)/python -m pytest -n 3 --dist worksteal --seed $(SEED) $(PYTEST_ARGS)

# For the edit loop: a seeded share of every folder, and two tests on real ranks.
test-quick: install
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick --seed $(SEED) $(PYTEST_ARGS)

test-long: install
	$(BIN)/python -m pytest -n 3 --dist worksteal --seed $(SEED) -m long $(PYTEST_ARGS)

test-emulated-gpu: install
	$(BIN)/python -m pytest -m "long or not long" tests/emulated_gpu $(PYTEST_ARGS)

# Each in an environment of its own.
test-oldest:
	$(MAKE) test VENV=.venv-oldest TORCH=torch==$(OLDEST)

test-newest:
	$(MAKE) test VENV=.venv-newest TORCH=torch==$(NEWEST)

docs: install
	$(BIN)/mkdocs build --strict

docs-images: install
	$(BIN)/python docs/images/make.py

package: install
	$(BIN)/python -m build

bench-pipeline: install
	$(BIN)/python benchmarks/pipeline_time.py $(BENCH_ARGS)

bench-step: install
	$(BIN)/python benchmarks/step_time.py $(BENCH_ARGS)

bench-experts: install
	$(BIN)/python benchmarks/experts.py $(BENCH_ARGS)

bench-compile: install
	$(BIN)/python benchmarks/compile.py $(BENCH_ARGS)

bench-gpu: install
	$(BIN)/python benchmarks/gpu_steps.py $(BENCH_ARGS)

bench-gpu-run: install
	$(BIN)/python benchmarks/gpu_run.py $(BENCH_ARGS)

bench-auto: install
	$(BIN)/python benchmarks/auto_plans.py $(BENCH_ARGS)

bench-resnet-modes: install
	$(BIN)/python benchmarks/resnet_modes.py $(BENCH_ARGS)

sweep: test-long
	PYTHONPATH=tests $(BIN)/python -m rules.checking
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m rules.planned
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m plans.fuzzing
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m oracle
	PYTHONPATH=tests $(BIN)/python -m programs.sweep $(SWEEP_ARGS)

operator-database: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m oracle --write $(SWEEP_ARGS)

museum: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m museum

museum-page: install
	PYTHONPATH=tests $(BIN)/python -m museum --write

golden: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m plans.priced_plans
	SHARDWISE_GOLDEN=write $(BIN)/python -m pytest -q tests/plans/test_printing.py
	git --no-pager diff --stat -- tests/golden

checked-plans: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m foreign.shipped --write

operators: install
	PYTHONPATH=tests $(BIN)/python -m docs.operators

commands: install
	PYTHONPATH=tests $(BIN)/python -m docs.commands

# Calls and signatures of the reference, measured anew; git diff shows what changed, the tests what the dialect does otherwise.
dialect-reference: install
	test -x $(REFERENCE)/bin/python || ($(REFERENCE_PYTHON) -m venv $(REFERENCE) && $(REFERENCE)/bin/pip install -q mindspore==2.10.0 "numpy==1.26.*" || (rm -rf $(REFERENCE); false))
	cd $(REFERENCE) && OMP_NUM_THREADS=1 GLOG_v=4 bin/python $(CURDIR)/tests/mindspore/write_reference.py > /dev/null
	PYTHONPATH=tests $(BIN)/python -m mindspore.reference_differences
	$(BIN)/python -m pytest tests/mindspore/test_reference_values.py tests/mindspore/test_reference_defaults.py

names: install
	PYTHONPATH=tests $(BIN)/python -m docs.dialect_names

zoo: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m models.zoo $(ZOO_ARGS)

bench-redistribution: install
	$(BIN)/python benchmarks/redistribution.py $(BENCH_ARGS)

bench-collectives: install
	$(BIN)/python benchmarks/collective_costs.py $(BENCH_ARGS)

zoo-breadth: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m models.breadth $(ZOO_ARGS)

bench-memory: install
	$(BIN)/python benchmarks/step_memory.py $(BENCH_ARGS)

bench-published-memory: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/published_memory.py $(BENCH_ARGS)

bench-kernel-prices: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kernel_prices.py $(BENCH_ARGS)

bench-published-runs: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/published_runs.py $(if $(DATA),--data $(DATA)) $(BENCH_ARGS)

bench-known-answers: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/known_answers.py $(BENCH_ARGS)

bench-search: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/search_targets.py $(BENCH_ARGS)

bench-checkpoints: install
	$(BIN)/python benchmarks/checkpoints.py $(BENCH_ARGS)

bench-generation: install
	$(BIN)/python benchmarks/generation.py $(BENCH_ARGS)

bench-planning: install
	$(BIN)/python benchmarks/planning.py $(BENCH_ARGS)

sweep-redistribution: install
	PYTHONPATH=tests $(BIN)/python -m layouts.sweep

sweep-search: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m search.sweep $(SWEEP_ARGS)

sweep-pipelines: install
	$(BIN)/python -m pytest -m long tests/plans/test_random_cuts.py $(SWEEP_ARGS)

sweep-memory: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m costs.memory_matrix $(SWEEP_ARGS)

sweep-scale: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m simulated_job.sweep $(SWEEP_ARGS)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m simulated_job.laws $(LAWS)

sweep-trainer: install
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m hf.sweep $(SWEEP_ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(STAMP)

# Torch goes first, by its exact pin, so that no other requirement chooses its version.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "shardwise needs Python 3.11 or newer; found none: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "shardwise needs Python 3.11 or newer; $(PYTHON) is older"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(PIP) install --progress-bar off $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) install --progress-bar off --editable ".[test,dev,docs]" "$(TORCH)"
	@touch $(STAMP)

# Never fails: on another system, without root's rights or without a network the tests say what they skip.
openmpi:
	@if command -v mpirun; then :; elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		timeout 300 apt-get install -y -qq --no-install-recommends openmpi-bin >/dev/null 2>&1 || \
		{ timeout 120 apt-get update -qq && \
			timeout 300 apt-get install -y -qq --no-install-recommends openmpi-bin; } >/dev/null 2>&1 || \
		echo "openmpi-bin could not be installed: the tests that use mpirun will be skipped"; \
	else echo "no mpirun here: the tests that use it will be skipped (Debian: apt-get install openmpi-bin)"; fi

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
