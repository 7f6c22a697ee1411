# Build, test, measure. `make env` is what everything else stands on; CONTRIBUTING.md says more.
#
#   make demo     train on handwritten digits with two Spark tasks
#   make test     lint, C++ tests, Python tests (what .ci/run runs)
#   make soak     the same with the long legs
#   make bench    every benchmark that needs nothing but this machine

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
# Pinned, so that everybody tests the same torch, and so that pip takes this version's CPU build where its
# own configuration offers one. PyPI's build brings gigabytes of CUDA; without GPUs, name PyTorch's index of
# CPU builds: make env TORCH_INDEX=<address>.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# How long the Python tests may take before they are stopped.
TEST_TIMEOUT_S ?= 1500
PYTEST_FLAGS ?=

export VENV TORCH TORCH_INDEX
ifdef PYTHON
export PYTHON
endif
# Whatever tools keep for themselves stays in the checkout (build/ is ignored by git).
export MPLCONFIGDIR := $(CURDIR)/build/cache/matplotlib
export IPYTHONDIR := $(CURDIR)/build/cache/ipython
export JUPYTER_CONFIG_DIR := $(CURDIR)/build/cache/jupyter
export JUPYTER_DATA_DIR := $(CURDIR)/build/cache/jupyter
export JUPYTER_RUNTIME_DIR := $(CURDIR)/build/cache/jupyter

PY := $(VENV)/bin/python
PACKAGES := $(VENV)/.stamp-packages
NATIVE := build/native/.stamp
BYTECODE := $(VENV)/.stamp-bytecode
PYTHON_SOURCES := $(shell find sparkhvd -name '*.py')
NATIVE_SOURCES := $(shell find native -type f 2>/dev/null)
# Every command that starts Spark runs behind this; found again each time, because Java comes from outside.
WITH_JAVA = JAVA_HOME="$$(tools/java.sh)" && export JAVA_HOME &&

# One thing at a time: the machine's cores belong to the compiler or to the tests, not to both.
.NOTPARALLEL:
.PHONY: env native test test-native test-races test-python test-sanitizers lint format demo soak bench clean java

env: $(PACKAGES) $(NATIVE) $(BYTECODE) java

$(PACKAGES): pyproject.toml setup.py tools/env.sh
	@tools/env.sh
	@mkdir -p build/native && touch $@ $(NATIVE)

$(NATIVE): $(NATIVE_SOURCES) setup.py | $(PACKAGES)
	@$(PY) setup.py -q build_ext --inplace
	@touch $@

# Every rank and every Python worker of Spark is a new process that imports the package: compile it once.
$(BYTECODE): $(PYTHON_SOURCES) | $(PACKAGES)
	@$(PY) -m compileall -q sparkhvd
	@touch $@

native: $(NATIVE)

java:
	@tools/java.sh >/dev/null

test: lint test-native test-races test-python

lint: $(PACKAGES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	find native -name '*.h' -o -name '*.cc' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(PACKAGES)
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	find native -name '*.h' -o -name '*.cc' | xargs $(VENV)/bin/clang-format -i

test-native: $(NATIVE)
	$(VENV)/bin/cmake --build build/native --target check

# The C++ tests again, watched. The short leg looks for data races where threads meet; the long one runs all
# of them, for races and for memory and undefined behaviour.
define BUILD_SANITIZED
	$(VENV)/bin/cmake -Snative -Bbuild/native-$(1) -GNinja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DSPARKHVD_SANITIZE=$(1)
	$(VENV)/bin/cmake --build build/native-$(1) --target $(2)
endef
THREADS_MEET = operations several_threads a_ abort engines mismatches nonsense barrier

test-races: $(PACKAGES)
	$(call BUILD_SANITIZED,thread,sparkhvd_tests)
	build/native-thread/sparkhvd_tests $(THREADS_MEET)

test-sanitizers: $(PACKAGES)
	$(call BUILD_SANITIZED,address,check)
	$(call BUILD_SANITIZED,thread,check)

test-python: env
	@$(WITH_JAVA) timeout --kill-after=30 $(TEST_TIMEOUT_S) $(PY) -m pytest $(PYTEST_FLAGS)

demo: env
	@mkdir -p demo-output
	@$(WITH_JAVA) $(PY) examples/digits.py --plot demo-output/digits-loss.png

# The long legs: more random examples, longer stress, sanitizers. Tests read the variable through
# tests/harness/soak.py.
soak: export SPARKHVD_TEST_SOAK := 1
soak: TEST_TIMEOUT_S := 14400
soak: PYTEST_FLAGS += --timeout=3600
soak: test test-sanitizers

bench: env
	@$(WITH_JAVA) $(PY) benchmarks/fit.py
	@$(WITH_JAVA) $(PY) benchmarks/launch.py
	@$(PY) benchmarks/reader.py
	@$(PY) benchmarks/allreduce.py

clean:
	rm -rf build dist demo-output spark-warehouse artifacts sparkhvd/lib/*.so *.egg-info \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
