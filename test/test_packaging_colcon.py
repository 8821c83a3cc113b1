"""
Builds the package by colcon in a workspace of its own, and runs what was installed.

With one of the interfaces: here, how colcon builds and installs the package (see test_packaging_builds.py).
"""
import os
import sys

import pytest
from environments import clean_environment, run
from test_packaging_builds import (
    MESSAGE, PROBE, PROJECT, QUICKLY, RUN_TIME, copy_source, expected_of, leave_out_other_interfaces, pip)


@pytest.mark.slow
@pytest.mark.build
def test_an_installation_by_colcon_gives_nodes_that_talk(build_folder):
    assert 'works on' in build_by_colcon(build_folder)


def build_by_colcon(folder):
    """Build the package in a colcon workspace; return what its probe printed."""
    workspace, tools = folder / 'workspace', folder / 'venv'
    source = copy_source(workspace / 'src' / 'worldmodel_ros')
    leave_out_other_interfaces(source, MESSAGE)
    run([sys.executable, '-m', 'venv', '--without-pip', tools], env=clean_environment())
    python = tools / 'bin' / 'python'
    pip(python, 'colcon-common-extensions', *PROJECT['build-system']['requires'], *RUN_TIME)
    environment = clean_environment(AMENT_PREFIX_PATH=str(tools), CMAKE_PREFIX_PATH=str(tools),
                                    PATH=f'{tools / "bin"}{os.pathsep}{os.environ["PATH"]}')
    expected = expected_of(source)
    run(['colcon', 'build', '--event-handlers', 'console_direct+',
         '--cmake-args', '-DPython3_FIND_VIRTUALENV=ONLY', '-DBUILD_TESTING=OFF', '-DCMAKE_BUILD_TYPE=Release',
         *QUICKLY],
        cwd=workspace, env=environment)
    # The command line is found on PATH, where a sourced workspace puts it.
    prefix = workspace / 'install' / 'worldmodel_ros'
    probe = (f'. install/local_setup.sh && [ "$(command -v worldmodel)" = "{prefix}/bin/worldmodel" ] '
             '&& worldmodel up --help >/dev/null && exec python -c "$@"')
    return run(['sh', '-c', probe, 'sh', PROBE, prefix, *expected], cwd=workspace, env=environment)
