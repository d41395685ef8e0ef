# How scripts fetch the upstream archive of a source package from this machine's distribution, with an apt
# configuration of their own: /etc/apt is not touched, and apt checks signatures and sums as ever.
# To be sourced after common.sh; the caller has a directory $scratch of its own, and reads in $why
# what went wrong.
# shellcheck shell=bash disable=SC2154

# Downloads the upstream archive of package $1 of this machine's series into $2.
fetch_source() {
    local package=$1 into=$2 components=main archives uri distribution suite
    distribution=$(os_release ID) suite=$(os_release VERSION_CODENAME)
    [ "$distribution" = debian ] || components='main universe'
    mapfile -t archives < <(own_archives "$distribution")
    mkdir -p "$scratch/lists/partial" "$into"
    # apt drops its rights for downloads, and must be able to write there.
    chmod 755 "$scratch"
    if id _apt >/dev/null 2>&1 && [ "$(id -u)" -eq 0 ]; then
        chown _apt "$scratch/lists/partial" "$into"
    fi
    for uri in "${archives[@]}"; do
        printf 'deb-src [signed-by=/usr/share/keyrings/%s-archive-keyring.gpg] %s %s %s\n' \
            "$distribution" "$uri" "$suite" "$components" >"$scratch/sources.list"
        note "looking for the source of $package in $distribution's $suite"
        private_apt update >"$scratch/apt.log" 2>&1 || continue
        # Only the archive: mirrors that are snapshots may miss the .dsc.
        if (cd "$into" && private_apt source --tar-only --download-only "$package/$suite" >>"$scratch/apt.log" 2>&1); then
            return
        fi
    done
    [ ! -e "$scratch/apt.log" ] || tail -n 5 "$scratch/apt.log" >&2
    # An archive may have it, but be out of date.
    why=$(sed -n 's/^E: /apt says: /p' "$scratch/apt.log" 2>/dev/null | head -n 1) || true
    [ -n "$why" ] || why="no archive that this machine's apt uses has its source."
    return 1
}

# apt-get with a source list, package lists and caches of its own.
private_apt() {
    apt-get -q -o Dir::Etc::SourceList="$scratch/sources.list" -o Dir::Etc::SourceParts=- \
        -o Dir::State::Lists="$scratch/lists" -o Dir::Cache::PkgCache= -o Dir::Cache::SrcPkgCache= "$@"
}

# The address of an archive of Debian: the one that this machine's apt uses, or, on another distribution, the one that
# its user names.
debian_archive() {
    local archive
    archive=$(own_archives debian | head -n 1)
    archive=${archive:-${GODWIT_DEBIAN_ARCHIVE:-}}
    [ -n "$archive" ] || die "this is not Debian: set GODWIT_DEBIAN_ARCHIVE to the address of a Debian archive."
    printf '%s\n' "$archive"
}

# The addresses of the distribution's main archive that this machine's apt uses.
own_archives() {
    local label=Debian
    [ "$1" != ubuntu ] || label=Ubuntu
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(LABEL)|$(REPO_URI)' 'Created-By: Packages' | sed -n "s/^$label|//p" | sort -u
}
