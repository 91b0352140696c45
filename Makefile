# The four commands of a newcomer. Each makes what it needs first; a second call starts at once.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
RANKS ?= 2
PORT ?= 8000

.PHONY: serve test check bench format clean
.DEFAULT_GOAL := serve

$(VENV)/.runtime: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "moeserve needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install -e '.[dev]'
	@touch $@

serve: $(VENV)/.runtime  ## serve the demo model on two ranks at http://127.0.0.1:8000
	exec $(BIN)/moeserve serve demo -tp $(RANKS) --port $(PORT)

test: $(VENV)/.dev  ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: $(VENV)/.dev  ## style, types, import directions, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/size_report.py

bench: $(VENV)/.dev  ## moeserve beside transformers on a small model, in a minute
	$(BIN)/python -m benchmarks.peers --quick

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
