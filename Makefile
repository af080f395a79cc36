# Every target sets itself up: .venv is made once, from pyproject.toml with the exact versions of constraints.txt.
PYTHON ?= python3
PY = .venv/bin/python

.PHONY: setup study replication benchmarks test test-fast test-all torture lint docs ui clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lit_dps needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[docs,test,postgres]'
	@# pip compiles on one core, this on all; some packages ship files that no Python compiles
	@$(PY) -m compileall -q -j 0 -x /tests/ .venv >/dev/null || true
	@touch $@

study: setup
	$(PY) cli.py study --config configs/quickstart.yaml

replication: setup
	$(PY) cli.py replicate

benchmarks: setup
	$(PY) -m benchmarks

test: setup lint
	$(PY) -m pytest --numprocesses auto --dist worksteal --durations 15

test-fast: setup
	$(PY) -m pytest --numprocesses auto --dist worksteal -m "not slow and not long"

# the long forms too: full products, real data sets at length, fuzzing with 300 examples, 100 kills; more than an hour
test-all: setup lint
	LIT_DPS_FUZZ=300 $(PY) -m pytest --numprocesses auto --dist worksteal --durations 15 -m "long or not long"
	$(MAKE) torture

# kills processes of small studies 100 times on each storage, then tries other faults; make torture ARGS='--report docs/reliability.md';
# ARGS=--changing kills a study whose batch sizes and masks change, with a reading
torture: setup
	$(PY) -m tests.torture --kills 100 --storage sqlite,postgres --faults 3 $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m basedpyright --pythonpath $(PY) --level error

# the pages as a site, build/docs/index.html, and the two of them that are made from docstrings
docs: setup
	$(PY) docs/reference.py
	$(PY) -m sphinx --fail-on-warning --quiet -c docs . build/docs

ui: setup
	$(PY) cli.py ui

clean:
	rm -rf .venv
