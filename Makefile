# Offramp: `make demo` and `make test` work on a fresh clone.
#   PYTHON=python3.11 make test              another interpreter
#   make demo TORCH_FLAGS='--index-url URL'  another build of torch (README, "Install")

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
BIN := $(VENV)/bin
NATIVE_TOOLS := scikit-build-core nanobind ninja cmake
NATIVE_FILES := native/pyproject.toml native/CMakeLists.txt $(wildcard native/src/* native/offramp_native/*.py)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help demo test test-browser lint native native-asan clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 16

demo: $(VENV)/.demo $(VENV)/.native  ## make .venv, install, fine-tune a small model, attach exits and show what they save
	$(BIN)/offramp demo

test: lint $(VENV)/.native  ## make .venv, install, check style and types, run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest  # tiny models: more threads only wait for each other

test-browser: $(VENV)/.test  ## open the report and the explain page in Chromium (Debian's package chromium)
	@$(PIP) install --constraint constraints.txt 'playwright>=1.40'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests_browser

lint: $(VENV)/.test  ## style (ruff) and types (mypy) only
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

native: $(VENV)/.torch  ## build the C++ engine (needs a C++17 compiler); demo and test do it by themselves
	@$(PIP) install --constraint constraints.txt $(NATIVE_TOOLS)
	@$(PIP) install --no-build-isolation --no-deps --force-reinstall ./native
	@touch $(VENV)/.native

native-asan: $(VENV)/.test  ## run the C++ engine's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(PIP) install --constraint constraints.txt $(NATIVE_TOOLS)
	@$(PIP) install --no-build-isolation --no-deps --upgrade --target build/native-asan \
		--config-settings=build-dir=build/native-asan-objects --config-settings=cmake.define.OFFRAMP_SANITIZE=ON ./native
	OMP_NUM_THREADS=1 PYTHONPATH=build/native-asan ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest tests/engines/test_native.py tests/engines/test_native_safety.py tests/engines/test_native_weights.py

clean:  ## remove the environment, caches and build leftovers; runs/ stays
	rm -rf $(VENV) build dist native/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: it is the big one, and a build chosen here is kept by what follows.
$(VENV)/.torch: constraints.txt
	@echo "installing $(TORCH) into $(VENV) (once; some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install $(TORCH_FLAGS) --constraint constraints.txt '$(TORCH)'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing offramp with what the demo needs"
	@$(PIP) install --constraint constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing offramp with what the tests need"
	@$(PIP) install --constraint constraints.txt --editable '.[dev,demo,data,bench,openvino,ray,serve,translation]'
	@touch $@ $(VENV)/.demo

# The C++ engine is optional: without a compiler set-up goes on, and "auto" means the next engine.
$(VENV)/.native: $(VENV)/.torch $(NATIVE_FILES)
	@echo "building the C++ engine"
	@$(MAKE) --no-print-directory native > $(VENV)/native.log 2>&1 || \
		echo "skipped: the C++ engine was not built (see $(VENV)/native.log); install g++ and run \`make native\` to get it"
	@touch $@
