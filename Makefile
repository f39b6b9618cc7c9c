# `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help demo test faults bench lint up clean

# Passed on: make demo ARGS=--exit, make test ARGS="-k cancel"
ARGS ?=

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## Run the main job on this machine and stay up; ARGS=--exit stops when it is done
	@deploy/bootstrap.sh
	@.venv/bin/prorl demo $(ARGS)

up: ## Run the whole platform on this machine, empty
	@deploy/bootstrap.sh
	@.venv/bin/prorl up

test: ## Run every test; ARGS is passed to pytest
	@deploy/bootstrap.sh test
	@deploy/test-packages.sh
	@.venv/bin/python -m pytest -n 3 --dist loadfile $(ARGS)

faults: ## Kill, freeze and cut off every part again and again; ARGS="--rounds 10 --only broker"
	@deploy/bootstrap.sh test
	@deploy/test-packages.sh
	@.venv/bin/python -m tests.acceptance.faults $(ARGS)

bench: ## Run the benchmarks; NAME=list runs one
	@deploy/bootstrap.sh test
	@deploy/test-packages.sh
	@.venv/bin/python -m benchmarks $(NAME)

lint: ## Lint, types, import rules, migrations
	@deploy/bootstrap.sh test
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@PRORL_DEBUG=1 .venv/bin/mypy
	@.venv/bin/lint-imports
	@PRORL_DEBUG=1 PRORL_DB_POOL_SIZE=0 .venv/bin/python -W ignore manage.py makemigrations --check --dry-run --skip-checks

clean: ## Remove what the other targets made, the demo's data included
	rm -rf .venv .venv-vllm var .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
