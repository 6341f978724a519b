# `make demo` and `make test` set up .venv by themselves; nothing else needs to be installed but Python, a C++ compiler and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV36 := .venv-triton36

# Kernels built from a working copy go into its own cache; it is safe to delete.
export ATTNGEN_CACHE_DIR ?= $(CURDIR)/cache

.PHONY: help demo test test-triton36 check format wheel clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo            run a real encoder on compiled attention, then a custom variant'
	@echo 'make test            run the tests'
	@echo 'make test-triton36   compile the Triton kernels under the oldest supported triton'
	@echo 'make check           ruff, mypy, import-linter'
	@echo 'make format          let ruff rewrite the sources'
	@echo 'make wheel           build dist/*.whl'
	@echo 'make clean           remove everything that make and the tests have made'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	chmod go-w cache # kernels are loaded only from a folder that nobody else may write to
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m attngen demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Holds triton 3.6.0 alone and borrows the rest from .venv: its own packages are found first.
$(VENV36)/.ready: $(VENV)/.ready
	$(PYTHON) -m venv $(VENV36)
	$(VENV36)/bin/python -m pip install --no-deps triton==3.6.0
	shared=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	own=$$($(VENV36)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$shared')" > "$$own/shared.pth"
	touch $@

test-triton36: $(VENV36)/.ready
	$(VENV36)/bin/python -m pytest -n auto -m triton_compile

wheel: $(VENV)/.ready
	$(BIN)/python -m pip wheel --no-deps -w dist .

clean:
	rm -rf $(VENV) $(VENV36) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find cache -mindepth 1 -maxdepth 1 ! -name README.md ! -name .gitignore -exec rm -rf {} +
