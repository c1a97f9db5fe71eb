# The fast loop: `make` checks the code, `make test ROOM=export` runs the tests of one folder.
PYTHON ?= .venv/bin/python
ROOM ?= engine
WORKERS ?= auto

.PHONY: check docs map options setup test tests

check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m tests.helpers.prose

setup:
	python3 -m venv .venv
	$(PYTHON) -m pip install -q -e '.[test]'

test:
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow and not long and not hypothesis' tests/$(ROOM)

tests:
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal

# The site of docs/ in build/site; needs `pip install -e '.[docs]'`.
docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

options:
	$(PYTHON) -m batch_trajectories.cli.option_docs > docs/options.md
	$(PYTHON) -m batch_trajectories.cli.reference_docs

# Folders, longest files, most used modules: to look at, not to obey.
map:
	$(PYTHON) -m tests.helpers.house_map
