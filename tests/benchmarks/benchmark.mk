# Compares a training step with speculators 0.9.0, which lives in an environment of its own. Included by the Makefile.
# PIP_OPTIONS is where the Makefile says from which index a CPU build of torch comes.

PEER_PYTHON ?= .venv-peer/bin/python
BENCHMARK_PYTHON ?= .venv/bin/python

.venv-peer/.ready: requirements/peer.txt
	python3 -m venv .venv-peer
	.venv-peer/bin/python -m pip install --no-deps $(PIP_OPTIONS) -r requirements/peer.txt
	touch $@

.PHONY: benchmark
benchmark: .venv-peer/.ready
	$(BENCHMARK_PYTHON) tests/benchmarks/compare.py --peer-python $(PEER_PYTHON) $(BENCHMARK_OPTIONS)
