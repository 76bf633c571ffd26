# Two commands do everything on a fresh machine with Python 3.11 and make:
#   make quickstart   set up .venv and train on the CPU with GRPO, in minutes
#   make test         set up .venv and run all checks
# For contributors:
#   make slow         the tests that take minutes
#   make fuzz         the property tests, with new random examples
#   make oldest       the tests with the oldest versions that pyproject.toml allows; make newest: with the newest
#   make scale        tests with real vLLM, DeepSpeed and verl, each in its own virtual environment
#   make docs         the documentation as a site, in site/
#   make peer         Hugging Face's own tests of GRPOTrainer, with ours in its place

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
export HF_HUB_OFFLINE ?= 1

.PHONY: quickstart test lint types slow fuzz oldest newest scale docs peer clean

quickstart: .venv/.installed
	$(BIN)/explorl quickstart

# Coverage is measured only for packages that their own tests cover; tracing makes tests half as slow again.
MEASURED := sandbox tasks metrics strategies
test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile $(MEASURED:%=tests/%) \
		$(MEASURED:%=--cov=explorl.%) --cov-fail-under=95 --cov-report=term:skip-covered
	$(BIN)/python -m pytest -n 2 --dist loadfile $(MEASURED:%=--ignore=tests/%)

lint: .venv/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test-installed
	$(BIN)/mypy

slow: .venv/.test-installed .venv/.docs-installed
	$(BIN)/python -m pytest -m slow --timeout=3600

# When a failure is fixed, keep its input as an @example of the test.
fuzz: .venv/.test-installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'hypothesis and not slow' --hypothesis-profile=default

# Other versions, each in its own virtual environment; torch comes from PyPI, 3 GB with its libraries.
oldest newest: %: .venv-%/.installed
	.venv-$@/bin/python -m pytest -n 2 --dist loadfile

.venv-oldest/.installed: CONSTRAINED := --constraint constraints-oldest.txt
.venv-oldest/.installed .venv-newest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade $(CONSTRAINED) --editable '.[test]'
	touch $@

# Tests with vLLM, DeepSpeed and verl, each in its own virtual environment, since their versions exclude each other.
scale: scale-installed scale-vllm scale-sharded scale-verl
-include scale/*.mk

# The documentation site, in site/: open site/index.html. Dead links and pages outside the navigation are errors.
docs: .venv/.docs-installed
	$(BIN)/python -m tools.docs.reference --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Hugging Face's own tests of GRPOTrainer with our trainer in its place: PEER is the command that runs them, and the
# results of TRL's trainer are beside it. TESTS=FILTER selects tests like pytest's -k.
PEER ?= ../shared/peer/trl_grpo_tests
peer: .venv/.peer-installed
	@test -x '$(PEER)' || { echo 'make peer: there is no command $(PEER); set PEER to one that runs TRL'"'"'s tests'; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)/.venv/peer" $(PEER) \
		--stock $(dir $(PEER))stock.json --timeout 300 $(if $(TESTS),-k '$(TESTS)')

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/.test-installed: .venv/.installed
	$(PIP) --editable '.[test]'
	touch $@

.venv/.docs-installed: .venv/.installed
	$(PIP) --editable '.[docs]'
	touch $@

# torchvision apart and without its dependencies: image processors are all that the tests need of it, and its wheel is
# built for another torch.
.venv/.peer-installed: .venv/.test-installed
	$(PIP) jmespath parameterized
	$(PIP) --no-deps --target .venv/peer --upgrade torchvision
	touch $@

clean:
	rm -rf .venv .venv-* build dist site .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
