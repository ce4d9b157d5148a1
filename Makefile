# Two commands do everything from a fresh checkout: `make demo` and `make test`.
# PYTHON=... picks the interpreter, ARGS=... adds arguments to demo, bench, real, test and quick.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

# The first interpreter that is new enough; overridden by PYTHON=... and not looked for once the environment exists.
find_python = for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$python"; exit; fi; \
	done; echo 'narwhal-trio needs Python 3.11 or later (set PYTHON=...)' >&2; exit 1

.PHONY: help
help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

.PHONY: install
install: $(STAMP)  ## make .venv with the router and what its tests need

# Some systems have a venv module that can't install pip; the system's own pip then does it from outside.
$(STAMP): pyproject.toml Makefile
	if [ ! -x $(BIN)/python ]; then \
	  python=$$($(find_python)); \
	  "$$python" -m venv $(VENV) || { "$$python" -m venv --clear --without-pip $(VENV) && "$$python" -m pip --python $(BIN)/python install pip; }; \
	fi
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

.PHONY: lint
lint: $(STAMP)  ## style, layers and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

.PHONY: test
test: lint  ## everything that CI runs
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

.PHONY: quick
quick: $(STAMP)  ## the tests without the long sweeps
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow' $(ARGS)

.PHONY: demo
demo: $(STAMP)  ## simulated engines and the router in one process, until Ctrl-C
	@exec $(BIN)/narwhal-trio demo $(ARGS)

.PHONY: real
real: $(STAMP)  ## the router in front of real engines on this machine's CPU
	bash tests/real/run.sh $(ARGS)

.PHONY: bench
bench: $(STAMP)  ## what each hot path costs
	for bench in bench/bench_*.py; do echo "== $$bench"; $(BIN)/python "$$bench" $(ARGS); done

.PHONY: clean
clean:  ## remove the environment and caches; journals and real engines stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.real/*' -prune -exec rm -rf {} +
