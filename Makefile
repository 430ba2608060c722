# Two commands do the work, each with all of its set-up in .venv:
#   make lessons    run the lessons, draw the figures, write lessons/html/
#   make test       run the tests
# Another Python:  make PYTHON=python3.12 lessons
# Some tests only: make test ARGS="-k packing"

PYTHON ?= python3
PY := .venv/bin/python
ARGS ?=

export MPLBACKEND := Agg
# Small matrices: more BLAS threads than idle cores make them slower, not faster.
export OPENBLAS_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help lessons test figures html notebooks check bench clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1 /p' Makefile | while read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done

lessons: .venv/.installed ## run every lesson, draw the figures, write lessons/html/
	$(PY) lessons/build.py run
	$(PY) figures/make.py
	@$(MAKE) --no-print-directory html

test: .venv/.installed ## run the tests (ARGS="-k name" picks some)
	$(PY) -m pytest $(ARGS)

figures: .venv/.installed ## compute the figures' data, draw them, fill README's table
	$(PY) figures/make.py
	$(PY) figures/tables.py

html: .venv/.installed ## write lessons/html/ from the lessons that have run
	$(PY) lessons/build.py html

notebooks: .venv/.installed ## write the notebooks from lessons/src/
	$(PY) lessons/build.py notebooks

check: .venv/.installed ## lint, format, and drift of notebooks and figures' data
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) lessons/build.py check
	$(PY) figures/make.py --check
	$(PY) figures/tables.py --check

bench: .venv/.installed ## time quantize and pack on this machine
	$(PY) tests/bench_quantize.py

clean: ## remove .venv, lessons/html/ and every cache
	rm -rf .venv lessons/html lessons/executed build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.installed: requirements.txt pyproject.toml
	@command -v $(PYTHON) > /dev/null || { \
		echo "'$(PYTHON)' not found: install Python >= 3.11 or make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"Python %d.%d is too old: install Python >= 3.11 or make PYTHON=..." \
		% sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
		echo "$(PYTHON) lacks venv: on Debian or Ubuntu install python3-venv" >&2; exit 1; }
	@echo "Installing into .venv: 1 GB, about a minute (log: .venv/install.log)"
	@$(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check \
		--progress-bar off --log .venv/install.log -r requirements.txt -e .
	@touch $@
