CARGO ?= cargo
CARGO_TARGET_DIR ?= target
FUZZ_SECONDS ?= 60
FUZZ_DEEP_RUNS = $(or $(FUZZ_RUNS),10000000)
SOAK_SECONDS ?= 1500
towline = $(CARGO_TARGET_DIR)/release/towline

.PHONY: help demo test check test-deep soak soak-report lint test-unit test-loom test-forced-tcp test-rdma test-gpu python stubs torch docs wheel bench bench-python bench-comm fuzz fuzz-deep fmt clean-tools

help:
	@echo "make demo             build the command, let two workers move memory, run the Python quick start"
	@echo "make test             everything that must pass before a change goes in"
	@echo "make check            the lints and the fast tests, for the inner loop"
	@echo "make test-deep        sanitizers, Miri, loom, a transport of one file and FUZZ_SECONDS ($(FUZZ_SECONDS)) of fuzzing, with a nightly toolchain"
	@echo "make soak             the campaigns under faults, the short form (all of it: $(towline) soak)"
	@echo "make soak-report      the campaigns for SOAK_SECONDS ($(SOAK_SECONDS); none: all rounds, about two hours), written to $(CARGO_TARGET_DIR)/reliability-report.md"
	@echo "make lint             only the checks that run no test"
	@echo "make test-unit        only the tests of the workspace"
	@echo "make test-loom        only the memory-ordering tests, under loom"
	@echo "make test-forced-tcp  the laws again, with every other path forbidden"
	@echo "make test-rdma        the path nixl over RDMA: boots a guest whose kernel has an RDMA device in software"
	@echo "make test-gpu         on a machine with a GPU: its tests, the sanitizer and the figures, written to $(CARGO_TARGET_DIR)/gpu-report.md"
	@echo "make python           build the Python package into .venv, check its types and test it"
	@echo "make stubs            generate the types of the native module anew from the Rust sources"
	@echo "make torch            test the Python package with real tensors, in .venv-torch"
	@echo "make docs             build the documentation site into $(CARGO_TARGET_DIR)/site"
	@echo "make wheel            build the Python wheel, check it and try it in a fresh environment"
	@echo "make bench            measure each path beside its limit"
	@echo "make bench-python     measure the Python package beside Rust (release build of both)"
	@echo "make bench-comm       measure groups of ranks beside the machine, and Open MPI and gloo where installed"
	@echo "make fuzz             fuzz the decoders and both sides of a session for FUZZ_SECONDS ($(FUZZ_SECONDS)) in all"
	@echo "make fuzz-deep        FUZZ_RUNS ($(FUZZ_DEEP_RUNS)) inputs for each side of a session; hours (fuzz/README.md)"
	@echo "make fmt              format the code"
	@echo "make clean-tools      remove what was installed in .tools, .venv and .venv-torch"

demo:
	$(CARGO) build --release -p towline-cli
	$(towline) demo
	@scripts/quickstart.sh

test:
	scripts/test.sh

check:
	scripts/test.sh check

test-deep:
	FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/test.sh deep

soak:
	$(CARGO) build --release -p towline-cli
	VIRTUAL_ENV=$(CURDIR)/.venv $(towline) soak --quick --html $(CARGO_TARGET_DIR)/soak.html

# With the tools in .venv (make python), the package is built as this commit has it, and the lanes of Python run too.
# What defences and crowds cost is measured by the same program on the same machine and stands at the end.
soak-report:
	$(CARGO) build --release -p towline-cli
	@if [ -x .venv/bin/maturin ]; then .venv/bin/maturin develop --release --manifest-path bindings/python/Cargo.toml; fi
	VIRTUAL_ENV=$(CURDIR)/.venv $(towline) soak $(if $(SOAK_SECONDS),--seconds $(SOAK_SECONDS)) --html $(CARGO_TARGET_DIR)/soak.html --report $(CARGO_TARGET_DIR)/reliability-report.md; status=$$?; \
	{ printf '\n## What defences and crowds cost\n\nBy `towline bench --filter ROWS`, in turns with the same request without the defence:\n\n'; \
	  for rows in defence register-each hub-1000-peers post; do $(towline) bench --filter $$rows | sed 's/^/    /'; echo; done; } \
	  >>$(CARGO_TARGET_DIR)/reliability-report.md; exit $$status

lint:
	scripts/test.sh fmt clippy doc decisions modules deny typos aarch64

test-unit:
	scripts/test.sh workspace

test-loom:
	scripts/test.sh loom

# TOWLINE_TEST_FORCE=tcp cargo test -p towline-testkit --test laws
test-forced-tcp:
	scripts/test.sh forced-tcp

# Needs QEMU, and a few hundred MB under target/; skipped with the reason where that cannot be had. Three minutes on two idle cores. Part of `make test`.
test-rdma:
	scripts/test.sh rdma

# Needs an NVIDIA driver; torch and CuPy for what is Python's (TOWLINE_GPU_PYTHON names their interpreter). Three minutes.
test-gpu:
	scripts/gpu-report.sh

python:
	TOWLINE_REQUIRE=python scripts/test.sh python

# Writes the stub of the native module anew from the Rust sources; `make python` fails where it is not what they say.
stubs:
	@[ -x .venv/bin/maturin ] || { echo "make stubs needs the tools that 'make python' installs"; exit 1; }
	.venv/bin/python scripts/stubs.py

torch:
	TOWLINE_REQUIRE=torch scripts/test.sh torch

docs:
	TOWLINE_REQUIRE=docs scripts/test.sh docs

wheel:
	scripts/wheel.sh

bench:
	$(CARGO) build --release -p towline-cli
	$(towline) bench

bench-python:
	@[ -x .venv/bin/maturin ] || { echo "make bench-python needs the tools that 'make python' installs"; exit 1; }
	$(CARGO) build --release -p towline-cli
	.venv/bin/maturin develop --release --manifest-path bindings/python/Cargo.toml
	$(towline) bench --python

bench-comm:
	$(CARGO) build --release -p towline-cli
	$(towline) bench comm

fuzz:
	TOWLINE_REQUIRE=fuzz FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/test.sh fuzz

# Only the two that are whole sides of a session, and as many inputs for each. FUZZ_JOBS: how many processes, two for each core unless set.
fuzz-deep:
	TOWLINE_REQUIRE=fuzz FUZZ_TARGETS="server user" FUZZ_RUNS=$(FUZZ_DEEP_RUNS) scripts/test.sh fuzz

fmt:
	$(CARGO) fmt --all -- crates/towline/src/transport/*.rs

clean-tools:
	rm -rf .tools .venv .venv-torch
