# Development tasks. Users of the library need none of this: `pip install moonep`.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
PYTEST ?=
SANITIZER ?= compute-sanitizer
SANITIZER_TOOLS ?= memcheck racecheck
SANITIZER_LIMIT_S ?= 540
SANITIZED := CUDA_VISIBLE_DEVICES=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=.:tests
CASES ?= --ranks 2 one-token odd-sizes
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

CONTRACT := tests/test_contract.py
GPU_PARTS := contract-R2 contract-R4 contract-R8 contract-rest layers kernels
LAYER_TESTS := tests/test_gpu.py tests/test_compile.py
TEST_GPU = PYTHONPATH=. $(PYTHON) -m pytest $(PYTEST) -m

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu test-gpu-parts $(GPU_PARTS:%=test-gpu-%) sanitize-gpu lint format

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

test-gpu:  ## run the contract on this machine's GPUs, with the Python that is here; PYTEST='-k ...' adds options
	$(TEST_GPU) gpu

test-gpu-parts: $(GPU_PARTS:%=test-gpu-%)  ## the same in six parts: -j6 runs them at the same time, -k goes on after one that fails
	$(TEST_GPU) "gpu and alone"

$(filter test-gpu-contract-R%,$(GPU_PARTS:%=test-gpu-%)): test-gpu-contract-%:  # with R2, R4 or R8 ranks
	$(TEST_GPU) gpu $(CONTRACT) -k "cuda and $*"

test-gpu-contract-rest:
	$(TEST_GPU) gpu $(CONTRACT) -k "not (cuda and (R2 or R4 or R8))"

test-gpu-layers:
	$(TEST_GPU) "gpu and not alone" $(LAYER_TESTS)

test-gpu-kernels:
	$(TEST_GPU) "gpu and not alone" $(addprefix --ignore=,$(CONTRACT) $(LAYER_TESTS))

sanitize-gpu:  ## run small cases, several ranks on one GPU, under compute-sanitizer
	$(SANITIZED) timeout -k 10 $(SANITIZER_LIMIT_S) $(PYTHON) tests/sanitize.py $(CASES)  # fills Triton's cache
	for tool in $(SANITIZER_TOOLS); do \
		$(SANITIZED) timeout -k 10 $(SANITIZER_LIMIT_S) \
			$(SANITIZER) --tool $$tool --target-processes all --report-api-errors no --error-exitcode 9 \
			$(PYTHON) tests/sanitize.py $(CASES) || exit 1; \
	done

lint: venv  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv  ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
