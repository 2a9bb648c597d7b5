# `make demo` and `make test` need nothing set up by hand: Python 3.10 or later, a C++20 compiler and make.
# `make` alone lists the targets. Only the command line sets the variables below, never the environment.

# The Python that environments are made from, and what pip is asked for as torch (options are allowed too, as in
# TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu').
PYTHON = python3
TORCH = torch==2.13.0

# One environment for each pair of the two, so that going back and forth installs nothing again.
default_key := python3 torch==2.13.0
key := $(PYTHON) $(TORCH)
VENV = .venv$(if $(filter-out $(default_key),$(key)),-$(shell printf '%s' '$(key)' | tr -cs 'A-Za-z0-9.' '-'))

# ON: compiler warnings are errors, for a compiler that the sources are known to be clean with.
WERROR = OFF

# How long `make soak` takes.
MINUTES = 10

# For `make test-gpu`: the wheel under test, some of its parts (default: all), and the file for its output.
WHEEL =
PART =
LOG = build/test-gpu.log
# For `make test-multigpu`: how many ranks, and the folder for figures, plots and tables.
RANKS = 2
OUT = build/multigpu

# More arguments for what a target runs: make test ARGS='-k packaging', make demo ARGS='--ranks 3'.
ARGS =

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo bench test test-gpu test-multigpu model test-sanitizers soak build lint clean distclean

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check
# The build folder is kept, so that a change compiles only what it touches, and the wheel is made of the same objects.
# torch's own environment does the build: see [build-system] in pyproject.toml.
build_dir := build/$(patsubst .%,%,$(notdir $(VENV)))
editable_install := $(pip) install --quiet --no-build-isolation --config-settings=build-dir=$(build_dir) \
  --config-settings=cmake.define.GPUSYNC_WERROR=$(WERROR) --config-settings=cmake.define.GPUSYNC_BUILD_TESTS=ON --editable

native_sources := $(shell find csrc test/cuda -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \
                    -o -name CMakeLists.txt 2>/dev/null)

help:
	@echo 'make demo            train a small model over 2 ranks on the CPU (ARGS="--ranks N --steps K --text FILE")'
	@echo 'make test            the whole suite (ARGS="-k NAME" for a part of it)'
	@echo 'make model           check the protocols with the Spin model checker (part of make test)'
	@echo 'make test-sanitizers stress the CPU protocol under the thread, address and undefined-behaviour sanitizers'
	@echo 'make soak            stress it for MINUTES=$(MINUTES)'
	@echo 'make bench           measure the ops beside their alternatives (ARGS="--help" says what it takes)'
	@echo 'make test-gpu        the GPU tests, from a wheel and with a Python that has torch (PYTHON=... WHEEL=... [PART=...])'
	@echo 'make test-multigpu   tests, figures and a tuning table with a GPU for each rank (PYTHON=... WHEEL=... RANKS=2)'
	@echo 'make build           a wheel, in dist/'
	@echo 'make lint            ruff, mypy and clang-format over the tree'
	@echo 'make clean           remove what builds leave; make distclean: the environments too'
	@echo
	@echo 'PYTHON=$(PYTHON) and TORCH=$(TORCH) choose the environment ($(VENV)).'

# ---- environment
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo '$(PYTHON) is no Python 3.10 or later: name one with PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
	  || { echo 'Python.h is missing, and torch.compile needs it: install python3-dev (Debian) or its like.' >&2; exit 1; }
	@echo '==> $(VENV): a new environment from $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)
	@echo '==> $(VENV): installing $(TORCH) (hundreds of MB, once)'
	@$(pip) install $$([ -t 1 ] || echo --quiet) $(TORCH)
	@echo '==> $(VENV): installing the build tools'
	@$(pip) install --quiet 'scikit-build-core>=0.11' 'cmake>=3.25' ninja
	@touch $@

# Editable, for two reasons: a change of a Python file needs no new install, and the source folder torch_gpusync/,
# first on the path of whatever runs in this directory, would hide an installed copy, which alone holds _C.so (an
# editable install joins the two). The wheel that users get is built and checked by test/test_packaging.py.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(native_sources)
	@echo '==> $(VENV): building and installing torch_gpusync'
	@$(editable_install) '.[test,bench]'
	@touch $@

$(VENV)/.lint: $(VENV)/.installed
	@echo '==> $(VENV): installing the lint tools'
	@$(editable_install) '.[dev]'
	@touch $@

# ---- what to do with it
demo: $(VENV)/.installed
	@$(python) -m torch_gpusync demo $(ARGS)

bench: $(VENV)/.installed
	@$(python) -m torch_gpusync bench $(ARGS)

# The models are part of the whole, and no part of what ARGS selects.
test: $(VENV)/.installed $(if $(ARGS),,model)
	@$(python) -m pytest $(ARGS)

model:
	@test/model/run.sh

test-sanitizers:
	@test/native/run_sanitizers.sh

soak:
	@test/native/soak.sh $(MINUTES)

# On a machine with a GPU, and perhaps with nothing else: no registry, no environment of its own, no compiler.
test-gpu:
	@$(PYTHON) test/cuda/run_gpu_tests.py --python '$(PYTHON)' --wheel '$(WHEEL)' --part '$(PART)' --log '$(LOG)'

test-multigpu:
	@$(PYTHON) test/cuda/run_multigpu.py --python '$(PYTHON)' --wheel '$(WHEEL)' --ranks '$(RANKS)' --out '$(OUT)' $(ARGS)

build: $(VENV)/.torch
	@$(pip) wheel --quiet --no-build-isolation --config-settings=build-dir=$(build_dir) --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

lint: $(VENV)/.lint
	@PATH="$(abspath $(VENV))/bin:$$PATH" pre-commit run --all-files --show-diff-on-failure

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
