# `make help` lists the targets.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# The versions of the Neuron image (training/Dockerfile).
NEURON_VENV := .venv-neuron
NEURON_PYTHON ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)
NEURON_VERSIONS := 3.12 2.9.0
UV := uv==0.13.9
# uv does not read pip's settings; a machine that installs through a mirror has this one.
UV_ENV := $(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX=$(PIP_INDEX_URL))
PRESET ?= tiny
LAUNCHER ?= ray
# The full name is the same image to docker, podman and buildah, and to the cluster that it is loaded into.
IMAGE ?= docker.io/library/llama-trainium:local
BASE_IMAGE ?= docker.io/library/python:3.12
BUILDER ?= $(shell for b in docker podman buildah; do command -v $$b > /dev/null && echo $$b && break; done)
CONTROL = @$(BIN)/python -m workloads.control $@ $(if $(STAGE),--stage $(STAGE)) $(if $(STACK),--stack $(STACK)) $(ARGS)
ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
GET_ACTIONLINT = command -v actionlint > /dev/null || test -x $(BIN)/actionlint || GOBIN=$(abspath $(BIN)) go install $(ACTIONLINT)
PINS := requirements-training.txt requirements.txt requirements-dev.txt constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup run image preview-comment workflows test test-engine test-cluster test-neuron-versions lint format \
	bench docs architecture lock clean status logs stop rerun dashboard tensorboard grafana toolbox preflight cost \
	destroy

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="..." adds settings to run, tests to test, options to bench and image: make run ARGS="--train.steps 20"'

setup: $(VENV)/.installed ## make .venv with everything the project needs

$(VENV)/.installed: $(PINS)
	@test -n "$(PYTHON)" || { echo 'error: PYTHON: no Python 3.11 or 3.12 on PATH, expected one: make setup PYTHON=/path/to/python3.12'; exit 2; }
	@echo "installing into $(VENV) (the first time: several GB, a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(UV)
	@# Compiled once here, and not anew at every start where Python may not write bytecode (PYTHONDONTWRITEBYTECODE).
	$(UV_ENV) $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -r requirements-dev.txt -c constraints.txt
	@touch $@

run: setup ## pre-train a small Llama on this machine: prepare, precompile, train, report
	@$(BIN)/python -m training run --preset $(PRESET) --launcher $(LAUNCHER) $(ARGS)

image: ## build the image for CPUs, with docker, podman or buildah (IMAGE, BASE_IMAGE, BUILDER, ARGS)
	@test -n "$(BUILDER)" || { echo 'error: BUILDER: no docker, podman or buildah on PATH, expected one of them'; exit 2; }
	$(BUILDER) build -f training/Dockerfile --build-arg BASE_IMAGE=$(BASE_IMAGE) -t $(IMAGE) $(ARGS) .

status: setup ## how the stages of a stack are; STACK=NAME for one that is not selected
	$(CONTROL)

logs: setup ## the output of the stage that runs, or of STAGE=train, and on until its end
	$(CONTROL)

stop: setup ## end the stage that runs with a checkpoint, and give its nodes back
	$(CONTROL)

rerun: setup ## run STAGE=train again, from its last checkpoint, and what comes after it
	$(CONTROL)

dashboard: setup ## Ray's dashboard on this machine, while a stage runs
	$(CONTROL)

tensorboard: setup ## the stack's TensorBoard on this machine
	$(CONTROL)

grafana: setup ## dashboards of the run and of the platform on this machine (observability)
	$(CONTROL)

toolbox: setup ## a shell in the toolbox pod (workloads.toolbox)
	$(CONTROL)

preflight: setup ## ask the AWS account whether STACK=us-west-2 can be deployed into it
	@$(BIN)/python -m infra.preflight $(STACK) $(ARGS)

cost: setup ## what STACK=us-west-2 costs an hour and a run (ARGS=--refresh asks AWS for the prices)
	@$(BIN)/python -m infra.cost $(STACK) $(ARGS)

destroy: setup ## destroy STACK=dev: says what stays, asks, and lists what is left (ARGS=--list: only that)
	@$(BIN)/python -m infra.destroy $(STACK) $(ARGS)

preview-comment: setup ## what a pull request is told of STACK=dev, against the commit BASE (default HEAD^1; OUTPUT=file)
	@$(BIN)/python -m review $(STACK) --base $(or $(BASE),HEAD^1) $(if $(OUTPUT),--output $(OUTPUT))

workflows: setup ## check .github/workflows with actionlint, from PATH or built with Go
	@$(GET_ACTIONLINT)
	PATH="$$PATH:$(abspath $(BIN))" actionlint

test: lint ## lint and all tests
	@# Where Go is; elsewhere its test is skipped.
	@! command -v go > /dev/null || { $(GET_ACTIONLINT); } || echo 'actionlint: could not be had, its test is skipped'
	$(BIN)/python -m pytest $(ARGS)

test-engine: setup ## every stack file through the real Pulumi engine (needs `pulumi` and its eks plugin on PATH)
	ENGINE_FAULTS=$${ENGINE_FAULTS:-types} $(BIN)/python -m pytest tests/engine $(ARGS)

test-cluster: setup ## the local stack in real pods (needs TEST_CLUSTER_KUBECONFIG, `pulumi` and kubectl; docs/verification.md)
	$(BIN)/python -m pytest tests/cluster $(ARGS)

$(NEURON_VENV)/.installed: $(VENV)/.installed
	@test -n "$(NEURON_PYTHON)" || { echo 'error: NEURON_PYTHON: no Python 3.12 on PATH, expected one: make test-neuron-versions NEURON_PYTHON=/path/to/python3.12'; exit 2; }
	$(UV_ENV) $(BIN)/uv venv --quiet --clear --python $(NEURON_PYTHON) $(NEURON_VENV)
	$(UV_ENV) $(BIN)/uv pip install --quiet --compile-bytecode --python $(NEURON_VENV)/bin/python -r requirements-dev.txt -c constraints.txt
	@touch $@

test-neuron-versions: $(NEURON_VENV)/.installed ## the trainer's tests with the Neuron image's Python 3.12 and torch 2.9.0
	@$(NEURON_VENV)/bin/python -c 'import sys, torch; found = "%d.%d" % sys.version_info[:2] + " " + torch.__version__.split("+")[0]; \
		print("Python and torch", found); assert found == "$(NEURON_VERSIONS)", "expected $(NEURON_VERSIONS)"'
	$(NEURON_VENV)/bin/python -m pytest tests/training $(ARGS)

lint: setup ## ruff, its formatter and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## compare with peers in one run; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.run $(ARGS)

docs: setup ## write the tables: README.md, docs/configuration.md, docs/trainium.md
	PYTHONPATH=. $(BIN)/python docs/settings_table.py
	PYTHONPATH=. $(BIN)/python docs/configuration_table.py
	PYTHONPATH=. $(BIN)/python docs/plan_figures.py

architecture: setup ## draw docs/images/architecture.svg from the program's own graph
	$(BIN)/python docs/architecture_picture.py

lock: setup ## pin what the pinned packages need, after a change of requirements*.txt
	$(UV_ENV) $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url \
		requirements-dev.txt -o constraints.txt

clean: ## remove runs and caches, keep .venv
	rm -rf runs bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
