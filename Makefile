# Development tasks. Users of the library need none of this: `pip install moonep`.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu lint format

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## create .venv with MoonEP (editable) and the development tools; PYTHON=python3.12 picks another Python

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("MoonEP needs Python 3.11 or newer, for example: make venv PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing MoonEP and the development tools into $(VENV) (a minute or more)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS)) -e '.[dev]'
	@touch $@

demo: venv  ## train a small MoE on a few CPU ranks and show the balance
	$(BIN)/python -m moonep demo

test: venv  ## run the whole test suite on CPU
	$(BIN)/python -m pytest

test-gpu:  ## run the contract on this machine's GPUs, with the python3 that is here
	PYTHONPATH=. python3 -m pytest -m gpu

lint: venv  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv  ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
