# make train: a result and its report on this machine in a few minutes.
# make test, make test-all, make lint, make docs, make views, make bench.
# Everything works from a fresh clone: the virtual environment is made first. Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-all lint format docs views bench clean

train: $(VENV)/.installed
	$(BIN)/python main.py --config=configs/quickstart.py
	$(BIN)/python main.py --mode=report --config=configs/quickstart.py

PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=10
FURTHER = slow or real_data or browser

test: $(VENV)/.installed-dev
	$(PYTEST) -m 'not ($(FURTHER))'

test-all: test # and the slow tests, those of real data (SSL_JAX_TEST_DATA) and those in a browser
	$(PYTEST) -m '$(FURTHER)'

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ssl_jax

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Strict, offline, with the tutorial executed (about three minutes). Without it: make docs DOCS_NOTEBOOK=off
export DOCS_NOTEBOOK
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	! grep -rlE '<(script|link|img)[^>]+(src|href)="(https?:)?//' docs/_build/html --include='*.html'
	@echo 'docs/_build/html/index.html'

views: $(VENV)/.installed
	$(BIN)/python main.py --mode=views --config=configs/quickstart.py --workdir=runs/views

# On a GPU, with full sizes: make bench BENCH=
BENCH ?= --quick
bench: $(VENV)/.installed-dev
	for name in losses memory augment train_step knn vmap_seeds positives determinism startup host_pipeline; do $(BIN)/python -m benchmarks.$$name $(BENCH) || exit 1; done

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(BIN)/pip: # exists once the virtual environment is complete
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ssl_jax needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[train,plots]'
	touch $@

$(VENV)/.installed-docs: setup.cfg pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[docs]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-dev: setup.cfg pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build docs/_build docs/_generated *.egg-info
