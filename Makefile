# Everything runs in .venv, made from the locked requirements.txt; nothing needs activating.

PYTHON ?= $(if $(shell python3.11 -V 2>/dev/null),python3.11,python3)
BIN := .venv/bin
STAMP := .venv/.installed
PIP_INSTALL := -m pip install --disable-pip-version-check -q

.PHONY: help install test test-slow test-network test-extras torture lint format reproduce bench numbers lock clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make .venv from the lock, with cotrain in editable form

# The stamp is removed first and made last, so an interrupted install never counts as one;
# a .venv without a stamp is made anew, one with an outdated stamp is brought up to date.
$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "cotrain needs Python 3.11 or newer; found $$($(PYTHON) -V 2>/dev/null || echo none). Try: make install PYTHON=/path/to/python" >&2; exit 1; }
	@rm -f $@
	$(PYTHON) -m venv $(if $(wildcard $@),,--clear) .venv
	$(BIN)/python $(PIP_INSTALL) --require-hashes -r requirements.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

test: install ## run the tests that are quick and need no network, on all cores
	$(BIN)/pytest -n auto --dist loadfile

test-slow: install ## run the tests that train for minutes, on real data
	$(BIN)/pytest -m slow

test-network: install ## run the tests that fetch data from outside
	$(BIN)/pytest -m "network and not slow"

test-extras: install ## run the tests of what is used with PyTorch, Hugging Face and ONNX, which it installs
	$(BIN)/python $(PIP_INSTALL) -e '.[onnx]' torch==2.13.0 datasets
	$(BIN)/pytest tests/test_export.py tests/data/test_sources.py

torture: install ## kill runs, damage files, fill disks: see that nothing is lost or goes unnoticed
	cd tests && ../$(BIN)/python -m torture

lint: install ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright

format: install ## format the code and apply the safe fixes
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

reproduce: install ## the paper's table, figures and page, with a tenth of the examples and one seed
	$(BIN)/cotrain reproduce

bench: install ## measure the speed beside PyTorch and Avalanche, which it installs
	$(BIN)/python $(PIP_INSTALL) -e '.[bench]'
	$(BIN)/cotrain bench

numbers: install ## record what runs give, after a change that is meant to alter it
	cd tests && ../$(BIN)/python test_numerics.py

# The lock is made from the public index alone, whatever the local pip configuration says.
lock: ## re-generate requirements.txt, in a throw-away environment
	@set -e; venv=$$(mktemp -d); trap 'rm -rf "$$venv"' EXIT; trap 'exit 1' INT TERM; \
	export PIP_CONFIG_FILE=/dev/null; unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL; \
	$(PYTHON) -m venv "$$venv"; \
	"$$venv/bin/python" $(PIP_INSTALL) pip-tools; \
	"$$venv/bin/pip-compile" -q --upgrade --extra dev --build-deps-for editable --generate-hashes \
	  --allow-unsafe --strip-extras --no-header --no-emit-index-url --no-emit-find-links \
	  --no-emit-trusted-host --no-emit-options -o requirements.txt pyproject.toml

clean: ## remove .venv, caches and build products
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
