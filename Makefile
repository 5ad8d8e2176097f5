# `make quickstart` trains a small model on real news and prints its report; `make test` runs every check,
# `make test-fast` those that are quick.
# Both set up .venv first if need be, what only the tests need with them alone. PYTHON names the interpreter to make it with (>= 3.11).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  := $(VENV)/.ready-for-tests

.PHONY: quickstart test test-fast lint setup clean

quickstart: $(READY)
	$(BIN)/python scripts/prepare.py data/sample.yaml
	$(BIN)/python train.py configs/quickstart.yaml

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

# A worker more than there are cores, since many tests wait for programs that they start; each computes on one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(($$($(BIN)/python -c 'import os; print(os.cpu_count())') + 1)) --dist worksteal

test: $(TESTS) lint
	$(PYTEST)

test-fast: $(TESTS) lint
	$(PYTEST) -m "not slow"

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(TESTS)

$(READY): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python >= 3.11 is needed, this is " + sys.version.split()[0] + "\n  fix: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(TESTS): $(READY)
	$(INSTALL) '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info
