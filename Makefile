# Every target does its own set-up in .venv; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test check bench bench-noise test-gpu clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP) ## Create .venv and install zeroblock with pinned versions

demo: install ## Fine-tune a small transformer with MeZO-BCD and watch it learn
	$(BIN)/zeroblock demo

test: install ## Run the tests (two cores: a few minutes)
	$(BIN)/python -m pytest -n 2

test-gpu: ## Run the tests that need a CUDA device (with the Python that has one)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests

check: install ## Lint, check formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: bench-noise ## Run the benchmarks; rows are appended to results/*.csv

bench-noise: install
	$(BIN)/python bench/noise.py --csv results/noise.csv

clean: ## Remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
