# Two commands do everything on a fresh machine with Python 3.11 and make:
#   make quickstart   set up .venv and see GRPO learn on this computer's CPU, in minutes
#   make test         set up .venv and run all checks

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
export HF_HUB_OFFLINE ?= 1

.PHONY: quickstart test lint types slow clean

quickstart: .venv/.installed
	$(BIN)/explorl quickstart

test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile \
		--cov=explorl.tasks --cov=explorl.metrics --cov=explorl.strategies --cov-fail-under=95 --cov-report=term:skip-covered

lint: .venv/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test-installed
	$(BIN)/mypy

slow: .venv/.test-installed
	$(BIN)/python -m pytest -m slow --timeout=3600

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/.test-installed: .venv/.installed
	$(PIP) --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
