#!/usr/bin/env bash
# Prepares what `make demo` and `make test` need: system packages by apt, the virtual environment .venv, and this
# project in it (editable). When everything is there already it asks neither apt nor the network. With --tests, also
# what only the tests use.
set -euo pipefail
cd "$(dirname "$0")/.."

for_tests=
[ "${1:-}" != --tests ] || for_tests=yes

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# Two at a time would write into one .venv.
exec 9<tools/setup.sh
flock 9

supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    supported "$PYTHON" || die "PYTHON=$PYTHON is not a Python that the ROS 2 wheels are built for: 3.10, 3.11 or 3.12"
    python=$PYTHON
    return
  fi
  for candidate in .venv/bin/python python3 python3.12 python3.11 python3.10; do
    if supported "$candidate"; then python=$candidate; return; fi
  done
  if command -v python3 >/dev/null; then
    die "$(python3 --version) is not supported: the ROS 2 wheels are built for Python 3.10, 3.11 and 3.12." \
      "Install one of them and name it, as in 'make setup PYTHON=python3.12'"
  fi
  python=
}

# What is missing of what Debian must provide, looked for by what is used and not by the package's name, which
# differs between releases. Fills `packages` and `reasons`.
missing_packages() {
  packages=() reasons=()
  need() { packages+=("$1"); reasons+=("$1 ($2)"); }
  local libraries
  libraries=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
  [[ $libraries == *libOSMesa.so* ]] || need libosmesa6 'the simulator draws without a screen or a GPU'
  command -v g++ >/dev/null || need g++ 'compiles the ROS messages'
  if [ -z "$python" ]; then
    need python3 'runs everything'
    need python3-dev 'headers to compile the ROS messages'
    need python3-venv 'makes .venv'
  else
    "$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null ||
      need python3-dev 'headers to compile the ROS messages'
    [ -x .venv/bin/python ] || "$python" -c 'import ensurepip' 2>/dev/null || need python3-venv 'makes .venv'
  fi
  # Ubuntu has it as a snap alone, which no container installs: there the tests of the report are skipped.
  if [ "$for_tests" ] && grep -q '^ID=debian' /etc/os-release 2>/dev/null; then
    command -v chromium google-chrome >/dev/null || need chromium 'looks at the evaluation report in the tests'
  fi
}

install_packages() {
  local as_root=()
  command -v apt-get >/dev/null ||
    die "this is not Debian or Ubuntu: install by your system's own means what these packages hold: ${reasons[*]}"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "as root, run: apt-get install ${packages[*]}"
    as_root=(sudo)
  fi
  say "installing system packages${as_root:+ with sudo}:"
  printf 'setup:   %s\n' "${reasons[@]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq)
  "${apt[@]}" update
  "${apt[@]}" install -y --no-install-recommends "${packages[@]}" >/dev/null
}

# Everything that decides what gets installed. The Python code and config/ are not in it: they are used in place.
fingerprint() {
  {
    pwd
    "$python" -VV
    find setup.py pyproject.toml package.xml CMakeLists.txt constraints.txt action cmake msg srv scripts tools/setup.sh \
      -type f -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum
}

install_torch() {
  local version
  .venv/bin/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null && return
  [ -e /dev/nvidiactl ] && return  # the default build, which the project's own dependencies bring, is for CUDA
  version=$(sed -n 's/^torch==//p' constraints.txt)+cpu
  say "installing PyTorch $version"
  # pip's own configuration may know a place that has it; if not, PyTorch's own index does.
  if "${pip[@]}" --dry-run --no-deps "torch==$version" >/dev/null 2>&1; then
    "${pip[@]}" "torch==$version"
  else
    "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu "torch==$version" ||
      say 'the CPU build of PyTorch is not to be had: taking the default one, with several GB of CUDA libraries'
  fi
}

find_python
missing_packages
if [ ${#packages[@]} -gt 0 ]; then
  install_packages
  find_python
  [ -n "$python" ] || die "no Python 3.10, 3.11 or 3.12 after installing ${packages[*]}"
fi

stamp=.venv/worldmodel_ros.stamp
if [ "$(cat $stamp 2>/dev/null)" = "$(fingerprint)" ] && [ -e worldmodel_ros/action/__init__.py ]; then
  exit 0
fi
rm -f $stamp

if [ "$(.venv/bin/python -VV 2>&1)" != "$("$python" -VV)" ] ||
  ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
"${pip[@]}" 'pip>=25.3'  # the first that can constrain the build environment too
install_torch
say 'installing the dependencies and building the ROS messages (a few minutes the first time)'
# Without the warning that setuptools prints at every editable install.
PYTHONWARNINGS=ignore "${pip[@]}" -c constraints.txt --build-constraint constraints.txt -e '.[test]'
python=.venv/bin/python
fingerprint >$stamp
say 'done'
