# make serve   environment, default model, server on 127.0.0.1:8000
# make test    environment, tests
# ARGS passes arguments on: make serve ARGS="+preset=batch server.port=9000"

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help serve test lint types check clean

help:
	@sed -n 's/^# //p' Makefile

serve: $(VENV)/installed
	@exec $(BIN)/servekit serve $(ARGS)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) build

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); servekit needs 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing servekit into $(VENV) (torch is the large part)"
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing servekit and its test tools into $(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/installed
