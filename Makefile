# Needs only make and a Python >= 3.11; name another interpreter with PYTHON=.
PYTHON ?= python3
KAFKA_PORT ?= 9092
PYTEST_ARGS ?=
CHAOS_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Two marks of what .venv holds: the package alone (all a demo needs), or the development tools as well.
LIGHT := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
AUDIT := $(VENV)/.installed-audit

.DEFAULT_GOAL := help
.PHONY: help demo test chaos bench check format kafka schemas metrics audit sbom clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(LIGHT) ## run the demo: no Kafka, no server, one SQLite file
	$(BIN)/freezepoint demo

# A worker per core, up to four, since each has a broker of its own; a file's tests stay together, and share what is of its scope.
test: $(DEV) ## run all tests (PYTEST_ARGS= adds arguments, such as -n 0 for one process)
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

chaos: $(DEV) ## kill, freeze, cut and truncate on a real broker; figures of each fault (CHAOS_ARGS= adds arguments)
	PYTHONPATH=.:deploy/kafka-local $(BIN)/python -m tests.chaos $(CHAOS_ARGS)

bench: $(DEV) ## run the benchmarks and write docs/benchmarks.md (BENCH_ARGS= adds arguments, such as --only build)
	PYTHONPATH=.:deploy/kafka-local $(BIN)/python -m tests.benchmarks --write docs/benchmarks.md $(BENCH_ARGS)

check: $(DEV) ## lint, format check, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## format the code and fix what can be fixed safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

kafka: ## run a local Kafka broker in the foreground (KAFKA_PORT=9092)
	$(PYTHON) deploy/kafka-local/kafka_local.py --port $(KAFKA_PORT)

schemas: $(LIGHT) ## generate the JSON Schemas and the AsyncAPI document again
	$(BIN)/python -m freezepoint_schemas.generate

metrics: $(LIGHT) ## write docs/metrics.md from the list of metrics in the code
	$(BIN)/python deploy/prometheus/metrics_page.py docs/metrics.md

# The advisories come over the network. --strict: a package that nothing could be learnt of is a failure, not a pass.
audit: $(AUDIT) ## look up known vulnerabilities of every pinned dependency (needs the network)
	$(BIN)/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r constraints.txt

# Of what is shipped, so of an environment without the development tools.
sbom: $(AUDIT) ## write build/sbom.cdx.json: what an installed freezepoint consists of (CycloneDX)
	rm -rf build/runtime
	$(BIN)/python -m venv build/runtime
	build/runtime/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
	build/runtime/bin/python -m pip uninstall --quiet --yes pip setuptools
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o build/sbom.cdx.json build/runtime/bin/python

clean: ## remove the virtual environment, caches and fetched jars
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache deploy/kafka-local/.jars
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("freezepoint needs Python >= 3.11; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# Order-only: the interpreter's own age says nothing about what is installed.
$(LIGHT): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(LIGHT) $@

$(AUDIT): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[audit]'
	@touch $(LIGHT) $@
