# The only set-up that a fresh machine needs: each target makes .venv where there is none.
#
#   make run         measure the default grid on whatever this machine has; prints where the report is
#   make gate        what repeats exactly (registers, spills, traced bytes, …) against the committed baseline
#   make test        the fast tier (what CI runs on every change)
#   make test-full   the fast tier and the long suites, on the oldest Triton too, and those between
#   make test-oldest the kernel tests on the oldest supported Triton
#   make test-gluon-3.7.1  every compile of the Gluon kernels on that Triton
#   make h100-peers  the bundled kernel beside the fastest others on an H100
#   make fuzz        random command lines and files for FUZZ_S seconds (600), then how many there were
#   make lint        ruff and mypy
#   make docs        the docs as a site in build/site; a warning is an error
#   make baseline    what the exact gate holds changes to, from the code as it is: commit the result on purpose
#
# TORCH=…  another torch: a version (TORCH=2.11.0), a wheel (TORCH=./torch-….whl) or a requirement.

PYTHON ?= python3
TORCH ?= 2.13.0
ARGS ?=
FUZZ_S ?= 600
FUZZ_SEED ?= 1

VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)/triton-3.6.0
# Triton's versions between the oldest and the newest
BETWEEN := 3.7.1 3.8.0
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# what Triton makes of the Gluon kernels
GLUON_TESTS := $(patsubst %,tests/test_%.py,flash_v3_aot flash_v3_backward_aot flash_v3_fp8_aot hopper_ptxas)
# what the oldest Triton is held to
KERNEL_TESTS := $(patsubst %,tests/test_%.py,flash_kernel flash_aot trace kv_outside kv_outside_aot flash_fp8 fp8_aot fp8_trace decode decode_model decode_aot interpreter hopper_ready) $(GLUON_TESTS)
TORCH_REQUIREMENT := $(if $(shell echo '$(TORCH)' | grep -E '^[0-9]'),torch==$(TORCH),$(TORCH))
# PYTHONPATH of a caller must not leak another package set into the tests
export PYTHONPATH :=

PEERS := flashbench-out/h100-peers

.PHONY: run h100-peers test test-full test-oldest fuzz lint docs gate measured-exactly baseline clean

run: $(VENV)/.run-installed
	$(BIN)/flashbench run $(ARGS)

h100-peers: $(VENV)/.run-installed
	$(BIN)/flashbench run --config configs/h100-peers.toml --out $(PEERS) $(ARGS)
	$(BIN)/python tools/peers_table.py $(PEERS)/results.jsonl

test: $(VENV)/.test-installed
	$(PYTEST) -m "not slow" $(ARGS)

test-full: $(OLDEST)/.installed $(VENV)/.fleet-installed $(BETWEEN:%=test-gluon-%)
	$(PYTEST) --hypothesis-profile=others $(ARGS)
	PYTHONPATH=$(OLDEST) $(PYTEST) $(KERNEL_TESTS)

test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(PYTEST) -m "not slow" $(KERNEL_TESTS)

# A file is one process's, which compiles each kernel once.
test-gluon-%: $(VENV)/triton-%/.installed
	PYTHONPATH=$(VENV)/triton-$* $(PYTEST) --dist loadfile $(GLUON_TESTS)

fuzz: $(VENV)/.test-installed
	FLASHBENCH_FUZZ_S=$(FUZZ_S) FLASHBENCH_FUZZ_SEED=$(FUZZ_SEED) \
		$(BIN)/python -m pytest -rP -q tests/test_fuzz.py $(ARGS)

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo build/site/index.html

gate: measured-exactly
	$(BIN)/flashbench compare $(VENV)/gate.json --baseline configs/baselines/ci-static --fail-on changed || \
		{ echo "If this is meant: make baseline, and commit configs/baselines" >&2; exit 1; }

measured-exactly: $(VENV)/.test-installed
	$(BIN)/flashbench gate --config configs/ci-static.toml --out $(VENV)/gate.json

baseline: measured-exactly
	$(BIN)/flashbench baseline save $(VENV)/gate.json --name ci-static --store configs/baselines

clean:
	rm -rf $(VENV)

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: flashbench needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Pass PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH_REQUIREMENT)"
	@touch $@

$(VENV)/.run-installed: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.test-installed: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[test,lint]'
	@touch $@ $(VENV)/.run-installed

# What the tests of fleets run on: a local Ray cluster, jobs of submitit.
$(VENV)/.fleet-installed: $(VENV)/.test-installed
	$(BIN)/python -m pip install --quiet -e '.[ray,slurm]'
	@touch $@

$(VENV)/.docs-installed: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@

# Another Triton lies beside the newest, in a folder that PYTHONPATH puts first;
# the oldest's interpreter needs numpy < 2.4.
.PRECIOUS: $(VENV)/triton-%/.installed
$(VENV)/triton-%/.installed: $(VENV)/.test-installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) 'triton==$*' 'numpy<2.4'
	@touch $@
