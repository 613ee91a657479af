# `make help` lists the commands. Each does its own set-up, on a machine that has Python 3.11 and pip.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# For torch alone: an index of CPU builds (docs/how-to/install.md).
PIP_ARGS ?=
# Installs the rest with uv, in a third of pip's time, and with pip where there is no wheel of uv or uv fails.
UV := $(BIN)/uv pip install --python $(BIN)/python --compile-bytecode
add = { test -x $(BIN)/uv && $(UV) --quiet -c constraints.txt $(1); } || $(PIP) install --quiet -c constraints.txt $(1)
STAMP := $(VENV)/.installed
# What the demo needs, in the same environment: a fifth of the packages. The rest is added to it.
LEAN := $(VENV)/.demo
LEAN_DISTS := . plugins/models/llama plugins/datasets/text
# The core, its conformance kits, and every folder of plugins/ with a pyproject.toml.
# `nxdt` in meta/ has no code: it is built, and not installed for development.
DISTS := . testing $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/*/pyproject.toml)))
# Processes that share the files of tests: one more than cores, since tests also wait, and at most 4, each with one
# thread (conftest.py). 0 runs all tests in one process, as a debugger needs it.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))
PYTEST_ARGS ?=
TORCH ?= 2.11.0
TORCH_VENV ?= .torch/$(TORCH)-$(notdir $(PYTHON))
WITH ?=
NXD ?=
NXD_VENV ?= .torch/nxd-$(notdir $(PYTHON))
NXD_TESTS := plugins/engines/nxd/tests
NXD_RUN = NXD_CPU_MODE=1 PJRT_DEVICE=CPU PYTHONPATH="$(abspath $(NXD))/src:$(CURDIR)/$(NXD_TESTS)/stand_ins" $(NXD_VENV)/bin/python

# Without what `make accelerator` runs, and a plugin file that others use.
BENCHMARKS := $(filter-out benchmarks/accelerator/% %/__init__.py %/step_clock.py,$(wildcard benchmarks/*/*.py))
# Arguments of benchmarks/accelerator_day.py, such as `--minutes 9`, or of check-wheels; the peers in accelerator-bundle, and what quantises.
ARGS ?=
EXTRAS ?= torchtitan==0.2.2 litgpt docstring-parser typeshed-client bitsandbytes
BUNDLE := dist/accelerator

.DEFAULT_GOAL := help

.PHONY: help install demo test test-full test-parallel test-faults test-recipes test-torch test-nxd show-nxd nxd-environment \
	lint docs wheels check-wheels release-dry-run api offers bench accelerator accelerator-bundle clean

help:
	@for group in Start Test "Test elsewhere" Write Measure; do echo "$$group"; \
		sed -nE "s/^([a-z][a-z -]*):.*## $$group \| (.*)/  \1\t\2/p" Makefile | expand -t 42; echo; done

install: $(STAMP)  ## Start | install the core and all plugins into .venv

$(LEAN): constraints.txt $(LEAN_DISTS:%=%/pyproject.toml)
	@echo "Installing PyTorch, nxdt and two plugins into $(VENV): about a minute"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt torch==2.13.0 hatchling editables
	-$(PIP) install --quiet -c constraints.txt --only-binary uv uv
	$(call add,--no-build-isolation $(LEAN_DISTS:%=-e %) matplotlib)
	touch $(LEAN)

$(STAMP): $(LEAN) requirements-dev.txt requirements-data.txt $(DISTS:%=%/pyproject.toml)
	$(BIN)/python scripts/distributions.py editable > $(VENV)/editable.txt
	$(call add,--no-build-isolation -r $(VENV)/editable.txt -r requirements-dev.txt)
	$(call add,--no-deps -r requirements-data.txt)
	touch $(STAMP)

demo: $(LEAN)  ## Start | train a small Llama on real text, stop, resume, generate, plot
	PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/demo.sh

test: $(STAMP)  ## Test | all tests, with a sample of the longest lists of cases
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-full: $(STAMP)  ## Test | every case; hours
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --samples=all $(PYTEST_ARGS)

test-parallel test-faults test-recipes: $(STAMP)  ## Test | every case of layouts, saves or recipes
	$(BIN)/python -m pytest tests/$(@:test-%=%) --samples=all $(PYTEST_ARGS)

test-torch:  ## Test elsewhere | with another torch, in an environment of its own: TORCH=2.11.0, WITH="transformers==5.17.0"
	$(PYTHON) scripts/torch_environment.py $(TORCH) $(TORCH_VENV) $(WITH)
	$(TORCH_VENV)/bin/python -m pytest @tests/torch_versions.txt $(PYTEST_ARGS)

# The library needs transformers older than 5, or none; stand-ins take the place of AWS's closed packages.
nxd-environment:
	@test -d "$(NXD)/src/neuronx_distributed" || { echo "NXD=FOLDER: a source tree of neuronx-distributed"; exit 2; }
	$(PYTHON) scripts/torch_environment.py 2.9.1 $(NXD_VENV) torch-xla==2.9.0 tenacity
	$(NXD_VENV)/bin/python -m pip uninstall --quiet --yes transformers

test-nxd: nxd-environment  ## Test elsewhere | the engine nxd: NXD=FOLDER, a source tree of neuronx-distributed
	$(NXD_RUN) -m pytest $(NXD_TESTS) plugins/migration/nxd/tests/test_written_by_the_library.py $(PYTEST_ARGS)

show-nxd: nxd-environment  ## Test elsewhere | the table of its largest differences from the torch engine
	$(NXD_RUN) $(NXD_TESTS)/with_library/show_differences.py

lint: $(STAMP)  ## Test | style, types and wording
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/prose.py
	$(BIN)/mypy

docs: $(STAMP)  ## Test | build the documentation
	$(BIN)/mkdocs build --strict

wheels: $(LEAN)  ## Write | wheels of all distributions into dist
	rm -rf dist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist $(DISTS:%=./%) ./meta

check-wheels: $(STAMP)  ## Test | each plugin alone from its wheel, then all together (ARGS="llama s3" for some)
	$(BIN)/python scripts/check_wheels.py $(ARGS)

release-dry-run: $(STAMP)  ## Write | what a release would upload (docs/releasing.md)
	$(BIN)/python scripts/release_dry_run.py

api: $(STAMP)  ## Write | the table of public names and their signatures (tests/api/public_api.txt)
	$(BIN)/python scripts/public_api.py --write

offers: $(STAMP)  ## Write | what plugins declare, the extras of `nxdt`, tables of the README, and code in the pages of kinds
	$(BIN)/python scripts/distributions.py offers
	$(BIN)/python scripts/readme.py
	$(BIN)/python -m scripts.docs_site.kinds

bench: $(STAMP)  ## Measure | all benchmarks on this machine
	for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

accelerator: $(STAMP)  ## Measure | a GPU that is lent for a short time
	$(BIN)/python benchmarks/accelerator_day.py --out accelerator_day $(ARGS)

accelerator-bundle: $(STAMP)  ## Measure | wheels for one without a network
	rm -rf $(BUNDLE)
	for dist in $(DISTS); do $(BIN)/python -m build --quiet --wheel --no-isolation --outdir $(BUNDLE) $$dist || exit 1; done
	$(BIN)/python scripts/accelerator_bundle.py $(BUNDLE) $(EXTRAS:%=--extra %)
	git describe --always --dirty --abbrev=40 --exclude='*' > $(BUNDLE)/nxdt_commit.txt

clean:  ## Write | remove environments and everything built
	rm -rf $(VENV) .torch dist site nxdt_experiments accelerator_day
