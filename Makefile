# make pretrain: set up, then pre-train on the rendered shapes and fine-tune on few labels. make test: the tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: pretrain test test-oldest test-slow lint docs benchmark

pretrain: .venv/ready
	$(BIN)/python tools/pretrain.py objective=masked_patch
	$(BIN)/python tools/finetune.py

# A process for each core, each with one thread: most of the time goes into starting tools.
test: .venv/dev .venv/kernels
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile

# The same with the oldest supported versions of what ssvit depends on.
test-oldest: .venv-oldest/dev
	.venv-oldest/bin/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile

test-slow: .venv/dev .venv/kernels
	$(BIN)/python -m pytest -m slow

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

benchmark: .venv/ready .venv/kernels
	$(BIN)/ssvit benchmark

# What running needs.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# Layers in C++ for this CPU; without a compiler, those of torch are used.
.venv/kernels: .venv/ready $(wildcard ssvit/kernels/csrc/*)
	-$(BIN)/ssvit build-kernels
	touch $@

# What tests and the linter need besides.
.venv/dev: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv-oldest/dev: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	-.venv-oldest/bin/ssvit build-kernels
	touch $@

# What the pages need besides.
.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
