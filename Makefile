# make search   the main job: the fastest configuration that fits a memory budget
# make test     lint, types, layers, and one test case for each part
# make test-all the same with the full matrices
# make test-cuda   the tests marked gpu, on simulated cards (1.2 GB in .venv-cuda; needs gcc, no GPU)
# make ui       the MLflow UI on what the runs wrote
# Pass settings on with ARGS: make search ARGS="-P budget=8GiB -P effective_batch_size=64"
PYTHON ?= python3
ARGS ?=
PORT ?= 5000
BIN := .venv/bin
IN_PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

CARD := $(BIN)/python tests/cuda_without_gpu/cards.py

.PHONY: search test test-all test-cuda check ui clean

search: .venv/installed
	PATH="$(abspath $(BIN)):$$PATH" mlflow run . -e search --env-manager=local --experiment-name headroom $(ARGS)

test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest $(IN_PARALLEL) -m "not slow"

test-all: check
	OMP_NUM_THREADS=1 $(BIN)/pytest $(IN_PARALLEL)

test-cuda: .venv-cuda/installed
	OMP_NUM_THREADS=1 $(CARD) h200 -m pytest $(IN_PARALLEL) -m "gpu and not slow"
	for card in a100 rtx4090 t4; do \
		OMP_NUM_THREADS=1 $(CARD) $$card -m pytest $(IN_PARALLEL) -m "every_card and not slow" || exit 1; \
	done

check: .venv/installed-for-tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports --no-logo --no-cache

ui: .venv/installed
	$(BIN)/mlflow ui --host 127.0.0.1 --port $(PORT)

.venv/installed: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("headroom needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/installed-for-tests: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

.venv-cuda/installed: .venv/installed-for-tests $(wildcard tests/cuda_without_gpu/*.[ch]) tests/cuda_without_gpu/install.py
	$(BIN)/python tests/cuda_without_gpu/install.py .venv-cuda
	touch $@

clean:
	rm -rf .venv .venv-cuda build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
