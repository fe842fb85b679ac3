# `make demo` and `make test` are all that a newcomer needs; both make .venv first and do nothing twice.
PYTHON ?= python3
VENV ?= .venv
TORCH ?=
EXTRAS ?= dev,transformers
PYTEST_ARGS ?=
BIN := $(VENV)/bin
BOOTSTRAP := $(PYTHON) scripts/bootstrap.py --venv $(VENV) --torch "$(TORCH)"
# One thread a process: the tests run side by side.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: help demo test install lint types format verify wheel clean

help:
	@echo "make demo     install into $(VENV) and run the main job on real text"
	@echo "make test     install into $(VENV) and run the tests (PYTEST_ARGS=... is passed on)"
	@echo "make lint     ruff; make types: mypy; make verify: accuracy of every runnable backend"
	@echo "make wheel    build dist/*.whl; make clean: remove what the above made"
	@echo "variables     PYTHON=python3.12 (interpreter), TORCH='torch==2.14.1' (another torch), VENV=path"

demo:
	@$(BOOTSTRAP) --extras transformers
	@$(BIN)/rapidkda demo

install:
	@$(BOOTSTRAP) --extras "$(EXTRAS)"

test: install
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto --maxprocesses 8 $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

verify: install
	$(BIN)/rapidkda verify

wheel: install
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
