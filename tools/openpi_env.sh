#!/usr/bin/env bash
# Prepares .envs/openpi with the real client of openpi, unmodified, for test_gateway_clients.py: it wants an older NumPy than
# this package is tested with. Repeated, it does nothing. Fails where there is no network; those tests are then skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.envs/openpi
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
# typing_extensions is imported by it and not among its requirements.
wanted='openpi-client==0.1.2 typing_extensions'
[ "$(cat $environment/stamp 2>/dev/null)" != "$wanted" ] || exit 0

exec 9<tools/openpi_env.sh
flock 9
"$python" -m venv --clear "$environment"
# shellcheck disable=SC2086
"$environment/bin/python" -m pip --disable-pip-version-check install --quiet $wanted
printf '%s\n' "$wanted" >"$environment/stamp"
