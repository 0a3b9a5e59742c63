# make pretrain: set up, then pre-train on the embedded data. make test: set up, then run the tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: pretrain test test-slow lint benchmark

pretrain: .venv/ready
	$(BIN)/python tools/pretrain.py objective=masked_patch

test: .venv/ready
	$(BIN)/python -m pytest

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

benchmark: .venv/ready
	$(BIN)/python tools/benchmark.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
