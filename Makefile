# Build, test, measure. Most targets need `make env`. See CONTRIBUTING.md.
#
#   make demo     train on handwritten digits with two Spark tasks
#   make quick    three minutes: lint, and the cheapest tests of everything
#   make test     lint, C++ tests, Python tests (what .ci/run runs)
#   make soak     everything, including the long tests; also in parts: make soak-help
#   make wheel    the wheels, into dist/
#   make release  the wheels, checked and tested under every installed Python
#   make docs     the documentation as a site, into build/site
#   make fuzz     libFuzzer and atheris on parsers of a peer's bytes and of files; the first needs clang
#   make gpu      checks and figures on one GPU, one table each
#   make bench    the benchmarks listed at `bench:`; some of them need root

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
# Pinned, so that all developers test the same torch, and so that pip uses this version's CPU build if its
# own configuration offers one. PyPI's build includes gigabytes of CUDA; without GPUs, use PyTorch's index of
# CPU builds: make env TORCH_INDEX=<address>.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Timeout of the Python tests: four times their duration on a busy machine. A single test that hangs is stopped by its
# own timeout.
TEST_TIMEOUT_S ?= 2700
# Test files that run in parallel. Many tests wait for Spark or for a deadline; 0 runs all in one process.
TEST_JOBS ?= 3
PYTEST_FLAGS ?=

export VENV TORCH TORCH_INDEX
# Ranks, workers and tests constantly start processes, which share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE
ifdef PYTHON
export PYTHON
endif
# Caches of tools stay in the checkout (build/ is ignored by git).
export MPLCONFIGDIR := $(CURDIR)/build/cache/matplotlib
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/build/cache/torchinductor
export IPYTHONDIR := $(CURDIR)/build/cache/ipython
export JUPYTER_CONFIG_DIR := $(CURDIR)/build/cache/jupyter
export JUPYTER_DATA_DIR := $(CURDIR)/build/cache/jupyter
export JUPYTER_RUNTIME_DIR := $(CURDIR)/build/cache/jupyter

PY := $(VENV)/bin/python
BUILD_TOOLS := $(VENV)/.stamp-build-tools
PACKAGES := $(VENV)/.stamp-packages
NATIVE := build/native/.stamp
BYTECODE := $(VENV)/.stamp-bytecode
CLASSES := $(VENV)/.stamp-classes
PYTHON_SOURCES := $(shell find sparkhvd -name '*.py')
NATIVE_SOURCES := $(shell find native -type f 2>/dev/null)
# Prefix of every command that starts Spark; looked up each time, because Java is installed outside.
WITH_JAVA = JAVA_HOME="$$(tools/java.sh)" && export JAVA_HOME &&

.PHONY: test-torch torch-env quick soak-python soak-torch soak-packaging soak-launchers soak-help wheel release docs test-site test-wheels test-aarch64 test-oldest test-users test-nccl test-locks corpus
.PHONY: env classes collected native stand-in test test-native test-races races test-python test-sanitizers fuzz fuzz-native fuzz-python fuzz-if-clang lint format demo soak bench gpu clean java

ENV := $(PACKAGES) $(NATIVE) $(BYTECODE) java
# The compiler runs while pip downloads and unpacks.
IN_PARALLEL = $(MAKE) --no-print-directory --jobs=5
# ninja cannot use the pipe of make's job server, and uses all cores.
NO_JOBSERVER := env -u MAKEFLAGS

env:
	@$(IN_PARALLEL) $(ENV)

$(BUILD_TOOLS): tools/env.sh
	@tools/env.sh build-tools
	@touch $@

$(PACKAGES): pyproject.toml setup.py tools/env.sh | $(BUILD_TOOLS)
	@tools/env.sh packages
	@touch $@

$(NATIVE): $(NATIVE_SOURCES) setup.py | $(BUILD_TOOLS)
	@$(NO_JOBSERVER) $(PY) setup.py -q build_ext --inplace
	@touch $@

# Every rank and every Python worker of Spark is a new process that imports the package: compile it once.
$(BYTECODE): $(PYTHON_SOURCES) | $(PACKAGES)
	@$(PY) -m compileall -q sparkhvd
	@touch $@

# Tests start many JVMs that live for seconds; with an archive of Spark's classes they need half the time.
$(CLASSES): tests/harness/jvm.py $(PACKAGES) | java
	@$(WITH_JAVA) $(PY) -m tests.harness.jvm
	@touch $@

classes: $(CLASSES)

# Otherwise every worker would compile the bytecode of torch and of the tests.
collected: $(ENV)
	@$(PY) -m pytest --collect-only -q | tail -n 1

native: $(NATIVE) stand-in

# Stand-in for GPU tests without a GPU; checked each time, so that no test uses a stale one.
stand-in: $(NATIVE)
	@$(NO_JOBSERVER) $(VENV)/bin/cmake --build build/native --target fake_cuda nccl_conformity

java:
	@tools/java.sh >/dev/null

# Matters if nothing has been compiled before.
test: export SPARKHVD_UNITY_BUILD = ON
test:
	@echo "make test: environments, lint and the C++ tests come first; in a new checkout that takes minutes"
	@$(IN_PARALLEL) --output-sync=target lint test-native test-races torch-env collected classes
	@$(MAKE) --no-print-directory test-python
	@$(MAKE) --no-print-directory test-torch

# A cross-section of what a change breaks most likely, on a built checkout. The tier of a file is a line in it.
QUICK_TESTS = $(shell grep -rl --include='test_*.py' '^pytestmark = .*pytest\.mark\.pure' tests) tests/torch/test_collectives.py \
  tests/torch/test_reduced_gradients.py tests/torch/test_context.py 'tests/estimator/test_fit.py::test_fit_equals_one_process[120 rows mixed]'
QUICK_FLAGS ?= --durations=5 --timeout=60

quick: env stand-in $(CLASSES) lint
	$(VENV)/bin/cmake --build build/native --target sparkhvd_tests
	build/native/sparkhvd_tests operations frames ring memory tensors
	@$(WITH_JAVA) $(PY) -m pytest -n $(TEST_JOBS) --dist worksteal $(QUICK_FLAGS) $(QUICK_TESTS)

lint: $(PACKAGES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/codespell
	find native -name '*.h' -o -name '*.cc' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(PACKAGES)
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	find native -name '*.h' -o -name '*.cc' | xargs $(VENV)/bin/clang-format -i

# Not beside `stand-in`, which uses the same folder.
test-native: stand-in
	$(NO_JOBSERVER) $(VENV)/bin/cmake --build build/native --target check

# Real NCCL libraries from PyPI, without a GPU; cached in build/nccl, skipped without an index.
test-nccl: stand-in
	@$(PY) -m tools.nccl_libraries
	$(PY) -m pytest $(PYTEST_FLAGS) tests/soak/nccl

# The C++ tests under sanitizers. The short leg checks for data races and freed memory where threads interact or bytes of a peer are read, and
# checks indices (_GLIBCXX_ASSERTIONS), except in compute-bound tests and those of devices. The long legs run all tests, for races, and for
# memory errors and undefined behaviour.
define BUILD_SANITIZED
$(VENV)/bin/cmake -Snative -Bbuild/native-$(1)$(if $(filter OFF,$(2)),-all) -GNinja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DSPARKHVD_SANITIZE=$(1) -DSPARKHVD_SANITIZE_QUICK=$(2) && \
	  $(NO_JOBSERVER) $(VENV)/bin/cmake --build build/native-$(1)$(if $(filter OFF,$(2)),-all) --target $(3)
endef
THREADS_MEET = operations several_threads '^a_' joined_rank removed_process_set list_of_tensors abort engines mismatches nonsense barrier stream depart rank_0 frames memory tensors
COMPUTE_LONG = memory_of_the_callers fits_no_message counts_along control_bytes_of_rank_0

# The short leg compiles the engine once more, five minutes of CPU. It depends on the C++ sources alone, so a passed leg writes their
# checksum into RACES_PASSED, which is committed: `make test` does not repeat it. `make soak` and `make races` do.
RACES_PASSED := native/tests/races_passed.txt
NATIVE_SUM = find native -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -d' ' -f1
RACES_UNCHANGED = test "$$(cat $(RACES_PASSED) 2>/dev/null)" = "$$($(NATIVE_SUM))"

test-races:
	@if $(RACES_UNCHANGED); then echo "test-races: these C++ sources have passed ($(RACES_PASSED))"; else $(MAKE) --no-print-directory races; fi

races: $(BUILD_TOOLS)
	$(call BUILD_SANITIZED,thread,ON,sparkhvd_tests)
	build/native-thread/sparkhvd_tests $(THREADS_MEET) $(COMPUTE_LONG:%=-%)
	@$(NATIVE_SUM) >$(RACES_PASSED)

test-sanitizers: $(BUILD_TOOLS)
	$(call BUILD_SANITIZED,address,OFF,check)
	$(call BUILD_SANITIZED,thread,OFF,check)

# libFuzzer on parsers of a peer's bytes; needs clang 16 or newer (Debian: apt-get install clang-16 libclang-rt-16-dev).
# The corpus stays in build/fuzz/corpus, so each run continues the last.
CLANGXX ?= $(shell for name in clang++ clang++-{22..16}; do \
  command -v $$name >/dev/null && test "$$($$name -dumpversion | cut -d. -f1)" -ge 16 && { command -v $$name; break; }; done)
FUZZ_S ?= 60

fuzz: fuzz-native fuzz-python

fuzz-native: $(PACKAGES)
	@test -n "$(CLANGXX)" || { echo "make fuzz: no clang++ found. Install clang, or give CLANGXX=<path>." >&2; exit 1; }
	$(VENV)/bin/cmake -Snative/fuzz -Bbuild/fuzz -GNinja -DCMAKE_CXX_COMPILER=$(CLANGXX) \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja
	$(VENV)/bin/cmake --build build/fuzz
	build/fuzz/message_fuzz --write-corpus build/fuzz/corpus
	cd build/fuzz && ./message_fuzz -max_total_time=$(FUZZ_S) -max_len=16384 -timeout=10 -rss_limit_mb=2048 \
	  -print_final_stats=1 corpus

# atheris on the parsers of Python, which share FUZZ_S. Skipped if pip does not find it, as for a newer Python.
FUZZ_ENV := build/fuzz-env

$(FUZZ_ENV)/.stamp: tools/fuzz_env.sh | $(PACKAGES)
	@tools/fuzz_env.sh $(PY) $(FUZZ_ENV) || test $$? -eq 3
	@mkdir -p $(@D) && touch $@

fuzz-python: env $(FUZZ_ENV)/.stamp
	@if ! $(FUZZ_ENV)/bin/python -c "import atheris" 2>/dev/null; then echo "fuzz-python: skipped, because pip finds no atheris here"; exit 0; fi; \
	$(FUZZ_ENV)/bin/python -m tests.fuzz build/fuzz/python $(FUZZ_S)

# clang's thread safety analysis: data guarded by a mutex is accessed only under it (native/src/sync.h).
test-locks:
	@if test -z "$(CLANGXX)"; then echo "test-locks: skipped, because there is no clang++ here"; exit 0; fi; \
	find native/src -name '*.cc' -not -path '*/kernels/*' | xargs -n 8 $(CLANGXX) -std=c++20 -fsyntax-only -Werror=thread-safety \
	  -Inative/include -Inative/src && echo "test-locks: nothing found"

# Part of the long legs if clang is installed.
fuzz-if-clang: fuzz-python
	@if test -n "$(CLANGXX)"; then $(MAKE) fuzz-native; else echo "fuzz: skipped, because there is no clang++ here"; fi

test-python: env stand-in $(CLASSES)
	@$(WITH_JAVA) timeout --kill-after=30 $(TEST_TIMEOUT_S) $(PY) -m pytest -n $(TEST_JOBS) --dist worksteal $(PYTEST_FLAGS)

# The newest supported torch, in its own environment beside .venv: a cross-section of the code that calls torch. Skipped if pip
# does not find it, as behind a constraint or without an index.
TORCH_NEWEST ?= torch==2.14.1
TORCH_ENV := build/torch-env-$(subst torch==,,$(TORCH_NEWEST))
TORCH_TESTS := tests/distributed/test_reconfigure.py tests/basics/test_lazy_compiler.py::test_no_compiler_is_imported_by_what_trains tests/basics/test_lazy_compiler.py::test_torch_optimizers_give_the_same_bits_without_compiler_import 'tests/distributed/test_collectives.py::test_collectives_and_their_users_give_what_one_process_computes[2]' tests/torch/test_optimizer.py

$(TORCH_ENV)/.stamp: tools/torch_env.sh | $(BUILD_TOOLS)
	@tools/torch_env.sh $(PY) $(TORCH_ENV) "$(TORCH_NEWEST)" || test $$? -eq 3
	@test ! -x $(TORCH_ENV)/bin/python || touch $@

torch-env: $(TORCH_ENV)/.stamp

test-torch: env torch-env
	@if test ! -f $(TORCH_ENV)/.stamp; then echo "test-torch: skipped, because pip finds no $(TORCH_NEWEST) here"; exit 0; fi; \
	$(WITH_JAVA) timeout --kill-after=30 $(TEST_TIMEOUT_S) $(TORCH_ENV)/bin/python -m pytest -n $(TEST_JOBS) --dist worksteal $(PYTEST_FLAGS) $(TORCH_TESTS)

# The oldest supported pyspark, pyarrow and numpy, in their own environment; petastorm needs these, too.
OLDEST_ENV := build/oldest-env
OLDEST_TESTS := tests/soak/oldest tests/soak/petastorm tests/data/test_parquet_dataset.py tests/data/test_parquet_source.py \
  tests/data/test_packed.py

$(OLDEST_ENV)/.stamp: tools/oldest_env.sh | $(PACKAGES)
	@tools/oldest_env.sh $(PY) $(OLDEST_ENV) || test $$? -eq 3
	@mkdir -p $(@D) && touch $@

test-oldest: env $(OLDEST_ENV)/.stamp
	@test ! -x $(OLDEST_ENV)/bin/python || { $(WITH_JAVA) $(OLDEST_ENV)/bin/python -c "import petastorm" && \
	  timeout --kill-after=30 $(TEST_TIMEOUT_S) $(OLDEST_ENV)/bin/python -m pytest -W ignore::FutureWarning $(PYTEST_FLAGS) $(OLDEST_TESTS); }

# Libraries that run on torch.distributed, in their own environment; with another torch than .venv's: make test-users USERS_TORCH=2.14.1
USERS_TORCH ?=
USERS_ENV := build/users-env$(USERS_TORCH:%=-%)

$(USERS_ENV)/.stamp: tools/users_env.sh | $(PACKAGES)
	@tools/users_env.sh $(PY) $(USERS_ENV) $(USERS_TORCH)
	@touch $@

# Accelerate's scripts alone start twenty processes.
test-users: env $(USERS_ENV)/.stamp
	@$(WITH_JAVA) timeout --kill-after=30 $$((2 * $(TEST_TIMEOUT_S))) $(USERS_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/soak/users
	@$(WITH_JAVA) SPARKHVD_TEST_SOAK=1 timeout --kill-after=30 $(TEST_TIMEOUT_S) $(USERS_ENV)/bin/python -m pytest $(PYTEST_FLAGS) \
	  tests/docs/test_page_runs.py -k with_a_library

# Real programs by a plain loop and by `fit`, in an environment with their libraries: an hour. Continues a run that was ended; the
# records are in build/corpus, the page is docs/results/corpus.md. CORPUS_FLAGS="--only vision" selects.
CORPUS_ENV := build/corpus-env
CORPUS_FLAGS ?=

$(CORPUS_ENV)/.stamp: tools/corpus_env.sh tests/corpus/requirements.txt | $(PACKAGES)
	@tools/corpus_env.sh $(PY) $(CORPUS_ENV)
	@touch $@

corpus: env $(CORPUS_ENV)/.stamp
	@$(WITH_JAVA) $(CORPUS_ENV)/bin/python -m tests.corpus.run $(CORPUS_FLAGS)

# zig compiles wheels for old and other machines; it has its own environment.
WHEEL_ENV := build/wheel-env
WHEEL_TOOLS := $(WHEEL_ENV)/.stamp
PYTHONS ?= 3.10 3.11 3.12 3.13

$(WHEEL_TOOLS): pyproject.toml tools/wheel_env.sh | $(PACKAGES)
	@tools/wheel_env.sh $(PY) $(WHEEL_ENV)
	@touch $@

wheel: $(WHEEL_TOOLS)
	@$(WHEEL_ENV)/bin/python -m tools.wheel

RELEASE_ENV := build/release-env

$(RELEASE_ENV)/.stamp: pyproject.toml | $(PACKAGES)
	@$(PY) -m venv $(RELEASE_ENV) && $(RELEASE_ENV)/bin/python -m pip --disable-pip-version-check --no-cache-dir install -q "pip>=25.1"
	@$(RELEASE_ENV)/bin/python -m pip --disable-pip-version-check --no-cache-dir install -q --group release
	@touch $@

# Tests beside torch and pyspark; writes docs/compatibility.md.
release: wheel $(RELEASE_ENV)/.stamp
	@$(RELEASE_ENV)/bin/python -m twine check --strict dist/*
	@$(WITH_JAVA) $(RELEASE_ENV)/bin/python -m tools.release $(PY)

test-wheels: wheel
	@$(WHEEL_ENV)/bin/python -m tools.wheel_tests $(PYTHONS)

test-aarch64: $(WHEEL_TOOLS)
	@tools/test_aarch64.sh $(WHEEL_ENV)/bin/python

# The documentation as a site, in build/site; warnings, such as broken links, are errors. It needs Python and mkdocs, but neither
# the library nor torch: mkdocs reads the sources.
DOCS_ENV := build/docs-env

$(DOCS_ENV)/.stamp: pyproject.toml tools/docs_env.sh
	@tools/docs_env.sh $(DOCS_ENV)
	@touch $@

docs: $(DOCS_ENV)/.stamp
	@NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS_ENV)/bin:$$PATH" $(DOCS_ENV)/bin/mkdocs build --quiet --strict && echo "make docs: build/site/index.html"

# Its pages in a real browser, if installed (Debian: apt-get install chromium).
test-site: env docs
	@$(PY) -m pytest $(PYTEST_FLAGS) tests/soak/site

demo: env
	@mkdir -p demo-output
	@$(WITH_JAVA) $(PY) examples/digits.py --plot demo-output/digits-loss.png

# The long legs: more random examples, longer stress, tests outside of `make test`, sanitizers, wheels, other machines. Single
# parts: make soak-python. Tests read the variable through tests/harness/soak.py.
SOAK_PARTS := lint test-native soak-python soak-torch soak-packaging soak-launchers test-nccl test-oldest test-users corpus test-sanitizers test-locks fuzz-if-clang \
  test-aarch64 test-wheels test-site
soak soak-python soak-torch soak-packaging soak-launchers: export SPARKHVD_TEST_SOAK := 1
soak-python soak-torch: TEST_TIMEOUT_S := 14400
soak-python soak-torch: TEST_JOBS := 0
soak-python soak-torch: PYTEST_FLAGS += --timeout=3600

# Continues after a failed part, and prints a summary at the end.
soak:
	@failed=; for part in $(SOAK_PARTS); do \
	  begin=$$SECONDS; if $(MAKE) $$part; then state=passed; else state=FAILED; failed=1; fi; \
	  report+="$$(printf '%-16s %-6s %5d s' $$part $$state $$((SECONDS - begin)))"$$'\n'; \
	done; echo "make soak ran:"; printf '%s' "$$report"; [ -z "$$failed" ]

soak-python: test-python

soak-torch: test-torch

soak-packaging: env
	$(PY) -m pytest --timeout=1200 $(PYTEST_FLAGS) tests/soak/packaging

# Real MPIs, linters and schemas, from PyPI into build/, skipped without an index; processes killed at random; dynamic executors.
soak-launchers: env
	@$(WITH_JAVA) $(PY) -m pytest --timeout=3600 $(PYTEST_FLAGS) tests/soak/mpi tests/soak/manifests tests/soak/launchers tests/soak/spark tests/soak/distributed

soak-help:
	@echo "make soak, or one of its parts: $(SOAK_PARTS)"

# Needs torch with CUDA, but neither Spark, Java nor a network: also without `make env`, on a machine with a bare Python
# (docs/testing.md#validating-on-gpus). Exit status 2 of the program, which make reports as an error, means no GPU.
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),python3)
GPU_FLAGS ?=

gpu:
	@test -f sparkhvd/lib/libsparkhvd.so || $(GPU_PYTHON) setup.py -q build_ext --inplace
	@$(GPU_PYTHON) -m tests.gpu $(GPU_FLAGS)

bench: env
	@$(WITH_JAVA) $(PY) benchmarks/estimator.py
	@$(WITH_JAVA) $(PY) benchmarks/launch.py
	@$(WITH_JAVA) $(PY) benchmarks/sessions.py
	@$(WITH_JAVA) $(PY) benchmarks/materialize.py
	@$(PY) benchmarks/reader.py
	@$(PY) benchmarks/allreduce.py
	@$(PY) benchmarks/isolated.py
	@$(PY) benchmarks/one_cpu.py
	@$(PY) -m benchmarks.backend
	@$(PY) benchmarks/timeline.py
	@$(PY) benchmarks/device_overhead.py
	@$(PY) benchmarks/device_orders.py
	@$(PY) benchmarks/network.py
	@$(PY) benchmarks/point_to_point.py
	@$(PY) benchmarks/scale.py
	@$(PY) benchmarks/start.py
	@$(PY) benchmarks/step.py
	@$(PY) benchmarks/compression.py
	@$(PY) benchmarks/scaling.py

clean:
	rm -rf build dist demo-output spark-warehouse artifacts sparkhvd/lib/*.so *.egg-info \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
