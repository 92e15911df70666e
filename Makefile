# make demo    builds the environment and runs the demo; options: make demo ARGS="..."
# make test    builds the environment, then all checks and tests
# make check   the fast loop: lint, format, types, unit tests
# make matrix  checks the hook in every vLLM release that it is for, and records what it finds
# make test-0.19  builds an environment with vLLM 0.19.1 beside it (3 GB), and runs the tests for that version
# make soak    serves with type1 for minutes and checks that nothing grows; options: make soak ARGS="--minutes 30"
# make bench-type1   measures what type1 costs and gains, in minutes; options: make bench-type1 ARGS="--only copies"
# make bench-type2   measures what type2 costs and gains, in minutes; options: make bench-type2 ARGS="--only latency"
# make bench-pd      measures split prefill and decode against one engine, in minutes; options: make bench-pd ARGS="--only itl"
# make bench-store   measures the block store, tier by tier; options: make bench-store ARGS="--only l1 disk"
# make bench-start   measures what kvplug adds to the start of a worker; options: make bench-start ARGS="--runs 30"
# make env     builds the environment only; options: make env ARGS="--torch-index URL"
# make clean   removes what was built, but for the environment; make distclean removes that, too

PYTHON ?= python3
BIN := .venv/bin
# Tests of one file share engines, so they stay in one process. Each engine uses one core, and a few GiB.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-0.19 soak bench-type1 bench-type2 bench-pd bench-store bench-start check matrix env env-0.19 lint built clean distclean

help:
	@grep '^# make' Makefile | cut -c 3-

demo: built
	@$(BIN)/python scripts/demo.py $(ARGS)

test: lint
	$(PYTEST) $(ARGS)

# Only this run collects tests/v019: see tests/conftest.py.
test-0.19: env-0.19
	.venv-0.19/bin/python -m pytest tests/v019 $(ARGS)

check: lint
	$(PYTEST) -m "not engine and not install and not server" $(ARGS)

matrix: built
	$(BIN)/python scripts/matrix.py $(ARGS)

soak: built
	@cd tests && ../$(BIN)/python -m support.soak $(ARGS)

bench-type1: built
	@$(BIN)/python -m benchmarks.type1 $(ARGS)

bench-type2: built
	@$(BIN)/python -m benchmarks.type2 $(ARGS)

bench-pd: built
	@$(BIN)/python -m benchmarks.pd $(ARGS)

bench-store: built
	@$(BIN)/python -m benchmarks.store $(ARGS)

bench-start: built
	@$(BIN)/python -m benchmarks.start $(ARGS)

# ARGS are those of the target that was asked for, so only `make env` passes them to the set-up.
env:
	@$(PYTHON) scripts/setup_env.py $(ARGS)

env-0.19:
	@$(PYTHON) scripts/setup_env.py --vllm 0.19.1

built:
	@$(PYTHON) scripts/setup_env.py

lint: built
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
	find core hooks plugins tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-0.19
