# The fast loop: `make` checks the code, `make test ROOM=export` runs the tests of one folder.
PYTHON ?= .venv/bin/python
ROOM ?= engine
WORKERS ?= auto

.PHONY: check map options setup test tests

check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

setup:
	python3 -m venv .venv
	$(PYTHON) -m pip install -q -e '.[test]'

test:
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow and not long and not hypothesis' tests/$(ROOM)

tests:
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal

options:
	$(PYTHON) -m batch_trajectories.cli.option_docs > docs/options.md

# Folders, longest files, most used modules: to look at, not to obey.
map:
	$(PYTHON) -m tests.helpers.house_map
