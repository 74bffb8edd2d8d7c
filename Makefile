# Two commands: `make demo` and `make test`; between edits, `make quick`. Each makes .venv by itself and installs only when something changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Tests start many processes, so each gets one thread, and Python's compiled files are cached even if the environment disables that.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest

.PHONY: demo test quick format clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/subquad demo

test: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(PYTEST) -q -n logical --maxprocesses 8 --dist worksteal

# Tests to run between edits, under a minute on two idle cores. It skips tests that compile, start processes or servers, train for
# seconds, draw pictures or import transformers, and the laws for all but the first set of options of a mechanism.
QUICK := not (compile or export or own_process or distributed or torchrun or kill or pool or importing \
  or planted or draws or test_7 or rotary or learns or short_run or ships or generation or contours or pathfinder \
  or compare or demo or arena or scaling or test_run or configure or atlas or report or guides or test_cli or pooch \
  or fcntl or unix or registering or locked or freed or damage or processes or expressions or many_features \
  or test_split or linear_split or test_ranks or test_sequence or test_http or test_page or needs_nothing_of_ours \
  or sets_of or draft_model or several_prompts or broken_file or without_cache or the_one_without \
  or as_it_would_have or memory_is_linear or the_wheel or l-1 or l-2 or l-3 or l-4 or l-5)

quick: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(PYTEST) -q -n logical --maxprocesses 8 --dist worksteal -m 'not slow' --ignore tests/hf -k "$(QUICK)"

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
