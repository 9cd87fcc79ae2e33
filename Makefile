# `make` alone says what there is. The work is in build.py; this file has no logic.
.DEFAULT_GOAL := help
.PHONY: architecture words help setup engine image plan run doctor check test test-all test-gpu coverage chaos chaos-training lint lock bench clean

recipe ?= hello
task ?=
PYTHON := .venv/bin/python
python ?= python3

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo "  recipes:        $(notdir $(patsubst %/,%,$(wildcard recipes/*/)))"

setup: ## the virtual environment with the locked dependencies
	@sh ekiben/bootstrap.sh

engine: setup ## what builds: an engine is installed when none is usable
	@sh ekiben/bootstrap.sh --engine

image: engine ## build, verify and say how to run: make image recipe=lora-opencalm
	@$(PYTHON) build.py build $(recipe) $(options)

plan: setup ## what would be built, and why: make plan recipe=lora-opencalm
	@$(PYTHON) build.py plan $(recipe) $(options)

run: setup ## run a task: make run recipe=lora-opencalm task="train --smoke"
	@$(PYTHON) build.py run $(recipe) $(task)

doctor: setup ## will it run, and why: make doctor recipe=lora-opencalm options="--site abci-3.0"
	@$(PYTHON) build.py doctor $(recipe) $(options)

check: lint ## lint and unit tests, for a change at hand
	@$(PYTHON) -m pytest --numprocesses auto --dist loadfile tests/unit $(options)

test: ## what a change must pass; sets itself up. Without root: the unit tests
	@bash tests/run.sh change $(options)

test-all: ## every test that needs no GPU, with the real programs
	@bash tests/run.sh all $(options)

coverage: ## branch coverage of the unit tests, with the processes that they start
	@sh ekiben/bootstrap.sh --dev
	@rm -rf .coverage-data
	@$(PYTHON) -m coverage run -m pytest --numprocesses auto --dist loadfile tests/unit $(options)
	@$(PYTHON) -m coverage combine --quiet && $(PYTHON) -m coverage report

test-gpu: ## on a machine with an NVIDIA GPU and Apptainer
	@$(PYTHON) -m pytest -m gpu qa/gpu $(options)

chaos: ## kills, races, network faults, damage and fuzzing, counted: options="--minutes 30 --seed 1"
	@sh ekiben/bootstrap.sh --dev
	@PYTHONPATH=.:tests:qa $(PYTHON) -m chaos $(options)

chaos-training: ## faults in the parallel tasks, counted; python: one that has the tasks' packages: options="--minutes 10 --seed 1"
	@PYTHONPATH=.:tests:qa $(python) -m chaos.training $(options)

lint: ## ruff and mypy
	@sh ekiben/bootstrap.sh --dev
	@$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check . && $(PYTHON) -m mypy \
	    && $(PYTHON) -m mypy tests/integration/conftest.py

architecture: setup ## floors, circles and sizes of the code, from its imports
	@$(PYTHON) tests/support/architecture.py

words: setup ## words that stand for a term of the field, counted
	@$(PYTHON) tests/support/words.py $(options)

lock: setup ## refresh the lock files: the stacks' and our own
	@$(PYTHON) build.py lock
	@for name in requirements requirements-dev; do \
	    .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	        --no-emit-index-url --no-header --upgrade $$name.in -o $$name.lock; done

bench: ## the measured comparisons with peers; see bench/README.md
	@sh ekiben/bootstrap.sh --dev
	@$(PYTHON) bench/run.py $(options)

clean: ## remove the virtual environment; the store is build.py prune's
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
