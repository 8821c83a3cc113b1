"""The package's own descriptions agree with one another and with what the code uses."""
import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ament_index_python import get_package_prefix
from catkin_pkg.package import parse_package
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import worldmodel_ros

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
PACKAGE = parse_package(str(ROOT / 'package.xml'))

# Import name: (name for pip, rosdep key; None: the distribution has none, or too old a version)
THIRD_PARTY = {
    'av': ('av', None),
    'PIL': ('pillow', 'python3-pil'),
    'cuda': ('cuda-bindings', None),
    'cv2': ('opencv-python-headless', 'python3-opencv'),
    'diffusers': ('diffusers', None),
    'lz4': ('lz4', None),
    'matplotlib': ('matplotlib', 'python3-matplotlib'),
    'mcap': ('mcap', None),
    'mujoco': ('mujoco', None),
    'numba': ('numba', None),
    'numpy': ('numpy', 'python3-numpy'),
    'msgspec': ('msgspec', None),
    'obstore': ('obstore', None),
    'onnx': ('onnx', None),
    'onnxruntime': ('onnxruntime', None),
    'onnxscript': ('onnxscript', None),
    'pyarrow': ('pyarrow', None),
    'ray': ('ray', None),
    'rerun': ('rerun-sdk', None),
    'rosbags': ('rosbags', None),
    'safetensors': ('safetensors', None),
    'tensorboard': ('tensorboard', None),
    'torch': ('torch', None),
    'transformers': ('transformers', None),
    'tqdm': ('tqdm', None),
    'triton': ('triton', None),
    'websockets': ('websockets', None),
    'yaml': ('pyyaml', 'python3-yaml'),
    'zstandard': ('zstandard', None),
}
# Part of a ROS 2 distribution, but not on PyPI: what uses them must also work without them.
DISTRIBUTION_ONLY = {'cv_bridge', 'launch', 'launch_ros', 'ros2launch', 'tf2_msgs'}
# What only some use is in an extra: Triton, which torch brings for CUDA GPUs, and CUDA's own functions, what shows a training's
# progress, the network gateway, object stores and Ray for fleets, and VAE and text encoder of open world models.
EXTRAS = {'triton': 'gpu', 'cuda': 'gpu', 'tensorboard': 'train', 'tqdm': 'train', 'websockets': 'net', 'msgspec': 'net',
          'av': 'net', 'obstore': 'store', 'ray': 'ray', 'rerun': 'view', 'diffusers': 'wan', 'transformers': 'wan'}


def requirements(lines):
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def dependencies():
    return requirements(PROJECT['project']['dependencies'])


def run_time_keys():
    return {d.name for d in [*PACKAGE.exec_depends, *PACKAGE.buildtool_export_depends]}


def constraints():
    lines = (ROOT / 'constraints.txt').read_text().splitlines()
    return requirements(line for line in lines if line and not line.startswith('#'))


def imported():
    """Map each top-level module that is imported from outside the package to the files that import it."""
    found = {}
    generated = {ROOT / 'worldmodel_ros' / folder for folder in ('action', 'msg', 'srv')}
    for path in [*ROOT.glob('worldmodel_ros/**/*.py'), *ROOT.glob('launch/*.py'), *ROOT.glob('scripts/*')]:
        if generated.intersection(path.parents):
            continue
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])
            for name in names:
                found.setdefault(name.split('.')[0], set()).add(str(path.relative_to(ROOT)))
    return {name: files for name, files in found.items()
            if name != 'worldmodel_ros' and name not in sys.stdlib_module_names}


def test_package_xml_is_valid():
    warnings = []
    parse_package(str(ROOT / 'package.xml'), warnings=warnings)
    assert not warnings
    assert PACKAGE.get_build_type() == 'ament_cmake'
    assert 'rosidl_interface_packages' in [group.name for group in PACKAGE.member_of_groups]


def test_all_files_name_one_version():
    assert PACKAGE.version == PROJECT['project']['version'] == worldmodel_ros.__version__
    changelog = (ROOT / 'CHANGELOG.rst').read_text()
    assert f'\n{PACKAGE.version} (' in changelog or '\nForthcoming\n' in changelog


def test_every_import_from_elsewhere_is_declared_for_pip_and_for_rosdep():
    pip, keys = dependencies(), run_time_keys()
    extras = {name: requirements(lines) for name, lines in PROJECT['project']['optional-dependencies'].items()}
    undeclared = []
    for name, files in sorted(imported().items()):
        by_pip, by_rosdep = THIRD_PARTY.get(name, (f'ros-jazzy-{name}'.replace('_', '-'), name))
        if name not in DISTRIBUTION_ONLY and by_pip not in (extras[EXTRAS[name]] if name in EXTRAS else pip):
            undeclared.append(f'{by_pip} in pyproject.toml, for {sorted(files)}')
        if by_rosdep and by_rosdep not in keys:
            undeclared.append(f'{by_rosdep} in package.xml, for {sorted(files)}')
    assert not undeclared


def test_pip_and_rosdep_are_told_the_same():
    by_pip = dict(THIRD_PARTY.values())
    expected = {by_pip[name] if name in by_pip else name.removeprefix('ros-jazzy-').replace('-', '_')
                for name in dependencies()}
    assert expected - {None} == run_time_keys() - DISTRIBUTION_ONLY


def test_what_is_built_against_is_what_runs():
    """Type support is compiled against the messages' C structures: another release of them may differ."""
    built = requirements(PROJECT['build-system']['requires'])
    run = dependencies()
    both = [name for name in built if name.startswith('ros-jazzy-') and name in run]
    assert 'ros-jazzy-std-msgs' in both
    assert {name: built[name].specifier for name in both} == {name: run[name].specifier for name in both}


def test_constraints_pin_every_direct_dependency_to_a_version_it_allows():
    pinned = constraints()
    wanted = [*PROJECT['project']['dependencies'], *PROJECT['project']['optional-dependencies']['test'],
              *[r for r in PROJECT['build-system']['requires'] if r.startswith('ros-')]]
    for name, requirement in requirements(wanted).items():
        assert name in pinned, f'{name} is not in constraints.txt'
        (pin,) = pinned[name].specifier
        assert pin.operator == '=='
        assert requirement.specifier.contains(pin.version), f'{requirement}, but {pinned[name]}'


@pytest.mark.parametrize('script', sorted(p.name for p in ROOT.glob('scripts/*')))
def test_executable_is_installed_where_ros2_run_looks_for_it(script):
    source = ROOT / 'scripts' / script
    installed = Path(get_package_prefix('worldmodel_ros')) / 'lib' / 'worldmodel_ros' / script
    assert os.access(installed, os.X_OK), f'{installed} is missing or not executable: install again'
    assert installed.read_text() == source.read_text()
    # The first python3 on PATH, so that a virtual environment laid over a distribution is respected.
    assert source.read_text().startswith('#!/usr/bin/env python3\n')
    imports = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        assert find_spec(node.module), f'{source} imports {node.module}, which does not exist'


def test_every_node_has_an_executable():
    declared = {p.name for p in ROOT.glob('scripts/*')}
    assert {'world_model_node', 'command_gate', 'sim_robot'} <= declared


def test_weights_are_small_enough_for_git():
    large = {str(p.relative_to(ROOT)): p.stat().st_size for p in ROOT.glob('worldmodel_ros/**/*.safetensors')
             if p.stat().st_size >= 16 * 2 ** 20}
    assert not large


@pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')
def test_generated_and_built_files_are_ignored_by_git():
    made = {'worldmodel_ros/msg/_action_chunk.py', 'worldmodel_ros/srv/__init__.py',
            'worldmodel_ros/worldmodel_ros_s__rosidl_typesupport_c.so', 'build/x', 'install/x', 'log/x',
            '.venv/x', 'out/demo/summary.json'}
    written = {'msg/ActionChunk.msg', 'srv/WhatIf.srv', 'worldmodel_ros/nodes/common/qos.py', '.ci/run'}
    done = subprocess.run(['git', 'check-ignore', *made, *written], cwd=ROOT, capture_output=True, text=True)
    assert set(done.stdout.split()) == made
