"""Builds the wheel: the Python package, the generated messages and their type support, lib/ and share/.

CMake, by the CMakeLists.txt that colcon uses too, installs into a staging prefix; the pieces come from there. CMAKE_ARGS of
the environment is passed on to it.
"""
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from distutils.command.install_data import install_data as _install_data  # setuptools' own copy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel as _bdist_wheel
from setuptools.command.build_py import build_py as _build_py

NAME = 'worldmodel_ros'
HERE = Path(__file__).resolve().parent
GENERATED = ('action', 'msg', 'srv')
ALONG = 'tf2_msgs'  # messages that are in no wheel; a distribution has them


def prefixes():
    """Return where ROS 2 packages may be: the interpreter's own prefix or pip's build environment, a sourced install."""
    candidates = []
    try:
        import ament_package
        candidates += Path(ament_package.__file__).resolve().parents
    except ImportError:
        pass
    return candidates + [Path(p) for p in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep) if p]


def ros_prefix():
    """Return the prefix of the ROS 2 build packages: pip's build environment, a venv, a sourced install."""
    for prefix in prefixes():
        if (prefix / 'share' / 'ament_cmake_core').is_dir():
            return prefix
    raise SystemExit(f'{NAME}: the ROS 2 build packages (ros-jazzy-ament-cmake, ...) are not installed. '
                     "Build in isolation ('pip install .' without --no-build-isolation), or source ROS 2.")


def builds_along():
    """Whether ALONG has to be built, because no distribution is sourced that has it; what an earlier install of this package
    has left in its own environment is replaced."""
    return not any((prefix / 'share' / ALONG).is_dir() for prefix in prefixes() if prefix != Path(sys.prefix))


_staged = None


def stage(build_temp):
    """Build and install with CMake into a staging prefix, once for all commands, and return the prefix."""
    global _staged
    if _staged is None:
        build, prefix = (Path(build_temp).resolve() / name for name in ('cmake', 'stage'))
        # A CMake cache of an earlier run names tools of a build environment that pip has deleted since.
        shutil.rmtree(build, ignore_errors=True)
        shutil.rmtree(prefix, ignore_errors=True)
        ros = ros_prefix()
        env = dict(os.environ)
        env['AMENT_PREFIX_PATH'] = os.pathsep.join(filter(None, [str(ros), env.get('AMENT_PREFIX_PATH')]))
        generator = ['-G', 'Ninja'] if shutil.which('ninja') else []
        subprocess.check_call(
            ['cmake', '-S', str(HERE), '-B', str(build), *generator, '-DCMAKE_BUILD_TYPE=Release',
             '-DBUILD_TESTING=OFF', f'-DCMAKE_PREFIX_PATH={ros}', f'-DCMAKE_INSTALL_PREFIX={prefix}',
             f'-DBUILD_TF2_MSGS={"ON" if builds_along() else "OFF"}',
             f'-DPython3_EXECUTABLE={sys.executable}', '-DPython3_FIND_VIRTUALENV=ONLY',
             *shlex.split(os.environ.get('CMAKE_ARGS', ''))], env=env)
        jobs = str(os.cpu_count() or 1)
        subprocess.check_call(['cmake', '--build', str(build), '--parallel', jobs], env=env)
        subprocess.check_call(['cmake', '--install', str(build)], env=env, stdout=subprocess.DEVNULL)
        _staged = prefix
    return _staged


def site_packages(prefix):
    return prefix / Path(sysconfig.get_path('purelib', vars={'base': ''})).relative_to('/')


def copy_tree(source, target):
    """Copy the files of an installed Python package, without byte code and generated C sources."""
    for path in source.rglob('*'):
        relative = path.relative_to(source)
        if path.is_file() and '__pycache__' not in relative.parts and path.suffix != '.c':
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / relative)


class build_py(_build_py):
    """Takes the Python package from the staging prefix, where CMake has put the generated modules into it."""

    def run(self):
        python = site_packages(stage(self.get_finalized_command('build').build_temp))
        staged = python / NAME
        if self.editable_mode:
            # The source tree is imported as it is, so the generated modules go there (git-ignored).
            for folder in GENERATED:
                shutil.rmtree(HERE / NAME / folder, ignore_errors=True)
                copy_tree(staged / folder, HERE / NAME / folder)
            for library in staged.glob('*.so'):
                shutil.copy2(library, HERE / NAME / library.name)
        else:
            # setuptools keeps build/lib between runs: a module deleted since would come back.
            shutil.rmtree(Path(self.build_lib) / NAME, ignore_errors=True)
            copy_tree(staged, Path(self.build_lib) / NAME)
            copy_tree(python / ALONG, Path(self.build_lib) / ALONG)


class install_data(_install_data):
    """Ships the rest of the staging prefix: lib/ (libraries, executables), share/ and include/."""

    def run(self):
        prefix = stage(self.get_finalized_command('build').build_temp)
        python = site_packages(prefix)
        # An editable install has no folder for packages but the source tree, which must not hold those of others.
        along = python / ALONG if self.get_finalized_command('build_py').editable_mode else None
        files = {}
        for path in prefix.rglob('*'):
            relative = path.relative_to(prefix)
            # pip makes bin/worldmodel by itself, from the entry point in pyproject.toml.
            if path.is_dir() or (python in path.parents and along not in path.parents) or relative.parts[0] == 'bin':
                continue
            # parent_prefix_path names the build environment, which is gone when the wheel is installed.
            if relative.parts[-2] != 'parent_prefix_path' and path.suffix not in ('.c', '.pyc'):
                files.setdefault(str(relative.parent), []).append(str(path))
        self.data_files = sorted(files.items())
        super().run()


class bdist_wheel(_bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True

    def has_data(self):
        # Asked by editable_wheel only: without it an editable install lacks lib/ and share/.
        return True


setup(
    distclass=BinaryDistribution,
    cmdclass={'build_py': build_py, 'install_data': install_data, 'bdist_wheel': bdist_wheel},
    data_files=[('share/' + NAME, ['package.xml'])],  # replaced by install_data with the staged tree
)
