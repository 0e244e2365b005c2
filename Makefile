# The front door: `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard streamtrain/_native/*)
SECONDS_OF_DEMO ?= 0
unexport PYTHONDONTWRITEBYTECODE # hundreds of processes would compile all that they import
JOBS ?= 4
LOCKED ?= yes
# The core is built once, for this CPU. Wheels have two builds of it, which `make sanitize` compares.
MARCH := $(if $(filter x86_64,$(shell uname -m)),$(if $(shell grep -m1 -ow avx2 /proc/cpuinfo),x86-64-v3,x86-64-v2))
UV := VIRTUAL_ENV=$(VENV) UV_HTTP_TIMEOUT=300 $(BIN)/uv pip
FAST := tests/native tests/settings tests/ps tests/checkpoint/test_shard_map.py tests/checkpoint/test_failures.py \
	tests/checkpoint/test_cluster_checkpoint.py tests/checkpoint/test_recovery.py tests/cluster/test_members.py \
	tests/compose/test_monitoring.py tests/model/test_columns.py tests/model/test_schema.py tests/publish/test_gate.py \
	tests/publish/test_schedule.py $(wildcard tests/store/checkpoint/test_*.py) tests/store/redis/test_codec.py \
	tests/stream/test_buffer.py tests/stream/test_files.py tests/stream/test_producer.py tests/train/test_filling.py \
	tests/train/test_intake.py tests/test_address.py tests/test_garbage.py tests/test_house.py tests/test_lock.py \
	tests/test_periodic.py tests/test_docs.py

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

# What a fresh Debian lacks beside python3, make and g++. Elsewhere it only says what is missing.
system:
	@$(PYTHON) .ci/system.py

# And what runs the servers of tests, benchmarks and `make kafka`.
servers:
	@$(PYTHON) .ci/system.py servers

# And what builds the fuzzers.
fuzzers:
	@$(PYTHON) .ci/system.py fuzzers

# One virtual environment with everything, in locked versions; made again when these or the native core change.
$(VENV)/ready: pyproject.toml .ci/dev.lock .ci/wheels.lock $(NATIVE) | system
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing streamtrain with all that its developers use into $(VENV), 3 GB; the first time this takes minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(if $(LOCKED),$(UV) sync --require-hashes .ci/dev.lock,$(UV) install --upgrade --requirement pyproject.toml --extra demo --extra dev)
	@$(UV) install --quiet --no-deps --build-constraints .ci/wheels.lock --config-setting cmake.define.STREAMTRAIN_ARCH=$(MARCH) --editable .
	@touch $@

demo: $(VENV)/ready ## the whole service on a year of real flights, with live figures, until Ctrl-C
	@$(BIN)/streamtrain demo $(if $(filter-out 0,$(SECONDS_OF_DEMO)),--for $(SECONDS_OF_DEMO))

kafka: $(VENV)/ready servers ## one Kafka broker at localhost:9092, until Ctrl-C
	@$(BIN)/python -m streamtrain.embedded.kafka

test: $(VENV)/ready servers fuzzers ## all tests, JOBS=4 files at a time (COVERAGE=1 shows what lines and branches they reach), and beside them, if it has changed, those of the native core under sanitizers
	@$(MAKE) --no-print-directory --jobs=2 --keep-going pytest sanitize-changed

pytest: $(VENV)/ready
	@.ci/pytest $(BIN) --ignore tests/fuzz/test_harnesses.py --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(COVERAGE),--cov --cov-report=term:skip-covered)

test-fast: $(VENV)/ready ## the tests that need neither servers nor TensorFlow (two minutes)
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile --durations=5 $(FAST) --ignore tests/ps/test_workers.py

test-newest: system servers fuzzers ## all tests with the newest versions that pyproject.toml allows, in an environment of their own; may be red
	@$(MAKE) --no-print-directory VENV=build/newest LOCKED= test

test-native: $(VENV)/ready ## the tests of the native core alone
	$(BIN)/pytest tests/native

sanitize: $(VENV)/ready fuzzers ## the tests of the native core with AddressSanitizer and UndefinedBehaviorSanitizer, its threads with ThreadSanitizer, and its fuzzers for a moment
	@.ci/sanitize $(BIN)

sanitize-changed: $(VENV)/ready fuzzers
	@.ci/sanitize $(BIN) --if-changed

fuzz: $(VENV)/ready fuzzers ## every fuzzer for MINUTES=10 each, with sanitizers; what is found is kept in build/fuzz
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10) $(TARGETS)

coverage: $(VENV)/ready servers ## which lines and branches no test reaches; TESTS=tests/stream takes a part of them
	$(BIN)/pytest --cov --cov-report=term-missing:skip-covered $(TESTS)

mutate: $(VENV)/ready servers ## which changes to the code no test notices (an hour); MODULES="ps/clock.py" takes some of .ci/mutate.py's
	$(BIN)/python .ci/mutate.py $(MODULES)

check: $(VENV)/ready ## ruff, mypy strict, and whether all tests can be collected
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 types collected

types: $(VENV)/ready
	$(BIN)/mypy

# This also compiles what tests import: of JOBS processes that begin at the same time, each would compile most of it.
collected: $(VENV)/ready
	@mkdir -p build
	@$(BIN)/pytest --collect-only --quiet >build/collected.log || (tail -30 build/collected.log; false)

docs: $(VENV)/ready ## the website of the documentation, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; to search it, python3 -m http.server --directory build/site"

fmt: $(VENV)/ready ## format the Python code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready servers ## all benchmarks, results to one file and the documentation (45 minutes, 12 GB); for peers see docs/benchmarks.md
	$(BIN)/python benchmarks/bench.py run $(BENCH)

bench-scale: $(VENV)/ready servers ## scaling by workers, shards and rows up to 100M, results to the same file (40 minutes, 16 GB)
	$(BIN)/python benchmarks/bench.py run --parts scale $(BENCH)

bench-quick: $(VENV)/ready ## compare 16 ratios with accepted ones; fails if one has lost a fifth (five minutes)
	@$(BIN)/python benchmarks/quick.py $(BENCH)

bench-core: $(VENV)/ready ## the native core compared with NumPy and msgspec (a few minutes, 8 GB)
	$(BIN)/python benchmarks/core.py table
	$(BIN)/python benchmarks/core.py decode

bench-disk: $(VENV)/ready ## tables with a tenth of their rows in memory compared with all in memory (three minutes, 2 GB)
	$(BIN)/python benchmarks/disk.py
	$(BIN)/python benchmarks/disk.py --power 0 --batches 50

bench-beyond-memory: $(VENV)/ready ## a shard with more rows than memory, killed and restored (a minute); BENCH="--rows 625000000 --memory 10GB --seconds 120" for ten billion parameters (25 minutes, 65 GB of disk)
	$(BIN)/python benchmarks/beyond_memory.py $(BENCH)

bench-step: $(VENV)/ready ## the whole training step compared with plain TensorFlow (a few minutes, 12 GB)
	$(BIN)/python benchmarks/step.py --workload w1
	$(BIN)/python benchmarks/step.py --workload w2 --batch 64
	$(BIN)/python benchmarks/step.py --workload w2 --batch 1024

bench-micro: $(VENV)/ready ## micro-batches compared with batches of their size (three minutes)
	$(BIN)/python benchmarks/step.py --workload readme --micro 8 64 --rounds 5
	$(BIN)/python benchmarks/step.py --workload w1 --micro 8 64 --rounds 5

bench-quality: $(VENV)/ready ## AUC and log loss by samples/s on real streams, results to one file and the documentation (30 minutes, with --streams options another 35; 4 GB)
	$(BIN)/python benchmarks/quality.py run $(BENCH)

bench-cluster: $(VENV)/ready ## training with workers and parameter servers as processes; for a peer see the script
	$(BIN)/python benchmarks/cluster.py --workload w1
	$(BIN)/python benchmarks/cluster.py --workload w2 --batch 64

bench-stream: $(VENV)/ready servers ## training from JSON in Kafka (ten minutes, 8 GB of disk)
	$(BIN)/python benchmarks/stream.py --workload w1 --topology colocated
	$(BIN)/python benchmarks/stream.py --workload w1 --topology dedicated

bench-staleness: $(VENV)/ready ## how long workers wait for a slow one, by allowed staleness (two minutes)
	$(BIN)/python benchmarks/staleness.py

bench-workers: $(VENV)/ready ## AUC by number of workers (20 minutes)
	$(BIN)/python benchmarks/workers.py

bench-freshness: $(VENV)/ready servers ## from a sample produced to predictions that have learned it, under load (five minutes)
	$(BIN)/python benchmarks/freshness.py --every 1s
	$(BIN)/python benchmarks/freshness.py --every 100ms

bench-lookup: $(VENV)/ready ## what looking up rows costs a prediction, up to 10M rows (two minutes, 3 GB)
	$(BIN)/python benchmarks/lookup.py

bench-swaps: $(VENV)/ready servers ## swaps of versions while clients request predictions as fast as they can (two minutes)
	$(BIN)/python benchmarks/swaps.py

bench-publish: $(VENV)/ready servers ## what publishing costs training, and by itself (fifteen minutes)
	$(BIN)/python benchmarks/publish.py --topology colocated
	$(BIN)/python benchmarks/publish.py --topology dedicated
	$(BIN)/python benchmarks/publisher.py redis
	$(BIN)/python benchmarks/publisher.py shards

bench-realtime: $(VENV)/ready ## AUC by how often the model is published (ten minutes); MOVIELENS=its stream, see the script
	$(BIN)/python benchmarks/realtime.py flights --label-delay 0 10800 $(if $(MOVIELENS),movielens --stream $(MOVIELENS))

bench-path: $(VENV)/ready servers ## predictions over HTTP compared with the trainer's own (ten minutes); needs MOVIELENS=its stream
	$(if $(MOVIELENS),,$(error missing ratings, see benchmarks/example_models.py: make bench-path MOVIELENS=FILE))
	$(BIN)/python benchmarks/whole_path.py --stream $(MOVIELENS) --speed 10 1 60 600

chaos: $(VENV)/ready servers ## the whole service while everything goes wrong, and a count of what was learned; MINUTES=20
	@mkdir -p build
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),20) --report build/chaos.json

rolling: $(VENV)/ready servers ## ten rolling restarts of three workers and three joiners under a backlog of a million messages (ten minutes)
	$(BIN)/python -m tests.chaos.rolling

soak: $(VENV)/ready servers ## the whole service at full speed and overloaded, and its memory over time; MINUTES=20
	@mkdir -p build
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),20) --report build/soak.json --plot build/soak.svg

bench-checkpoint: $(VENV)/ready ## how fast checkpoints are written and restored, and how long they block pushes (minutes, 6 GB)
	$(BIN)/python benchmarks/checkpoint.py restore
	$(BIN)/python benchmarks/checkpoint.py pause

wheels: $(VENV)/ready ## the sdist and the wheels for x86-64 and aarch64, in dist/ (ten minutes)
	@.ci/wheels $(BIN)

smoke: ## install the wheel in dist/ without a compiler, then learn, serve and predict with it (three minutes)
	@$(PYTHON) .ci/smoke.py

check-arm: $(VENV)/ready ## compile the native core for Linux on aarch64
	@.ci/aarch64 $(BIN)

test-arm: $(VENV)/ready ## the tests of the native core on that of the aarch64 wheel in dist/, under qemu
	@.ci/test-arm $(BIN) tests/native

image: ## both images, streamtrain and streamtrain-slim, with docker or buildah; BASE= is another base
	@.ci/image

# Of a cluster that KUBECONFIG names; docs/kubernetes.md says more.
IMAGE ?=
SLIM_IMAGE ?=
VALUES ?=
LOSE ?=
ADDRESS ?=

kubernetes: $(VENV)/ready servers ## the chart on the Kubernetes of KUBECONFIG, or on one of three nodes on this machine, under load, while every part is replaced, killed or lost
ifdef KUBECONFIG # a cluster for tests: one of its nodes is drained, and one is lost if there is a way to
	@test -n "$(IMAGE)" || { echo "KUBECONFIG is $(KUBECONFIG); say which image its nodes pull, as IMAGE=REPOSITORY:TAG, or unset KUBECONFIG for nodes of this machine" >&2; exit 2; }
	$(BIN)/python -m tests.kubernetes --image $(IMAGE) $(if $(SLIM_IMAGE),--slim $(SLIM_IMAGE)) $(if $(VALUES),--values $(VALUES)) $(if $(LOSE),--lose "$(LOSE)") $(if $(ADDRESS),--address $(ADDRESS))
else # takes 20 minutes the first time; needs root, Go, containerd, runc and etcd
	@mkdir -p build && .ci/image build
	$(BIN)/python -m tests.kubernetes --image localhost/streamtrain:$$(cat build/version) --slim localhost/streamtrain-slim:$$(cat build/version) build/streamtrain.tar build/streamtrain-slim.tar
endif

sbom: $(VENV)/ready ## what an installation and the images consist of, as CycloneDX, in dist/sbom*.json
	@.ci/sbom $(BIN)

LOCK = $(BIN)/uv pip compile --universal --python-version 3.11 --upgrade --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" --quiet

# TensorFlow without CUDA where there is one, and none at all; its own requirements go with it.
FULL = <(echo 'tensorflow ; platform_machine != "x86_64"')
SLIM = <(echo 'tensorflow ; sys_platform == "never"'; echo 'keras ; sys_platform == "never"')

lock: $(VENV)/ready ## renew the locks, with hashes: requirements.lock, services/*.lock of the images, .ci/dev.lock of make test, .ci/wheels.lock of wheels
	$(LOCK) pyproject.toml --extra demo --extra formats --extra buckets --output-file requirements.lock
	$(LOCK) pyproject.toml --extra demo --extra dev --constraint requirements.lock --output-file .ci/dev.lock
	$(LOCK) pyproject.toml <(echo 'tensorflow-cpu ; platform_machine == "x86_64"') --extra demo --extra formats --extra buckets --constraint requirements.lock --override $(FULL) --output-file services/full.lock
	$(LOCK) pyproject.toml --extra formats --extra buckets --constraint services/full.lock --override $(SLIM) --output-file services/slim.lock
	$(LOCK) --group wheels --output-file .ci/wheels.lock

audit: $(VENV)/ready ## look for known vulnerabilities of what requirements.lock names
	$(BIN)/pip-audit --requirement requirements.lock --require-hashes --disable-pip --strict

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
