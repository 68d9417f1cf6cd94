# make demo      train CartPole in an environment of its own (.venv)
# make test      run the tests of the core and of torch
# make test-all  run every test, the slow and those of JAX, Keras and TensorFlow too
# make chaos     kill, stop and cut, FAULTS=500 times, and check after each; SEED=0 draws the same again
# make fuzz      send a million broken frames to servers at work; ARGS="--frames 20000 --seed 7"
# make soak      traffic of every kind for MINUTES=10; no process may have more at its end
# make questions run the programs that answer the questions of docs/between-graph.md
# make docs      build the documentation into build/docs; a broken link is an error
# make bench     measure, each figure beside its limit; ARGS="call small --quick" chooses
# make bench-peers  the same beside Ray, TensorFlow, ...; ARGS="--peers ray --works call queue"
# make bench-main-job  collect and train beside other libraries, each in an environment of its own
# make check     format, lint, types, architecture, tests: what CI checks
#
# PYTHON=python3.12 chooses the interpreter; ARGS="-k queue" goes to pytest or to the demo.

PYTHON ?= python3
ARGS ?=
FAULTS ?= 500
MINUTES ?= 10
SEED ?= 0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Workers are fresh interpreters: without bytecode, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo questions test test-heavy test-all chaos fuzz soak docs bench bench-peers bench-main-job check static format-check lint types architecture format clean
.NOTPARALLEL:

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/demo.stamp
	@$(BIN)/paceline demo $(ARGS)

questions: $(VENV)/test.stamp
	@$(BIN)/python examples/between_graph $(ARGS)

bench: $(VENV)/demo.stamp
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-peers: $(VENV)/demo.stamp
	@$(BIN)/python benchmarks/beside_peers.py $(ARGS)
	@$(BIN)/python benchmarks/beside_peers.py --report

bench-main-job: $(VENV)/demo.stamp
	@$(BIN)/python benchmarks/main_job.py $(ARGS)

# A process per core, each with tests of its own; ARGS="-n 0" runs them one after the other.
test: $(VENV)/test.stamp
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not slow" $(ARGS)

test-heavy: $(VENV)/heavy.stamp
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m slow $(ARGS)
	@$(BIN)/python -m pytest tests/heavy $(ARGS)

test-all: test test-heavy

chaos: $(VENV)/test.stamp
	@$(BIN)/python tests/campaign.py $(FAULTS) $(SEED)

fuzz: $(VENV)/test.stamp
	@PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

soak: $(VENV)/test.stamp
	@$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) $(ARGS)

docs: $(VENV)/docs.stamp
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "open build/docs/index.html"

check: static test

static: format-check lint types architecture

format-check: $(VENV)/dev.stamp
	@$(BIN)/ruff format --check .

lint: $(VENV)/dev.stamp
	@$(BIN)/ruff check .

types: $(VENV)/dev.stamp
	@$(BIN)/mypy

architecture: $(VENV)/test.stamp
	@$(BIN)/python -m pytest --quiet tests/test_architecture.py

format: $(VENV)/dev.stamp
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -prune -exec rm -rf {} +

# One stamp for each set of extras; installing again is left out until the metadata change.
$(VENV)/%.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	@echo "installing paceline[$*] into $(VENV), once"
	@$(PIP) --editable '.[$*]'
	@touch $@

$(VENV)/made.stamp:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "paceline needs Python 3.11 or newer; '$(PYTHON)' was not found." \
	    "Name yours: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "paceline needs Python 3.11 or newer; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1). Name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

.PRECIOUS: $(VENV)/%.stamp
