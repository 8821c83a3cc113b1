#!/usr/bin/env bash
# Prepares a virtual environment .envs/GROUP with one dependency group of pyproject.toml, without this package and its
# dependencies: for building the documentation, linting and packaging. Repeated, it does nothing unless the group's
# versions have changed.
#
#     tools/group_env.sh docs && .envs/docs/bin/python tools/docs_site.py
set -euo pipefail
cd "$(dirname "$0")/.."

group=${1:?usage: tools/group_env.sh GROUP}
say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  die "$python is not Python 3.11 or later: name one, as in 'make $group PYTHON=python3.12'"
"$python" -c 'import ensurepip' 2>/dev/null || die "$python cannot make virtual environments: apt-get install python3-venv"

# Two at a time would write into one environment.
exec 9<tools/group_env.sh
flock 9

environment=.envs/$group
stamp=$environment/stamp
fingerprint=$({ pwd; "$python" -VV; cat pyproject.toml constraints.txt tools/group_env.sh; } | sha256sum)
[ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ] || exit 0

say "preparing $environment"
"$python" -m venv --clear "$environment"
pip=("$environment/bin/python" -m pip --disable-pip-version-check install --quiet)
"${pip[@]}" 'pip>=25.3'  # reads dependency groups
"${pip[@]}" -c constraints.txt --group "$group"
printf '%s\n' "$fingerprint" >"$stamp"
