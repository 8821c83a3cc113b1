"""
Builds the package by pip and by colcon in environments of their own, and runs what was installed.

The messages are compiled twice: here for a Python that is not the one of this session, if there is one, by pip; and for this
one by colcon, in test_packaging_colcon.py. Here a message and a service are, there a message: that all interfaces
can be generated and compiled has been seen when this session's own environment was made, from the same CMakeLists.txt. Of
every other version, what differs is looked at: whether it can read the code, and whether what it needs is there.
"""
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest
from environments import clean_environment, run

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ('3.10', '3.11', '3.12')
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
# Enough to talk; the rest of the dependencies take no part in the build, and ``make setup`` installs them all.
RUN_TIME = ['numpy', *[d for d in PROJECT['project']['dependencies'] if d.startswith('ros-')]]

# What is looked at is what gets installed, not its speed: half of the time of a build is the optimiser's. And to precompile
# headers costs more than to read them for two interfaces; the session's own environment was made with them.
QUICKLY = [*(f'-DCMAKE_{language}_FLAGS_RELEASE=-O0' for language in ('C', 'CXX')), '-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON']

# Runs in the environment under test.
PROBE = textwrap.dedent('''
    import os
    import sys
    from pathlib import Path

    import rclpy
    import worldmodel_ros
    from worldmodel_ros.msg import ActionChunk

    prefix = Path(sys.argv[1])
    package = Path(worldmodel_ros.__file__).parent
    assert prefix in package.parents, f'imported from {package}'
    for executable in ('world_model_node', 'command_gate', 'sim_robot', 'worldmodel'):
        assert os.access(prefix / 'lib' / 'worldmodel_ros' / executable, os.X_OK), executable
    share = prefix / 'share' / 'worldmodel_ros'
    for name in ('package.xml', 'config/fastdds_large_images.xml', 'msg/ActionChunk.msg'):
        assert (share / name).is_file(), name
    assert list(share.glob('launch/*.launch.py'))
    missing = [name for name in sys.argv[2:] if not (package / name).is_file()]
    assert not missing, missing

    rclpy.init()
    node = rclpy.create_node('probe')
    received = []
    node.create_subscription(ActionChunk, 'chunk', received.append, 1)
    publisher = node.create_publisher(ActionChunk, 'chunk', 1)
    for _ in range(200):
        publisher.publish(ActionChunk(sequence=5, values=[0.5, -0.25]))
        rclpy.spin_once(node, timeout_sec=0.05)
        if received:
            break
    assert received[0].sequence == 5 and list(received[0].values) == [0.5, -0.25]
    if 'srv/_session_file.py' in sys.argv:
        from worldmodel_ros.srv import SessionFile
        assert (share / 'srv' / 'SessionFile.srv').is_file()
        node.create_service(SessionFile, 'save_session', lambda request, response: response)
    print('works on', sys.version.split()[0])
''')


def find_python(version):
    """Return a working interpreter of a version, or None."""
    places = [f'python{version}', *map(str, Path(os.environ.get('PYENV_ROOT', Path.home() / '.pyenv')).glob(
        f'versions/{version}.*/bin/python{version}'))]
    for place in places:
        path = shutil.which(place)
        if path and subprocess.run([path, '-c', 'import ctypes, ssl'], capture_output=True).returncode == 0:
            return path
    return None


def python_to_build_for():
    """Return the oldest version that is here and not this session's; where there is none, this session's."""
    own = '{}.{}'.format(*sys.version_info)
    return next((version for version in PYTHONS if version != own and find_python(version)), own)


def pip(python, *arguments):
    """Install with this environment's pip into another one, which saves giving each its own."""
    run([sys.executable, '-m', 'pip', '--python', python, 'install', '-q', '--no-compile', '-c', ROOT / 'constraints.txt',
         *arguments], env=clean_environment(CMAKE_ARGS=' '.join(QUICKLY)))


def copy_source(target):
    """Copy the source tree without what an editable install and earlier builds have left in it."""
    top = shutil.ignore_patterns('.*', 'build', 'install', 'log', 'out', 'dist', '*.egg-info', '__pycache__')

    def ignore(directory, names):
        ignored = set(top(directory, names))
        if Path(directory) == ROOT / 'worldmodel_ros':
            ignored |= {n for n in names if n in ('action', 'msg', 'srv') or n.endswith('.so')}
        return ignored

    return Path(shutil.copytree(ROOT, target, ignore=ignore, copy_function=copy_briefly))


def copy_briefly(source, target):
    """Copy a file; of weights, 59 MB that each build would compress, their first bytes: none is loaded here."""
    if Path(source).suffix != '.safetensors':
        return shutil.copy2(source, target)
    with open(source, 'rb') as weights:
        Path(target).write_bytes(weights.read(64))
    return target


MESSAGE = {'msg/ActionChunk.msg'}
SERVICE = {'srv/SessionFile.srv'}  # the one with the fewest fields: what is generated for a service grows with them


def leave_out_other_interfaces(source, kept):
    """Have a copy of the source declare and hold no interfaces but those."""
    file = source / 'CMakeLists.txt'
    text = file.read_text()
    declared = set(re.findall(r'^  "((?:msg|srv|action)/\w+\.\w+)"\n', text, re.MULTILINE))
    there = {str(path.relative_to(source)) for folder in ('msg', 'srv', 'action') for path in (source / folder).iterdir()}
    assert declared == there and declared > kept
    for name in declared - kept:
        text = text.replace(f'  "{name}"\n', '')
        (source / name).unlink()
    file.write_text(text)


def expected_of(source):
    """What the installed Python package must hold: the code, the data, and the generated modules."""
    package = source / 'worldmodel_ros'
    written = [str(p.relative_to(package)) for p in package.rglob('*')
               if p.suffix in ('.py', '.json', '.safetensors', '.xml', '.yaml')]
    return [*written, 'msg/__init__.py', 'msg/_action_chunk.py',
            *(['srv/_session_file.py'] if (source / 'srv' / 'SessionFile.srv').exists() else [])]


def install_by_pip(version, folder):
    """Install the package for a Python in an environment of its own; return what its probe printed."""
    source, prefix = copy_source(folder / 'source'), folder / 'venv'
    leave_out_other_interfaces(source, MESSAGE | SERVICE)
    expected = expected_of(source)
    run([find_python(version), '-m', 'venv', '--without-pip', prefix], env=clean_environment())
    python = prefix / 'bin' / 'python'
    pip(python, *RUN_TIME)
    pip(python, '--no-deps', source)
    assert (prefix / 'bin' / 'worldmodel').is_file()
    environment = clean_environment(AMENT_PREFIX_PATH=str(prefix))
    # No wheel has this one: it is built along.
    run([python, '-c', 'from tf2_msgs.msg import TFMessage; TFMessage.__class__.__import_type_support__()'], cwd=folder,
        env=environment)
    return run([python, '-c', PROBE, prefix, *expected], cwd=folder, env=environment)


@pytest.mark.slow
@pytest.mark.build
def test_an_installation_by_pip_in_isolation_gives_nodes_that_talk(build_folder):
    version = python_to_build_for()
    assert f'works on {version}.' in install_by_pip(version, build_folder)


@pytest.mark.parametrize('version', PYTHONS)
def test_every_version_of_python_can_read_the_code(version):
    python = find_python(version)
    if python is None:
        pytest.skip(f'no python{version} on PATH or in pyenv')
    code = 'import sys; [compile(open(name, "rb").read(), name, "exec", dont_inherit=True) for name in sys.argv[1:]]'
    files = [path for folder in ('worldmodel_ros', 'scripts', 'launch', 'test', 'benchmarks')
             for path in (ROOT / folder).rglob('*') if path.suffix == '.py' or (folder == 'scripts' and path.is_file())]
    assert len(files) > 200
    run([python, '-I', '-c', code, *files])


def test_a_source_distribution_has_all_that_a_build_needs(tmp_path):
    source = copy_source(tmp_path / 'source')
    code = 'import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))'
    printed = run([sys.executable, '-c', code, tmp_path], cwd=source)
    with tarfile.open(tmp_path / printed.splitlines()[-1]) as archive:
        packed = {name.partition('/')[2] for name in archive.getnames()}
    needed = {str(path.relative_to(source)) for folder in ('action', 'cmake', 'config', 'launch', 'msg', 'scripts', 'srv')
              for path in (source / folder).rglob('*') if path.is_file()}
    needed |= {f'worldmodel_ros/{path.relative_to(source / "worldmodel_ros")}'
               for path in (source / 'worldmodel_ros').rglob('*') if path.is_file()}
    needed |= {'CMakeLists.txt', 'LICENSE', 'README.md', 'package.xml', 'pyproject.toml', 'setup.py'}
    assert not needed - packed
    assert not [name for name in packed if name.startswith(('worldmodel_ros/msg/', 'worldmodel_ros/srv/'))]
