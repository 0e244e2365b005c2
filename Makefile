# The front door: `make help`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard streamtrain/_native/*)
SECONDS_OF_DEMO ?= 0

.DEFAULT_GOAL := help
.PHONY: help system servers demo kafka test test-native sanitize check fmt bench bench-scale bench-quick bench-core bench-step bench-quality bench-cluster bench-stream bench-staleness bench-checkpoint bench-freshness bench-lookup bench-swaps bench-publish bench-realtime bench-path chaos lock audit fuzzers fuzz soak clean

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

# One virtual environment with everything; made again when the dependencies or the native core change.
$(VENV)/ready: pyproject.toml $(NATIVE) | system
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing streamtrain and building its core into $(VENV) (about a minute the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
	@touch $@

demo: $(VENV)/ready ## the whole service on a year of real flights, with live figures, until Ctrl-C
	@$(BIN)/streamtrain demo $(if $(filter-out 0,$(SECONDS_OF_DEMO)),--for $(SECONDS_OF_DEMO))

kafka: $(VENV)/ready servers ## one Kafka broker at localhost:9092, until Ctrl-C
	@$(BIN)/python -m streamtrain.embedded.kafka

test: $(VENV)/ready servers fuzzers sanitize ## all tests, and those of the native core once more under sanitizers
	$(BIN)/pytest

test-native: $(VENV)/ready ## the tests of the native core alone
	$(BIN)/pytest tests/native

sanitize: $(VENV)/ready ## the tests of the native core with AddressSanitizer and UndefinedBehaviorSanitizer
	@.ci/sanitize $(BIN)

fuzz: $(VENV)/ready fuzzers ## every fuzzer for MINUTES=10 each, with sanitizers; what is found is kept in build/fuzz
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10) $(TARGETS)

check: $(VENV)/ready ## ruff and mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(VENV)/ready ## format the Python code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready servers ## all benchmarks in turns, into one file and the documentation (45 minutes, 12 GB); for peers see docs/performance.md
	$(BIN)/python benchmarks/bench.py run $(BENCH)

bench-scale: $(VENV)/ready servers ## by workers, shards and rows up to 100M, into the same file (40 minutes, 16 GB)
	$(BIN)/python benchmarks/bench.py run --parts scale $(BENCH)

bench-quick: $(VENV)/ready ## a few ratios beside those that were accepted; fails if one has lost a fifth (three minutes)
	@$(BIN)/python benchmarks/quick.py $(BENCH)

bench-core: $(VENV)/ready ## the native core beside NumPy and msgspec (a few minutes, 8 GB)
	$(BIN)/python benchmarks/core_table.py
	$(BIN)/python benchmarks/core_decode.py

bench-step: $(VENV)/ready ## the whole training step beside plain TensorFlow (a few minutes, 12 GB)
	$(BIN)/python benchmarks/step.py --workload w1
	$(BIN)/python benchmarks/step.py --workload w2 --batch 64
	$(BIN)/python benchmarks/step.py --workload w2 --batch 1024

bench-quality: $(VENV)/ready ## how well the flights model learns; MovieLens needs its stream, see the script
	$(BIN)/python benchmarks/quality.py flights

bench-cluster: $(VENV)/ready ## workers and parameter servers as processes; for a peer beside them see the script
	$(BIN)/python benchmarks/cluster.py --workload w1
	$(BIN)/python benchmarks/cluster.py --workload w2 --batch 64

bench-stream: $(VENV)/ready servers ## from JSON in Kafka to what is learned (ten minutes, 8 GB of disk)
	$(BIN)/python benchmarks/stream.py --workload w1 --topology colocated
	$(BIN)/python benchmarks/stream.py --workload w1 --topology dedicated

bench-staleness: $(VENV)/ready ## how long workers wait for a slow one, by the staleness allowed (two minutes)
	$(BIN)/python benchmarks/staleness.py

bench-freshness: $(VENV)/ready servers ## from a sample produced to predictions that have learned it, under load (five minutes)
	$(BIN)/python benchmarks/freshness.py --every 1s
	$(BIN)/python benchmarks/freshness.py --every 100ms

bench-lookup: $(VENV)/ready ## what looking rows up costs a prediction, up to 10M rows (two minutes, 3 GB)
	$(BIN)/python benchmarks/lookup.py

bench-swaps: $(VENV)/ready servers ## swaps of versions while clients ask as fast as they can (two minutes)
	$(BIN)/python benchmarks/swaps.py

bench-publish: $(VENV)/ready servers ## what publishing costs training, and by itself (fifteen minutes)
	$(BIN)/python benchmarks/publish.py --topology colocated
	$(BIN)/python benchmarks/publish.py --topology dedicated
	$(BIN)/python benchmarks/dictionaries.py

bench-realtime: $(VENV)/ready ## what publishing often buys in AUC (ten minutes); MOVIELENS=its stream, see the script
	$(BIN)/python benchmarks/realtime.py flights --label-delay 0 10800 $(if $(MOVIELENS),movielens --stream $(MOVIELENS))

bench-path: $(VENV)/ready servers ## predictions over HTTP beside the trainer's own (ten minutes); needs MOVIELENS=its stream
	$(if $(MOVIELENS),,$(error give the ratings, see benchmarks/quality.py: make bench-path MOVIELENS=FILE))
	$(BIN)/python benchmarks/whole_path.py --stream $(MOVIELENS) --speed 10 1 60 600

chaos: $(VENV)/ready servers ## the whole service while everything goes wrong, and a count of what was learned; MINUTES=20
	@mkdir -p build
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),20) --report build/chaos.json

soak: $(VENV)/ready servers ## the whole service at full speed and overloaded, and its memory over time; MINUTES=20
	@mkdir -p build
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),20) --report build/soak.json --plot build/soak.svg

bench-checkpoint: $(VENV)/ready ## how fast checkpoints are restored, and how long their cuts hold pushes back (minutes, 6 GB)
	$(BIN)/python benchmarks/checkpoint.py restore
	$(BIN)/python benchmarks/checkpoint.py pause

lock: $(VENV)/ready ## renew requirements.lock: what the image has, with versions and hashes
	$(BIN)/uv pip compile pyproject.toml --extra demo --extra formats --universal --python-version 3.11 --upgrade \
	  --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet --output-file requirements.lock

audit: $(VENV)/ready ## look for known vulnerabilities of what requirements.lock names
	$(BIN)/pip-audit --requirement requirements.lock --require-hashes --disable-pip --strict

clean: ## remove what the other targets made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
