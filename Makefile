# One entry point for people and for CI. `make` alone tells what there is.

SHELL := /bin/bash
PREFIX ?= /usr/local
DESTDIR ?=
# More words for `cargo test` and for the benchmark, for example:
#   make test TEST_ARGS='redis'   make bench BENCH_ARGS='--memory 64MiB --runs 1'
TEST_ARGS ?=
BENCH_ARGS ?= --memory 256MiB,1GiB,4GiB --runs 5 --mode precopy,hybrid,postcopy --compress off \
	--link 1gbit,1ms --baseline floor
# What else does the job, where that ends in minutes; the moves beside it show what a stock CRIU costs.
STOCK_ARGS ?= --memory 256MiB,1GiB --runs 5 --mode precopy,cold --stock-criu --compress off \
	--link 1gbit,1ms --baseline stock-cold,stock-lazy,floor --stock-lazy-max 256MiB
RESULTS := bench/results

# Where rustup's own installer puts cargo, for shells that do not have it in their path.
export PATH := $(PATH):$(HOME)/.cargo/bin
BINARIES := godwit godwitd godwit-shim godwit-pager godwit-lab-link
SAY = @printf '==> %s\n'

.DEFAULT_GOAL := help
.PHONY: help setup build release test lint unit demo bench install uninstall clean

help: ## say what the targets do
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## packages, a CRIU that works on this kernel, Rust (as root; quick when all is there)
	@scripts/setup

build: ## build everything for development
	$(SAY) "building"
	@cargo build --workspace --all-targets

release: ## build the programs as they are installed
	$(SAY) "building the programs (release)"
	@cargo build --release --workspace --bins

test: setup lint unit ## everything: set-up, formatting, clippy, unit and end-to-end tests (as root)
	$(SAY) "all tests passed"

lint: ## formatting, clippy with warnings as errors, shellcheck
	$(SAY) "checking the formatting"
	@cargo fmt --all --check
	$(SAY) "checking the scripts"
	@shellcheck -x scripts/* .ci/run
	$(SAY) "running clippy"
	@cargo clippy --workspace --all-targets -- -D warnings

# The end-to-end tests drive the built programs, which `cargo test` alone would not build.
unit: ## unit and end-to-end tests without the set-up; TEST_ARGS chooses among them
	$(SAY) "building the programs"
	@cargo build --workspace --bins
	$(SAY) "running the tests"
	@cargo test --workspace --no-fail-fast -- $(TEST_ARGS)

demo: setup release ## move a Redis with 200 MB and a busy client from one node to another (as root)
	$(SAY) "running the demo"
	@target/release/godwit lab demo

bench: setup release ## measure moves beside stock tools, and draw them in bench/results; BENCH_ARGS changes which
	$(SAY) "measuring moves"
	@target/release/godwit bench migrate $(BENCH_ARGS) --out $(RESULTS)/moves.jsonl
	@target/release/godwit bench migrate $(STOCK_ARGS) --out $(RESULTS)/stock.jsonl
	@target/release/godwit bench migrate --memory 256MiB --mode precopy --link 1gbit,1ms --busy --out $(RESULTS)/busy.jsonl
	$(SAY) "measuring the cut-over"
	@target/release/godwit bench cutover --out $(RESULTS)/cutover.jsonl
	$(SAY) "measuring parts"
	@target/release/godwit bench wire --out $(RESULTS)/wire.jsonl
	@target/release/godwit bench wire --veth --out $(RESULTS)/wire-veth.jsonl
	@target/release/godwit bench lanes --out $(RESULTS)/lanes.jsonl
	@target/release/godwit bench faults --out $(RESULTS)/faults.jsonl
	@target/release/godwit bench return --out $(RESULTS)/return.jsonl
	@target/release/godwit bench scan --out $(RESULTS)/scan.jsonl
	$(SAY) "drawing"
	@target/release/godwit bench plot $(RESULTS)/*.jsonl --out $(RESULTS)

install: ## install the programs, man pages, completions and the systemd unit under PREFIX
	@for binary in $(BINARIES); do test -x target/release/$$binary || \
		{ echo "Error: target/release/$$binary is not built: run 'make release' first." >&2; exit 1; }; done
	$(SAY) "installing under $(DESTDIR)$(PREFIX)"
	@install -d $(DESTDIR)$(PREFIX)/bin
	@install -m 755 $(BINARIES:%=target/release/%) $(DESTDIR)$(PREFIX)/bin
	@install -d $(DESTDIR)$(PREFIX)/share/man/man1
	@target/release/godwit man $(DESTDIR)$(PREFIX)/share/man/man1
	@install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions \
		$(DESTDIR)$(PREFIX)/share/zsh/site-functions $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	@target/release/godwit completions bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/godwit
	@target/release/godwit completions zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_godwit
	@target/release/godwit completions fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/godwit.fish
	@install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	@sed 's|/usr/local/bin|$(PREFIX)/bin|' packaging/godwitd.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/godwitd.service
	@echo "    the node's daemon: make it a member with 'godwit cluster init' or 'godwit cluster join', then 'systemctl enable --now godwitd'"

uninstall: ## remove what install put there; state in /var/lib/godwit stays
	$(SAY) "removing from $(DESTDIR)$(PREFIX)"
	@rm -f $(BINARIES:%=$(DESTDIR)$(PREFIX)/bin/%) $(DESTDIR)$(PREFIX)/share/man/man1/godwit.1 \
		$(DESTDIR)$(PREFIX)/share/man/man1/godwit-*.1 \
		$(DESTDIR)$(PREFIX)/share/bash-completion/completions/godwit \
		$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_godwit \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/godwit.fish \
		$(DESTDIR)$(PREFIX)/lib/systemd/system/godwitd.service

clean: ## remove what was built
	$(SAY) "removing target/"
	@cargo clean
