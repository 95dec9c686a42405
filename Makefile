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

.PHONY: protos
protos: .venv/installed  ## generate rollpacker/v1 from protos/
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet:. protos/rollpacker/v1/*.proto

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
