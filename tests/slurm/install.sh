#!/usr/bin/env bash
# Installs what the cluster tests need (Slurm, munge, OpenMPI) and shellcheck. Needs Debian or Ubuntu, and root;
# elsewhere it says what will be skipped, and leaves everything as it is.
set -euo pipefail

packages=(slurm-wlm munge openmpi-bin libopenmpi-dev shellcheck)
missing=()
for package in "${packages[@]}"; do
    [[ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || missing+=("$package")
done
((${#missing[@]} > 0)) || exit 0

without() {
    cat >&2 <<MESSAGE
=====================================================================================
 $1
 THE CLUSTER TESTS WILL BE SKIPPED. To have them, on Debian or Ubuntu:
     sudo apt-get install --no-install-recommends ${missing[*]}
=====================================================================================
MESSAGE
    exit 0
}

command -v apt-get >/dev/null || without "Slurm is not installed, and this machine has no apt-get to install it with."
((EUID == 0)) || without "Slurm is not installed, and installing it needs root."

echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Packages start their daemons when installed; the tests start their own, and this machine should not get new services.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
# A fresh machine may still be updating itself, and a mirror may be busy.
apt_get() { apt-get -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5 "$@"; }
log=$(mktemp)
if ! { apt_get update && apt_get install --yes --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    without "apt-get could not install ${missing[*]} (the end of its output is above; all of it is in $log)."
fi
rm -f "$log"
