# How scripts fetch the upstream archive of a source package from the distribution, with an apt
# configuration of their own: /etc/apt is not touched, and apt checks signatures and sums as ever.
# To be sourced after common.sh; the caller has a directory $scratch of its own, and reads in $why
# what went wrong.
# shellcheck shell=bash disable=SC2154

# Debian's archive is known on Debian; on another distribution its user names it, where its own has
# no source that does.
DEBIAN_ARCHIVE=${GODWIT_DEBIAN_ARCHIVE:-}

# Downloads the upstream archive of package $3 from series $2 of distribution $1 into $4.
fetch_source() {
    local distribution=$1 suite=$2 package=$3 into=$4 components=main archives uri
    [ "$distribution" = debian ] || components='main universe'
    if [ "$distribution" = "$(os_release ID)" ]; then
        mapfile -t archives < <(own_archives "$distribution")
    elif [ -z "$DEBIAN_ARCHIVE" ]; then
        why="this is not Debian: set GODWIT_DEBIAN_ARCHIVE to the address of a Debian archive to take its source."
        return 1
    elif [ -n "$(candidate_version debian-archive-keyring)" ]; then
        is_installed debian-archive-keyring || install_packages debian-archive-keyring
        archives=("$DEBIAN_ARCHIVE")
    else
        why="the package debian-archive-keyring, which has the keys to check it with, is in no archive that this machine's apt uses."
        return 1
    fi
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

# The addresses of the distribution's main archive that this machine's apt uses.
own_archives() {
    local label=Debian
    [ "$1" != ubuntu ] || label=Ubuntu
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(LABEL)|$(REPO_URI)' 'Created-By: Packages' | sed -n "s/^$label|//p" | sort -u
}
