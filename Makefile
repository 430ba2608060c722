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
.PHONY: help lessons test test-models figures html notebooks check ptx nightly bench \
	gpu-check bench-gpu clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' Makefile | while read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

lessons: .venv/.installed ## run every lesson, draw the figures, write lessons/html/
	$(PY) lessons/build.py run
	$(PY) figures/make.py
	@$(MAKE) --no-print-directory html

test: .venv/.installed ## run the tests (ARGS="-k name" picks some)
	$(PY) -m pytest $(ARGS)

test-models: .venv-hf/.installed ## compare with Transformers, on SmolLM2's weights
	.venv-hf/bin/kvq model fetch smollm2-135m
	.venv-hf/bin/python -m pytest tests/integrations \
		tests/model/test_against_transformers.py $(ARGS)

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
	$(PY) -m kvq.kernels.ptx --check
	$(PY) -m kvq.kernels.budgets --check

ptx: .venv/.installed ## compile kernels/ptx/ again, record budgets and their table
	$(PY) -m kvq.kernels.ptx
	$(PY) -m kvq.kernels.budgets

nightly: .venv/.installed .venv-cu12/.installed ## every kernel by two versions of NVRTC
	$(PY) -m kvq.kernels.ptx --check --every
	$(PY) tests/kernels/nightly.py
	.venv-cu12/bin/python tests/kernels/nightly.py

bench: .venv/.installed ## time this machine's CPU beside others' programs (ARGS=--quick)
	$(PY) -m kvq bench cpu $(ARGS)

gpu-check: ## compare the kernels with a GPU's results and counters
	@command -v nvidia-smi > /dev/null || { \
		echo "gpu-check has not run: no GPU (nvidia-smi not found)" >&2; exit 2; }
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation -e .
	$(PYTHON) tests/gpu_check.py

# Without a GPU:  make bench-gpu DRY=1
ifdef DRY
bench-gpu: .venv/.installed
	$(PY) tests/bench_gpu.py --dry-run
else
bench-gpu: ## time the kernels on a GPU, beside other systems' (DRY=1: without one)
	@command -v nvidia-smi > /dev/null || { \
		echo "bench-gpu has not run: no GPU (nvidia-smi not found)" >&2; exit 2; }
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation -e .
	$(PYTHON) tests/bench_gpu.py
endif

clean: ## remove .venv, lessons/html/ and every cache
	rm -rf .venv .venv-cu12 .venv-hf lessons/html lessons/executed build dist *.egg-info
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

.venv-cu12/.installed: pyproject.toml
	@$(PYTHON) -m venv .venv-cu12
	@.venv-cu12/bin/python -m pip install --quiet --disable-pip-version-check \
		--progress-bar off -e . "cuda-bindings==12.9.*" \
		"nvidia-cuda-nvrtc-cu12==12.9.*" "nvidia-cuda-runtime-cu12==12.9.*"
	@touch $@

# PyPI's PyTorch for Linux brings CUDA along: several GB. A CPU build is enough,
# make test-models TORCH=torch-2.13.0+cpu-....whl
TORCH ?= torch==2.13.0

.venv-hf/.installed: pyproject.toml
	@$(PYTHON) -m venv .venv-hf
	@echo "Installing PyTorch and Transformers into .venv-hf: 1.2 GB or more"
	@.venv-hf/bin/python -m pip install --quiet --disable-pip-version-check \
		--progress-bar off --log .venv-hf/install.log \
		-e ".[model,hf,hf-peers]" "$(TORCH)" hypothesis pytest
	@touch $@
