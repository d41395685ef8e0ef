# What the set-up scripts share: how they speak, and how they install packages. To be sourced.
# shellcheck shell=bash

# Where godwit looks for its own helper programs first.
# shellcheck disable=SC2034
GODWIT_LIBEXEC=/usr/local/lib/godwit/bin
# Programs of crates that the scripts need, in the versions that they name.
# shellcheck disable=SC2034
GODWIT_TOOLS=${GODWIT_CACHE:-${HOME:-/root}/.cache/godwit}/tools

say() { printf '==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
die() {
    printf 'Error: %s\n' "$*" >&2
    exit 1
}

# Closes what whoever started this script left open: a dump fails on files it cannot open again.
close_inherited() {
    local path descriptor
    for path in "/proc/$BASHPID/fd/"*; do
        descriptor=${path##*/}
        [ "$descriptor" -le 2 ] || exec {descriptor}>&-
    done
}

# Runs the named function when the script ends, however it ends.
exit_actions=()
at_exit() {
    exit_actions+=("$1")
    trap run_exit_actions EXIT
}
run_exit_actions() {
    local action
    for action in "${exit_actions[@]}"; do "$action"; done
}

# One field of /etc/os-release.
os_release() { (
    # shellcheck disable=SC1091
    . /etc/os-release
    printf '%s' "${!1:-unknown}"
); }

# Is version $1 at least $2?
at_least() { dpkg --compare-versions "$1" ge "$2"; }

is_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# The version apt would install of package $1; empty when it knows none.
candidate_version() { LC_ALL=C apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: //p' | grep -v '^(none)$' || true; }

# apt-get without questions, waiting for another apt to end instead of failing.
apt() { DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq "$@"; }

# Once in a run: the scripts that this one starts see it too.
apt_update() {
    if [ -z "${GODWIT_APT_UPDATED:-}" ]; then
        note "reading the package lists"
        apt update || die "apt-get update failed (see above): check the machine's apt sources and its network."
        export GODWIT_APT_UPDATED=1
    fi
}

# Installs those of the given packages that are missing, without starting their services.
install_packages() {
    local missing=() package
    for package in "$@"; do
        is_installed "$package" || missing+=("$package")
    done
    if [ "${#missing[@]}" -eq 0 ]; then
        note "all $# are installed"
        return
    fi
    apt_update
    note "installing ${missing[*]}"
    local log
    log=$(mktemp)
    hold_services
    if ! apt install -y --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}" >"$log" 2>&1; then
        release_services
        tail -n 30 "$log" >&2
        rm -f "$log"
        die "the packages could not be installed; apt's last lines are above."
    fi
    rm -f "$log"
    release_services
    if [ -d /run/systemd/system ]; then
        note "no service was started; one that its package enabled starts with the machine: 'systemctl disable NAME' if that is not wanted"
    fi
}

# Maintainer scripts ask /usr/sbin/policy-rc.d before they start a service; 101 means no.
POLICY=/usr/sbin/policy-rc.d
POLICY_SAVED=/usr/sbin/policy-rc.d.before-godwit-setup
hold_services() {
    at_exit release_services
    # A copy that is there already is from a run that was killed: it is the real one.
    if [ -e "$POLICY" ] && [ ! -e "$POLICY_SAVED" ] && ! grep -q 'godwit scripts/setup' "$POLICY"; then
        mv "$POLICY" "$POLICY_SAVED"
    fi
    printf '#!/bin/sh\n# godwit scripts/setup: start no service while packages are installed.\nexit 101\n' >"$POLICY"
    chmod 755 "$POLICY"
}
release_services() {
    if [ -e "$POLICY_SAVED" ]; then
        mv -f "$POLICY_SAVED" "$POLICY"
    elif [ -e "$POLICY" ] && grep -q 'godwit scripts/setup' "$POLICY"; then
        rm -f "$POLICY"
    fi
}
