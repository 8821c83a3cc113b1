"""The way of the README on a new machine: clone, one command, and everything is there."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import clean_environment, run

ROOT = Path(__file__).resolve().parents[1]

PROBE = '''
import cv2, mujoco, onnxruntime, safetensors, torch
import rclpy
import worldmodel_ros
from worldmodel_ros.msg import PredictedFuture
from worldmodel_ros.srv import WhatIf

rclpy.init()
node = rclpy.create_node('probe')
node.create_publisher(PredictedFuture, 'predicted_future', 1)
node.create_service(WhatIf, 'what_if', lambda request, response: response)
print(worldmodel_ros.__file__)
'''


def test_the_readme_names_the_commands_that_exist_and_ci_runs_its_test_command():
    readme = (ROOT / 'README.md').read_text()
    makefile = (ROOT / 'Makefile').read_text()
    for target in ('demo', 'test'):
        assert f'make {target}' in readme and f'\n{target}:' in makefile
    commands = (ROOT / '.ci' / 'run').read_text().splitlines()
    assert commands[-1] == 'exec make test'
    assert os.access(ROOT / '.ci' / 'run', os.X_OK)


def take_along_what_is_installed(clone):
    """
    Give the clone this environment's packages, so that what is left to do is to build the messages.

    By hard links: pip replaces files, and writes into none. That everything is fetched and installed from nothing is
    what `make test` itself does where there is no .venv. An environment that tools/setup.sh has not made is not taken.
    """
    mine = Path(sys.prefix)
    if (mine / 'worldmodel_ros.stamp').exists():
        run(['cp', '-al', mine, clone / '.venv'])
        (clone / '.venv' / 'worldmodel_ros.stamp').unlink()


@pytest.mark.slow
@pytest.mark.build
@pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')
def test_a_clone_sets_itself_up_once(tmp_path):
    clone = tmp_path / 'clone'
    run(['git', 'clone', '-q', '--no-hardlinks', ROOT, clone])
    # A parent `make test` must not tell this one how to run.
    environment = clean_environment()
    for variable in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'ARGS'):
        environment.pop(variable, None)

    take_along_what_is_installed(clone)
    run(['make', 'setup'], cwd=clone, env=environment)
    command_line = clone / '.venv' / 'bin' / 'worldmodel'
    assert 'usage: worldmodel' in run([command_line, '--help'], cwd=tmp_path, env=environment)
    printed = run([clone / '.venv' / 'bin' / 'python', '-c', PROBE], cwd=tmp_path,
                  env={**environment, 'AMENT_PREFIX_PATH': str(clone / '.venv')})
    assert printed.splitlines()[-1] == str(clone / 'worldmodel_ros' / '__init__.py')
    assert run(['git', 'status', '--porcelain'], cwd=clone) == '', 'files that git does not ignore'

    # Again: neither apt nor the network is asked, so none of them can slow it down or fail.
    before = os.times()
    again = run(['make', 'setup'], cwd=clone, env={**environment, 'PIP_NO_INDEX': '1'})
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3.0  # s
    assert 'installing' not in again

    # What is to be installed has changed: the next command notices, and without the network cannot go on.
    with open(clone / 'msg' / 'Timings.msg', 'a') as definition:
        definition.write('# changed\n')
    changed = subprocess.run(['make', 'setup'], cwd=clone, text=True, capture_output=True, env={
        **environment, 'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': '', 'PIP_CONFIG_FILE': os.devnull})
    assert changed.returncode != 0 and 'building the ROS messages' in changed.stdout
