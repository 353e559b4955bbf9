PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv demo test test-all check-code check-behaviour clean

venv: .venv/.built

# The stamp is younger than the two files that decide what is installed.
.venv/.built: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Besides, what slow tests and benchmarks compare with.
.venv/.built-all: .venv/.built
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	touch $@

demo: venv
	$(BIN)/esper demo

# mypy uses one core, so it runs beside the tests.
test: venv
	$(MAKE) --no-print-directory -j 2 check-code check-behaviour

check-code:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-behaviour:
	$(BIN)/pytest -n 2 --dist loadfile

test-all: .venv/.built-all
	$(MAKE) test
	$(BIN)/pytest -n 2 --dist loadfile -m 'slow or gpu'

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
