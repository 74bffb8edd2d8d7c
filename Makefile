# Two commands: `make demo` and `make test`. Each makes .venv by itself and installs only when something changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test format clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/subquad demo

test: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --maxprocesses 8

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("subquad needs Python 3.11 or newer: make PYTHON=python3.12")'
	@test -x $(BIN)/pip || { rm -rf .venv && $(PYTHON) -m venv .venv; }
	@echo "installing into .venv (a few minutes the first time)"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $(STAMP)
