# make demo        a virtual environment, the package, and a real model's first answer
# make test        a virtual environment, the package, and the whole check
# make check-fast  the whole check less the slow parts: no model, no wheel
# make lint        ruff, mypy and the import rules alone
# make soak        100,000 requests of every outcome, 10,000 to a model, a million hostile frames, ten idle minutes; about half an hour
# make clean       removes what these made
#
# PYTHON       which Python 3.11 or newer makes the environment      (python3)
# VENV         where it is                                           (.venv)
# TORCH_INDEX  an index of torch builds; set it on a machine without a GPU:
#              make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile --constraint constraints.txt
# Where pip compiles one module after the other, this uses all cores. Some modules are for other versions of Python.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
SOURCES := pyproject.toml setup.py constraints.txt
LINKED := PYTHONPATH=.typing

# Most tests wait for processes rather than compute, so that more of them than cores may run at once; those of a file or class share its fixtures.
# The order is that of tests/conftest.py: what takes minutes begins first.
PARALLEL ?= -n 4 --dist loadscope --no-loadscope-reorder

# torch's threads spin for each other; on few cores, shared with processes under test, long spins keep those from running.
export GOMP_SPINCOUNT ?= 10000
# Tests run beside each other, and need no threads for what they themselves compute; an engine sets how many it has.
test check-fast: export OMP_NUM_THREADS ?= 1
# Thousands of short processes import the package, and each would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check-fast checked collect lint typing soak clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/tllm demo

test: checked
	$(BIN)/python -m pytest $(PARALLEL)

check-fast: checked
	$(BIN)/python -m pytest $(PARALLEL) -m "not model" --ignore=tests/packaging

checked: $(VENV)/.test
	@$(MAKE) --no-print-directory --jobs 2 lint collect

# While mypy keeps one core busy: what each of pytest's processes would compile. What is wrong with it they tell.
collect: $(VENV)/.test
	$(BIN)/python -m pytest --collect-only -qq > /dev/null || true

lint: $(VENV)/.test typing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/module_list.py --check
	$(BIN)/python tools/capabilities.py --check
	$(BIN)/mypy
	for source in examples/*/src; do MYPYPATH=$$source $(BIN)/mypy $$source || exit 1; done
	$(LINKED) $(BIN)/lint-imports

# The folders under their import names, as type checkers and import-linter need them.
typing: $(VENV)/.test
	$(BIN)/python tools/typing_root.py

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit("tllm-core needs Python 3.11 or newer; set PYTHON" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and alone where an index for it is given, so that nothing else is taken from there.
$(VENV)/.torch: $(VENV)/.venv constraints.txt
	$(if $(TORCH_INDEX),$(INSTALL) --extra-index-url $(TORCH_INDEX) torch)
	touch $@

$(VENV)/.demo: $(VENV)/.torch $(SOURCES)
	@echo "installing into $(VENV); the first time takes a few minutes"
	$(INSTALL) --editable ".[engine,uvloop]"
	$(COMPILE)
	touch $@

$(VENV)/.test: $(VENV)/.torch $(SOURCES)
	@echo "installing into $(VENV); the first time takes a few minutes"
	$(INSTALL) --editable ".[test]"
	$(COMPILE)
	touch $@

soak: $(VENV)/.test
	TLLM_SOAK_REQUESTS=100000 TLLM_SOAK_ENGINE_REQUESTS=10000 TLLM_SOAK_IDLE_S=600 TLLM_FUZZ_FRAMES=1000000 TLLM_EQUALITY_TOKENS=64 $(BIN)/python -m pytest tests/soak tests/faults/test_fuzz.py tests/tp/test_tp_equality.py -s --timeout 3600 -o faulthandler_timeout=3500
	$(BIN)/python -m tests.simulation --seed 10000000 --schedules 50000 --processes 2

clean:
	rm -rf $(VENV) .typing build dist tllm_core.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find core transports engines plugins tests tools examples -name __pycache__ -prune -exec rm -rf {} +
