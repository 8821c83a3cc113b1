"""Builds the source distribution and, from it, the wheel, in dist/, and checks both: ``make package``.

    .envs/package/bin/python tools/package.py [--check] [--tag TAG]

The versions in pyproject.toml, package.xml and worldmodel_ros/__init__.py must agree, and CHANGELOG.rst must have a section of
that version, or one called Forthcoming until the release: with a tag (``v1.2.3``), the tag must be that version and have its
section. The wheel compiles the ROS messages, which takes some minutes; it is for the Python that builds it.
"""
from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest installs it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FORTHCOMING = 'Forthcoming'


def versions(root: Path) -> dict[str, str]:
    """Return the version in each file; '' if it has none."""
    init = re.search(r"^__version__ = '([^']*)'$", (root / 'worldmodel_ros' / '__init__.py').read_text(), re.MULTILINE)
    return {
        'pyproject.toml': tomllib.loads((root / 'pyproject.toml').read_text())['project'].get('version', ''),
        'package.xml': ElementTree.parse(root / 'package.xml').findtext('version', ''),
        'worldmodel_ros/__init__.py': init[1] if init else '',
    }


def sections(changelog: str) -> list[str]:
    """Return the titles of the changelog's sections, without their dates: ``1.2.3 (2026-01-31)`` -> ``1.2.3``."""
    return [title.partition(' (')[0] for title in re.findall(r'^(\S.*)\n-{3,}$', changelog, re.MULTILINE)]


def complaints(root: Path, tag: str = '') -> list[str]:
    """Return what is wrong with the versions of a source tree, for a release if there is a tag."""
    found = versions(root)
    version = found['pyproject.toml']
    wrong = [f'{name} says {other or "nothing"}, pyproject.toml {version}' for name, other in found.items() if other != version]
    known = sections((root / 'CHANGELOG.rst').read_text())
    if version not in known and (tag or FORTHCOMING not in known):
        wrong.append(f'CHANGELOG.rst has no section {version}' + ('' if tag else f', nor one called {FORTHCOMING}'))
    if tag and tag != f'v{version}':
        wrong.append(f'the tag is {tag}, the version {version}')
    return wrong


def missing(dist: Path) -> list[str]:
    """Return required files that the built archives lack."""
    (sdist,), (wheel,) = dist.glob('*.tar.gz'), dist.glob('*.whl')
    with tarfile.open(sdist) as archive:
        packed = {name.partition('/')[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        installed = archive.namelist()
    wanted = {'CMakeLists.txt', 'package.xml', 'CHANGELOG.rst', 'LICENSE', 'msg/ActionChunk.msg', 'worldmodel_ros/__init__.py'}
    lacking = [f'{sdist.name}: {name}' for name in sorted(wanted - packed)]
    for name in ('worldmodel_ros/__init__.py', 'worldmodel_ros/msg/_action_chunk.py', 'worldmodel_ros/weights/tiny/model.json',
                 'data/share/worldmodel_ros/package.xml', 'data/lib/worldmodel_ros/world_model_node'):
        if not any(path.endswith(name) for path in installed):
            lacking.append(f'{wheel.name}: {name}')
    return lacking


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='only compare the versions')
    parser.add_argument('--tag', default='', help='the tag of a release, such as v1.2.3')
    options = parser.parse_args()
    wrong = complaints(ROOT, options.tag)
    if not wrong and not options.check:
        dist = ROOT / 'dist'
        shutil.rmtree(dist, ignore_errors=True)
        subprocess.check_call([sys.executable, '-m', 'build', '--outdir', dist, ROOT])
        subprocess.check_call([sys.executable, '-m', 'twine', 'check', '--strict', *sorted(dist.iterdir())])
        wrong = missing(dist)
    for line in wrong:
        print(f'package: {line}', file=sys.stderr)
    return bool(wrong)


if __name__ == '__main__':
    sys.exit(main())
