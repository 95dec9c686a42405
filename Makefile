# The door to RollPacker: bare `make` prints the targets.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help
help:  ## print the targets
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 22

.venv/installed: pyproject.toml requirements.lock
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[dev]'
	touch $@

.PHONY: setup
setup: .venv/installed  ## make .venv with everything in it (CPU build of torch)

# $(call generate,DIRECTORY): the Python of protos/ into DIRECTORY/rollpacker/v1
generate = PATH="$(abspath $(BIN)):$$PATH" python -m grpc_tools.protoc -I protos \
  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
  protos/rollpacker/v1/*.proto

.PHONY: protos
protos: .venv/installed  ## generate rollpacker/v1 from protos/
	$(call generate,.)

.PHONY: golden
golden: .venv/installed  ## take the protos as they are for the ones that must not break
	$(BIN)/buf build --exclude-source-info -o protos/golden.binpb

.PHONY: check
check: check-code check-protos  ## everything that needs no running server: style, types, layers, protos

.PHONY: check-code
check-code: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: check-protos
check-protos: .venv/installed
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against protos/golden.binpb
	rm -rf build/protos && mkdir -p build/protos
	$(call generate,build/protos)
	diff -r -x __pycache__ -x __init__.py build/protos/rollpacker/v1 rollpacker/v1

.PHONY: test
test: .venv/installed  ## run the tests; they start the servers that they need
	OMP_NUM_THREADS=1 $(BIN)/pytest -q

.PHONY: demo
demo: .venv/installed  ## train a small model here, by tail batching and without; MODEL=smollm2, SEED=n
	$(BIN)/rollpacker demo $(DEMO_OPTIONS)

.PHONY: demo-synchronous
demo-synchronous: .venv/installed  ## only the run without tail batching
	$(BIN)/rollpacker demo --only demo-synchronous $(DEMO_OPTIONS)

DEMO_OPTIONS = $(if $(MODEL),--model $(MODEL)) $(if $(SEED),--seed $(SEED))
