# make search    the main job: the fastest configuration that fits a memory budget
# make quick     lint, types, layers, and one test case of each promise: before each commit
# make test      lint, types, layers, and one test case for each part (torch's CUDA build, 1.9 GB in .venv-cuda; no GPU)
# make test-all  the same with the full matrices, and all tests marked gpu on a simulated card
# make test-cuda the tests marked gpu, on simulated cards (1.9 GB in .venv-cuda; needs gcc, no GPU)
# make test-cluster four ranks, two machines, and the faults of several: a Ray cluster, PostgreSQL and MLflow's server that die (needs PostgreSQL and ip)
# make test-many-workers 64 workers of one search, whose trials must begin at once: alone on the machine (needs PostgreSQL)
# make evidence  all that needs a GPU, in at most 9 minutes; the next call goes on where this one stopped
# make ui        the MLflow UI, opened on the runs of the experiment
# Pass settings on with ARGS: make search ARGS="-P budget=8GiB -P effective_batch_size=64"
# Tests run on torch 2.13, which an index may offer in a small build for CPUs: another is TORCH=2.15.0 (with an empty
# .venv), and for `make test-cuda` TORCH_CUDA=2.15.0.  `pip install .` takes the newest that pyproject.toml admits.
PYTHON ?= python3
TORCH ?= 2.13.*
TORCH_CUDA ?=
ARGS ?=
PORT ?= 5000
BIN := .venv/bin
IN_PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# Two cores have room for a third process: many tests wait, for a server, a signal or the import of a library.
WAITING := --numprocesses 3 --dist loadfile --no-loadscope-reorder
# The files with tests of these marks alone: to import all files takes pytest many seconds.
OF_A_CARD = $(shell grep -l pytest.mark.gpu tests/test_*.py)
OF_FOUR_RANKS := tests/test_data_parallel.py tests/test_saving.py

# An environment that forbids writing compiled modules makes each process of a test compile all of them.
export PYTHONDONTWRITEBYTECODE :=

CUDA_INSTALLED := .venv-cuda/installed$(TORCH_CUDA:%=-%)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# On all cores, where pip would use one; some packages have files that are no Python.
COMPILE := @$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
CARD := PYTHONPATH=. $(BIN)/python tests/cuda_without_gpu/cards.py

.PHONY: search quick test test-all test-cuda test-cluster test-many-workers check evidence ui clean

search: .venv/installed
	PATH="$(abspath $(BIN)):$$PATH" mlflow run . -e search --env-manager=local --experiment-name fitproof $(ARGS)

quick: check
	OMP_NUM_THREADS=1 $(BIN)/pytest $(IN_PARALLEL) -m "quick and not slow"

test: check $(CUDA_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WAITING) -m "not slow" --durations 40

test-all: check $(CUDA_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(IN_PARALLEL)
	OMP_NUM_THREADS=1 $(CARD) h200 -m pytest $(IN_PARALLEL) -m gpu $(OF_A_CARD)

test-cluster: .venv/installed-for-tests
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_cluster_faults.py tests/test_machines.py -m "slow$(if $(CI), and not long)"
	OMP_NUM_THREADS=1 $(BIN)/pytest -m four_ranks $(OF_FOUR_RANKS)

test-many-workers: .venv/installed-for-tests
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_many_workers.py -m "slow$(if $(CI), and not long)"

test-cuda: $(CUDA_INSTALLED)
	OMP_NUM_THREADS=1 $(CARD) h200 -m pytest $(IN_PARALLEL) -m "gpu and not slow" $(OF_A_CARD)

check: .venv/installed-for-tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports --no-logo --no-cache

evidence: .venv/installed-for-tests
	$(BIN)/python benchmarks/evidence.py $(ARGS)

ui: .venv/installed
	$(BIN)/python -m pipeline.tracking.ui $(PORT)

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fitproof needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml setup.py | $(BIN)/pip
	$(INSTALL) --editable . 'torch==$(TORCH)'
	$(COMPILE)
	touch $@

.venv/installed-for-tests: pyproject.toml setup.py | $(BIN)/pip
	$(INSTALL) --editable '.[dev]' 'torch==$(TORCH)'
	$(COMPILE)
	touch .venv/installed $@

$(CUDA_INSTALLED): .venv/installed-for-tests pipeline/simulation/install.py
	$(BIN)/python -m pipeline.simulation.install .venv-cuda $(TORCH_CUDA)
	touch $@

clean:
	rm -rf .venv .venv-cuda build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
