# One entry point for people and for CI. `make` alone tells what there is.

SHELL := /bin/bash
PREFIX ?= /usr/local
DESTDIR ?=
# More words for `cargo test` and for the benchmark, for example:
#   make unit TEST_ARGS='redis'   make bench BENCH_ARGS='--memory 64MiB --runs 1'
TEST_ARGS ?=
# Labs that the end-to-end tests have up at once: they wait most of the time. With 3 two cores are idle for a third of it.
E2E_THREADS ?= 4
# Test executables of the crates that run at once, which mostly wait, too.
CRATES_AT_ONCE ?= 3
BENCH_ARGS ?= --memory 256MiB,1GiB,4GiB --runs 5 --mode precopy,hybrid,postcopy --compress off \
	--link 1gbit,1ms --baseline floor,bare
# What else does the job, where that ends in minutes; the moves beside it show what a stock CRIU costs.
STOCK_ARGS ?= --memory 256MiB,1GiB --runs 5 --mode precopy,cold --stock-criu --compress off \
	--link 1gbit,1ms --baseline stock-cold,stock-lazy,floor --stock-lazy-max 256MiB
# For example BENCH_ISA_ARGS='--part kernels --only cg --runs 3'.
BENCH_ISA_ARGS ?=
RESULTS := bench/results

# Where rustup's own installer puts cargo, for shells that do not have it in their path.
export PATH := $(PATH):$(HOME)/.cargo/bin
BINARIES := godwit godwitd godwit-shim godwit-runtime godwit-pager godwit-tar godwit-lab godwit-lab-link
# Of these the ones that users call have a link in PREFIX/bin; programs find each other in LIBEXEC.
CALLED := godwit godwitd godwit-lab
LIBEXEC := lib/godwit/bin
# What users get is the same wherever it was built: no path of the builder's is in it.
BUILT := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
RELEASE := RUSTFLAGS="--remap-path-prefix=$(CURDIR)=/godwit --remap-path-prefix=$(BUILT)=/godwit/target \
	--remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo $$RUSTFLAGS" cargo build --release
# For another instruction set (`make release TARGET=aarch64-unknown-linux-gnu`), with the linker of Debian's cross tools.
TARGET ?=
LINKER := $(subst -unknown,,$(TARGET))-gcc
ifneq ($(TARGET),)
RELEASED := --target $(TARGET) -p godwit-cli -p godwit-daemon -p godwit-memory -p godwit-engine -p godwit-shim -p godwit-lab -p godwit-lab-cli \
	-p godwit-cc -p godwit-isa-state --bins
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER ?= $(LINKER)
else
RELEASED := --workspace --bins
endif
# What install takes the programs from.
PROGRAMS ?= target/$(addsuffix /,$(TARGET))release
ISA_HOME ?= target/isa
# What writes man pages and completions.
NATIVE ?= $(PROGRAMS)
PACKAGES := target/packages
# The crates that build programs which change the instruction set, with the tests that need scripts/setup --isa.
ISA_FEATURES := --features godwit-isa-state/isa,godwit-isa-tests/isa,godwit-cc/isa,godwit-isa-programs/isa,godwit-isa-generate/isa,godwit-isa-packages/isa,godwit-crossing/isa
ISA_TESTS := -p godwit-isa-link -p godwit-isa-state -p godwit-isa-tests -p godwit-cc -p godwit-isa-programs -p godwit-isa-generate -p godwit-isa-packages -p godwit-crossing \
	$(ISA_FEATURES)
# Of these tests those that `make test` runs, so that each promise is tested once: passes and runtime, states, and
# what the compiler builds. Test by source file, with the tests of it if not all.
ISA_SELECTION := isa/tests/tests/passes.rs isa/tests/tests/refusals.rs isa/tests/tests/states.rs isa/tests/tests/fixed.rs isa/tests/tests/stress.rs=threads,jumps \
	isa/state/tests/moves.rs isa/state/tests/open.rs isa/state/tests/locks.rs \
	crates/crossing/tests/criu/main.rs \
	isa/cc/tests/isa/main.rs=driver::a_program_has,driver::what_cannot,signals::timers_that,signals::the_next_owner,programs::signals_reach_handlers_in_programs_that_can_move,programs::programs_that_can_move_have_children,rest::
# Tests of that kind to run with those of the crates; they need scripts/setup --isa.
ALSO ?=
# All that there is, and the tests that run only where they are named.
ALL := --workspace --all-targets $(ISA_FEATURES)
BY_NAME := --workspace --test e2e --test machines $(ISA_FEATURES)
# With clippy as the compiler, the workspace and all that it needs are compiled once for both: for what clippy says,
# warnings as errors, and for the programs and tests. `cargo clippy` sets the same two variables.
CLIPPY_COMPILES := RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
SAY = @printf '==> %s\n'

.DEFAULT_GOAL := help
.PHONY: help setup build release check test test-full test-machines test-isa test-isa-full isa base-image lint-isa lint style docs unit crates e2e demo bench bench-isa install install-isa packages packages-arm64 packages-rpm test-packages test-reproducible uninstall clean

help: ## say what the targets do
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## packages, a CRIU that works on this kernel, Rust (as root; quick when all is there)
	@scripts/setup

build: ## build everything for development
	$(SAY) "building"
	@cargo build $(ALL)
	@cargo build $(BY_NAME)

release: ## build the programs as they are installed
	$(SAY) "building the programs (release)"
	@$(RELEASE) $(RELEASED)

# Part after part, also with `make --jobs`: two of them would be in each other's way.
test: ## set-up, formatting, clippy, documentation, and each promise tested once (as root)
	@scripts/timed "set-up" scripts/setup --isa
	@scripts/timed "formatting, shellcheck, words" $(MAKE) --no-print-directory style
	@scripts/timed "documentation" $(MAKE) --no-print-directory docs
	@$(CLIPPY_COMPILES) $(MAKE) --no-print-directory unit ALSO="$(ISA_SELECTION)"
	$(SAY) "all tests passed"

test-full: ## make test in all combinations, then under eager huge pages, programs of all instruction sets, packages, machines, CRIU (hours)
	@scripts/timed "set-up" $(MAKE) --no-print-directory setup
	@scripts/timed "formatting, shellcheck, words" $(MAKE) --no-print-directory style
	@scripts/timed "documentation" $(MAKE) --no-print-directory docs
	@GODWIT_TEST_FULL=1 $(CLIPPY_COMPILES) $(MAKE) --no-print-directory unit
	@$(CLIPPY_COMPILES) $(MAKE) --no-print-directory test-engines
	@$(CLIPPY_COMPILES) scripts/timed "end-to-end tests under eager huge pages" scripts/with-huge-pages $(MAKE) --no-print-directory e2e
	@scripts/timed "programs that change the instruction set" $(MAKE) --no-print-directory test-isa-full
	@scripts/timed "Debian packages" $(MAKE) --no-print-directory test-packages test-reproducible
	@GODWIT_PACKAGES=$(CURDIR)/$(PACKAGES) $(CLIPPY_COMPILES) scripts/timed "moves between virtual machines" \
		$(MAKE) --no-print-directory test-machines TEST_ARGS=smoke
	@scripts/timed "fuzz targets" $(MAKE) --no-print-directory fuzz
	@scripts/timed "CRIU's own tests" $(MAKE) --no-print-directory test-criu
	$(SAY) "all tests passed"

check: ## formatting, clippy and what needs neither root nor set-up: minutes
	@$(MAKE) --no-print-directory lint
	@cargo test --workspace --lib --bins -- $(TEST_ARGS)

lint: style ## formatting, clippy with warnings as errors, shellcheck, spelling, links and English of the documents
	@cargo clippy $(ALL) -- -D warnings
	@cargo clippy $(BY_NAME) -- -D warnings

style:
	@cargo fmt --all --check
	@scripts/check-imports
	@shellcheck -x $(filter-out scripts/check-imports scripts/test-crates scripts/watched,$(wildcard scripts/*)) crates/lab/src/machine/image .ci/nightly .ci/run packaging/build packaging/cross packaging/reproduce packaging/test packaging/rpm/build packaging/rpm/test isa/build isa/install bench/java/measure isa/libc/build isa/libc/fetch isa/runtime/plain/build $(wildcard isa/base/*/build)
	@scripts/check-docs

docs: ## the documentation as a site, in target/site; a warning is an error
	@scripts/build-docs

# Each command selects the whole workspace, so that all is compiled once, with one set of features. The
# end-to-end tests drive the built programs, which `cargo test` alone would not build. Both kinds of tests run,
# whatever came of the first.
unit: ## all tests without the set-up and the instruction sets; TEST_ARGS chooses among them
	@scripts/timed "build$(if $(RUSTC_WORKSPACE_WRAPPER), and clippy)" cargo build $(ALL)
	@scripts/timed "build of the end-to-end tests" cargo build $(BY_NAME)
	@failed=0; \
	scripts/timed "tests of the crates" $(MAKE) --no-print-directory crates || failed=1; \
	scripts/timed "end-to-end tests" $(MAKE) --no-print-directory e2e || failed=1; \
	exit $$failed

crates:
	@scripts/test-crates $(CRATES_AT_ONCE) $(addprefix --also ,$(ALSO)) --workspace --lib --bins --tests $(ISA_FEATURES) -- $(TEST_ARGS)

e2e:
	@scripts/watched 1200 cargo test --workspace $(ISA_FEATURES) --test e2e -- --test-threads $(E2E_THREADS) $(TEST_ARGS)

.PHONY: test-engines
test-engines: setup ## real services in containers of Podman and of Docker, of Debian and of today, moved in every mode; minutes (as root)
	@scripts/timed "build" cargo build --workspace --bins $(ISA_FEATURES)
	@for engine in podman docker; do \
		GODWIT_TEST_FULL=1 GODWIT_TEST_ENGINE=$$engine scripts/timed "services in containers of $$engine" \
			$(MAKE) --no-print-directory e2e TEST_ARGS="redis:: mosquitto:: nginx:: postgres:: python:: files::moves watches:: \
			manage::a_user manage::files_are manage::who manage::figures $(TEST_ARGS)" || exit 1; \
	done
	@scripts/setup-engines
	@PATH="$$(scripts/setup-engines --where):$$PATH" GODWIT_TEST_FULL=1 scripts/timed "containers of engines of today" \
		$(MAKE) --no-print-directory e2e TEST_ARGS="podman docker $(TEST_ARGS)"
	@for engine in podman docker; do \
		PATH="$$(scripts/setup-engines --where):$$PATH" GODWIT_TEST_FULL=1 GODWIT_TEST_ENGINE=$$engine \
			scripts/timed "services in containers of a $$engine of today" \
			$(MAKE) --no-print-directory e2e TEST_ARGS="redis:: mosquitto:: nginx:: postgres:: python:: $(TEST_ARGS)" || exit 1; \
	done

.PHONY: fuzz
fuzz: ## each fuzz target for FUZZ_SECONDS (60); minutes (as root, on a machine that may break)
	@scripts/fuzz $(FUZZ_TARGETS)

.PHONY: test-criu
test-criu: ## CRIU's own tests with godwit's patches and without, compared; a quarter of an hour (as root)
	@scripts/test-criu $(TEST_ARGS)

test-machines: $(if $(GODWIT_PACKAGES),setup,packages-arm64) ## tests with virtual machines as nodes (Debian 12 and 13, Ubuntu 24.04) and on their kernels; minutes
	@scripts/setup --vm
	$(SAY) "building the programs"
	@cargo build --workspace --bins
	$(SAY) "running tests in virtual machines"
	@cargo test --package godwit-tests --test machines -- --ignored --nocapture --test-threads 1 $(TEST_ARGS)

.PHONY: test-arm64
test-arm64: $(if $(GODWIT_PACKAGES),setup,packages-arm64) ## Redis, nginx and Python move between two emulated arm64 machines; half an hour (as root)
	@scripts/setup --vm
	@scripts/timed "build" cargo build --workspace --bins $(ISA_FEATURES)
	@GODWIT_TEST_MACHINES=arm64 scripts/timed "moves between arm64 machines" $(MAKE) --no-print-directory e2e E2E_THREADS=1 \
		TEST_ARGS="redis::moves redis::a_service nginx::moves python::moves $(TEST_ARGS)"

.PHONY: test-crossing
test-crossing: ## the fault matrix, a thousand crossings, and crossings to an arm64 machine; an hour (as root)
	@scripts/setup --isa
	@scripts/timed "build" cargo build --workspace --bins $(ISA_FEATURES)
	@GODWIT_TEST_FULL=1 GODWIT_TEST_CROSSING=1 scripts/timed "faults while a Redis crosses" $(MAKE) --no-print-directory e2e \
		TEST_ARGS="failures_matrix:: redis::moves redis::a_service"
	@GODWIT_TEST_FULL=1 scripts/timed "a thousand crossings" $(MAKE) --no-print-directory e2e TEST_ARGS=crossing::
	@scripts/timed "crossings to an arm64 machine" $(MAKE) --no-print-directory test-machines TEST_ARGS=crossing::

test-isa: ## programs that change the instruction set: passes, runtime, a stress selection; minutes
	@scripts/setup --isa
	$(SAY) "testing programs that change the instruction set"
	@cargo test $(ISA_TESTS) --no-fail-fast -- $(TEST_ARGS)

test-isa-full: ## the same with all programs, 300 random ones, and those of the distribution's source packages; hours
	@scripts/setup --isa
	$(SAY) "testing programs that change the instruction set, and source packages"
	@cargo test $(ISA_TESTS) --no-fail-fast -- --include-ignored $(TEST_ARGS)

isa: ## godwit-cc, godwit-state and what they need: C library, plugin, runtime (needs scripts/setup --isa, once)
	$(SAY) "building godwit-cc and godwit-state"
	@$(RELEASE) -p godwit-cc -p godwit-isa-state --bins
	$(SAY) "building the C library, the plugin and the runtime"
	@isa/build target/isa

base-image: isa ## busybox and services on it, of both instruction sets, as images in target/base; BASE names some (an hour for all)
	@$(RELEASE) -p godwit-cli -p godwit-isa-packages --bins
	$(SAY) "building source packages, and packing images"
	@target/release/base-image target/base $(BASE)

lint-isa: ## formatting and clang-tidy of the C++ and C under isa/ (needs scripts/setup --isa, once)
	$(SAY) "checking isa/plugin and isa/runtime"
	@$(MAKE) --no-print-directory -C isa/plugin lint
	@$(MAKE) --no-print-directory -C isa/runtime lint

demo: setup release ## move a Redis with 200 MB and a busy client from one node to another (as root)
	$(SAY) "running the demo"
	@target/release/godwit lab demo

# Packages for the machine are made when something has changed that goes into them.
FOR_ARM64 := $(PACKAGES)/arm64.made
$(FOR_ARM64): $(wildcard $(shell git ls-files Cargo.toml Cargo.lock crates isa packaging scripts 2>/dev/null))
	@$(MAKE) --no-print-directory packages-arm64
	@touch $@

.PHONY: demo-isa
demo-isa: setup $(FOR_ARM64) ## have a Redis go to an arm64 machine and back under its client; the first time builds for an hour (as root)
	@scripts/setup --isa
	@scripts/setup --vm
	@$(MAKE) --no-print-directory base-image BASE=redis
	@$(MAKE) --no-print-directory release
	$(SAY) "running the demo"
	@target/release/godwit lab demo crossing

bench: setup release ## measure moves beside stock tools, and draw them in bench/results; BENCH_ARGS changes which
	$(SAY) "measuring moves"
	@target/release/godwit bench migrate $(BENCH_ARGS) --out $(RESULTS)/moves.jsonl
	@target/release/godwit bench migrate $(STOCK_ARGS) --out $(RESULTS)/stock.jsonl
	@target/release/godwit bench migrate --memory 256MiB --mode precopy --link 1gbit,1ms --busy --out $(RESULTS)/busy.jsonl
	$(SAY) "measuring the cut-over"
	@target/release/godwit bench cutover --out $(RESULTS)/cutover.jsonl
	@target/release/godwit bench cutover --cutover hold --pause 100,1000,5000 --out $(RESULTS)/pauses.jsonl
	$(SAY) "measuring parts"
	@target/release/godwit bench wire --out $(RESULTS)/wire.jsonl
	@target/release/godwit bench wire --veth --out $(RESULTS)/wire-veth.jsonl
	@target/release/godwit bench streams --out $(RESULTS)/streams.jsonl
	@target/release/godwit bench faults --out $(RESULTS)/faults.jsonl
	@target/release/godwit bench return --out $(RESULTS)/return.jsonl
	@target/release/godwit bench scan --out $(RESULTS)/scan.jsonl
	@target/release/godwit bench ports --out $(RESULTS)/ports.jsonl
	$(SAY) "drawing"
	@target/release/godwit bench plot $(RESULTS)/*.jsonl --out $(RESULTS)

# Times are those of the machine as it is: nothing else should run on it.
bench-isa: isa ## what it costs a program to be able to change the instruction set: bench/results/isa.json, docs/isa-costs.md
	$(SAY) "building the benchmark"
	@$(RELEASE) -p godwit-isa-bench
	$(SAY) "measuring programs that can change the instruction set"
	@target/release/godwit-isa-bench --godwit target/release/godwit-cc --results $(RESULTS)/isa.json \
		--page docs/isa-costs.md $(BENCH_ISA_ARGS)

install: ## install the programs, man pages, completions and the systemd unit under PREFIX
	@for binary in $(BINARIES); do test -x $(PROGRAMS)/$$binary || \
		{ echo "Error: $(PROGRAMS)/$$binary is not built: run 'make release' first." >&2; exit 1; }; done
	$(SAY) "installing under $(DESTDIR)$(PREFIX)"
	@install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/$(LIBEXEC)
	@install -m 755 $(BINARIES:%=$(PROGRAMS)/%) $(DESTDIR)$(PREFIX)/$(LIBEXEC)
	@# Earlier versions put the programs themselves there.
	@rm -f $(BINARIES:%=$(DESTDIR)$(PREFIX)/bin/%)
	@ln -s $(CALLED:%=../$(LIBEXEC)/%) $(DESTDIR)$(PREFIX)/bin
	@install -d $(DESTDIR)$(PREFIX)/share/man/man1
	@$(NATIVE)/godwit man $(DESTDIR)$(PREFIX)/share/man/man1
	@$(NATIVE)/godwitd man $(DESTDIR)$(PREFIX)/share/man/man1
	@install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions \
		$(DESTDIR)$(PREFIX)/share/zsh/site-functions $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	@$(NATIVE)/godwit completions bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/godwit
	@$(NATIVE)/godwit completions zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_godwit
	@$(NATIVE)/godwit completions fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/godwit.fish
	@install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	@sed 's|/usr/local/bin|$(PREFIX)/bin|' packaging/godwitd.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/godwitd.service
	@echo "    'godwit cluster init' founds a cluster and starts the node's daemon; 'godwit cluster join TOKEN' joins one"

install-isa: ## install godwit-cc, godwit-state and what they need under PREFIX ('make isa' builds them)
	$(SAY) "installing the tool chain for two instruction sets under $(DESTDIR)$(PREFIX)"
	@isa/install $(PROGRAMS) $(ISA_HOME) $(DESTDIR)$(PREFIX) $(NATIVE)

packages: ## Debian packages of what is installed, and of CRIU, in target/packages (as root)
	@scripts/setup --packages
	@$(MAKE) --no-print-directory release isa
	$(SAY) "CRIU for the package"
	@scripts/setup-criu --stage $(PACKAGES)/criu
	@packaging/build $(PROGRAMS) $(ISA_HOME) $(PACKAGES)/criu $(PACKAGES)

packages-arm64: packages ## the same for arm64
	@rustup target add aarch64-unknown-linux-gnu
	@$(MAKE) --no-print-directory release TARGET=aarch64-unknown-linux-gnu
	$(SAY) "building the plugin for arm64"
	@isa/build target/isa-arm64 aarch64-linux-gnu
	$(SAY) "CRIU for arm64"
	@packaging/cross criu $(PACKAGES)/criu $(PACKAGES)/criu-arm64
	@packaging/build target/aarch64-unknown-linux-gnu/release target/isa-arm64 $(PACKAGES)/criu-arm64 $(PACKAGES) arm64 $(PROGRAMS)
	$(SAY) "lintian"
	@lintian --allow-root --no-cfg --profile debian --fail-on error,warning $(PACKAGES)/*_arm64.deb

packages-rpm: packages ## RPMs of godwit and godwit-criu for Fedora, of the same programs, with tests
	@packaging/rpm/build $(PACKAGES)
	@packaging/rpm/test $(PACKAGES)

test-packages: $(if $(filter arm64,$(shell dpkg --print-architecture)),packages,packages-arm64) ## lintian, and the packages in new roots of Debian 12 and 13, and of arm64: minutes
	@scripts/setup --vm
	@packaging/test $(PACKAGES)

test-reproducible: packages ## the packages once more from a clone, and byte for byte the same: minutes
	@packaging/reproduce $(PACKAGES)

uninstall: ## remove what install put there; state in /var/lib/godwit stays
	$(SAY) "removing from $(DESTDIR)$(PREFIX)"
	@rm -f $(BINARIES:%=$(DESTDIR)$(PREFIX)/bin/%) $(BINARIES:%=$(DESTDIR)$(PREFIX)/$(LIBEXEC)/%) \
		$(DESTDIR)$(PREFIX)/share/man/man1/godwit.1 $(DESTDIR)$(PREFIX)/share/man/man1/godwit-*.1 \
		$(DESTDIR)$(PREFIX)/share/man/man1/godwitd.1 $(DESTDIR)$(PREFIX)/share/man/man1/godwitd-*.1 \
		$(DESTDIR)$(PREFIX)/share/bash-completion/completions/godwit \
		$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_godwit \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/godwit.fish \
		$(DESTDIR)$(PREFIX)/lib/systemd/system/godwitd.service
	@isa/install --remove $(DESTDIR)$(PREFIX)

clean: ## remove what was built
	$(SAY) "removing target/"
	@cargo clean
