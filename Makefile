# Everything a developer or a newcomer types. Each target works on a bare machine with Python 3.11+.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

export OMP_NUM_THREADS ?= 1

.PHONY: help demo test lint types format check clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and pinned: an unpinned request may fetch a build of several gigabytes.
$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing rankstep into $(VENV) ..."
	@$(PIP) torch numpy
	@$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) -e '.[examples,tests]' ruff mypy towncrier
	@touch $@

demo: $(VENV)/.installed  ## train a small CNN on real images on 2 ranks, from nothing to the result
	$(BIN)/rankstep run --nproc-per-node 2 examples/digits.py

test: $(VENV)/.installed-dev  ## all tests
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## mypy, strict, on src
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## rewrite the tree in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test  ## all that CI asks for

clean:  ## remove what make built
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
