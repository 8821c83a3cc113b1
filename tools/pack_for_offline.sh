#!/bin/bash
# Packs this package and the ROS 2 wheels for a machine that has Python with PyTorch but no network: one archive, to be
# unpacked over a virtual environment there. Weights are not in it.
#
#   tools/pack_for_offline.sh python3.12 out/offline.tar.xz
#
#   tar -xJf offline.tar.xz -C "$(python3 -c 'import sys; print(sys.prefix)')"    # there, with the same Python
#   python3 benchmarks/ros_tick.py
set -euo pipefail
python=$1 archive=$(realpath -m "$2") root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Tracked and new files alone: builds and caches of this machine stay here.
mkdir "$work/source"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work/source" 2>/dev/null) || true
"$python" -m venv "$work/build" "$work/venv"
mapfile -t ros < <(grep -oE '^  "ros-jazzy-[a-z0-9-]+==[0-9.]+"' "$root/pyproject.toml" | tr -d ' "')
"$work/build/bin/pip" -q wheel -c "$root/constraints.txt" -w "$work/wheels" "${ros[@]}" pyyaml
"$work/build/bin/pip" -q wheel --no-deps -w "$work/wheels" "$work/source"
rm -f "$work"/wheels/{numpy,setuptools}-*  # numpy comes with PyTorch
"$work/venv/bin/pip" -q install --no-deps "$work"/wheels/*.whl

# What only compiles against ROS, and what makes a virtual environment, stays behind.
cd "$work/venv"
rm -rf include bin lib64 pyvenv.cfg share/*/cmake lib/python*/site-packages/worldmodel_ros/weights \
    lib/python*/site-packages/{pip,pip-*,setuptools,setuptools-*,pkg_resources}
find . -name '*.a' -delete
find . -name '__pycache__' -prune -exec rm -rf {} +
# Wheels have no links: a library comes once for each of its names, and for each package that brings it along.
"$python" - <<'PYTHON'
import hashlib, os
from pathlib import Path
first = {}
for path in sorted(path for path in Path('.').rglob('*.so*') if path.is_file()):
    same = first.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
    if same is not path:
        path.unlink()
        os.link(same, path)
PYTHON
mkdir -p "$(dirname "$archive")"
tar -cf - . | xz -T2 -6 > "$archive"
du -h "$archive"
