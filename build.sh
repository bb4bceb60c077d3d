#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The one entry point; see ./build.sh --help. Its work is in tools/build.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

stop() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Nothing of the caller's Python set-up may reach the build.
unset "${!PYTHON@}" VIRTUAL_ENV CONDA_PREFIX
export PYTHONUTF8=1 # in any locale

case "$(uname -s)-$(uname -m)" in
Linux-x86_64 | Linux-aarch64) ;;
*) stop "this runs on Linux, x86-64 or aarch64; here is $(uname -s) $(uname -m)" ;;
esac
command -v git >/dev/null || stop "git is not installed"
git_version=$(git version)
if ! [[ $git_version =~ ([0-9]+)\.([0-9]+) ]] ||
    ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] < 2032)); then
    stop "git 2.32 or later is needed; here is $git_version"
fi

python=
for candidate in python3 python python3.11 python3.12 python3.13; do
    if "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [[ -z $python ]]; then
    found=$(python3 --version 2>&1 || true)
    stop "Python 3.11, 3.12 or 3.13 with its venv module is needed on PATH;" \
        "python3 here is: ${found:-missing}. The pinned versions are for these."
fi

exec "$python" -s -m tools.build "$@"
