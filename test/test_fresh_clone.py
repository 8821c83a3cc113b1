"""
The way of the README on a new machine: clone, one command, and everything is there.

That a set-up from nothing works is what ``make test`` itself shows where there is no .venv; here, that it is not done twice,
and done again where it must be.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import clean_environment, run

ROOT = Path(__file__).resolve().parents[1]


def test_the_readme_names_the_commands_that_exist_and_ci_runs_its_test_command():
    readme = (ROOT / 'README.md').read_text()
    makefile = (ROOT / 'Makefile').read_text()
    for target in ('demo', 'test'):
        assert f'make {target}' in readme and f'\n{target}:' in makefile
    commands = (ROOT / '.ci' / 'run').read_text().splitlines()
    assert commands[-1] == 'exec make test'
    assert os.access(ROOT / '.ci' / 'run', os.X_OK)


def fingerprint(clone):
    """Return what tools/setup.sh of a clone writes down of all that decides what gets installed."""
    return run(['bash', '-c', 'source <(sed -n "/^fingerprint()/,/^}/p" tools/setup.sh) && fingerprint'], cwd=clone,
               env=clean_environment(python='.venv/bin/python'))


@pytest.fixture(scope='module')
def set_up(tmp_path_factory):
    """A clone in the state in which a set-up leaves it, but for the built messages, and what to run ``make`` in."""
    if not (ROOT / '.git').exists():
        pytest.skip('not a git checkout')
    clone = tmp_path_factory.mktemp('fresh') / 'clone'
    run(['git', 'clone', '-q', '--no-hardlinks', ROOT, clone])
    run([sys.executable, '-m', 'venv', '--without-pip', '--symlinks', clone / '.venv'])
    (clone / 'worldmodel_ros' / 'action').mkdir()
    (clone / 'worldmodel_ros' / 'action' / '__init__.py').touch()
    (clone / '.venv' / 'worldmodel_ros.stamp').write_text(fingerprint(clone))
    # A parent ``make test`` must not tell this one how to run; and there is no network.
    environment = clean_environment(PIP_NO_INDEX='1', PIP_FIND_LINKS='', PIP_CONFIG_FILE=os.devnull)
    for variable in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'ARGS'):
        environment.pop(variable, None)
    return clone, environment


@pytest.mark.parametrize('command', ['setup', 'demo'])
def test_a_command_in_a_clone_that_is_set_up_asks_neither_apt_nor_the_network(set_up, command):
    clone, environment = set_up
    # The command line itself is not what is tested here.
    worldmodel = clone / '.venv' / 'bin' / 'worldmodel'
    worldmodel.write_text('#!/bin/sh\n')
    worldmodel.chmod(0o755)
    before = os.times()
    assert 'setup:' not in run(['make', command], cwd=clone, env=environment)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3.0  # s


@pytest.mark.parametrize('name', ['msg/Timings.msg', 'srv/WhatIf.srv', 'action/DriveTo.action', 'setup.py', 'pyproject.toml',
                                  'package.xml', 'CMakeLists.txt', 'constraints.txt', 'scripts/command_gate',
                                  'tools/setup.sh'])
def test_a_command_notices_what_is_to_be_installed_anew(set_up, name):
    clone, environment = set_up
    stamp, file = clone / '.venv' / 'worldmodel_ros.stamp', clone / name
    was, text = stamp.read_text(), file.read_text()
    try:
        file.write_text(text + '# changed\n')
        assert fingerprint(clone) != was
        if name.startswith('msg/'):
            changed = subprocess.run(['make', 'setup'], cwd=clone, text=True, capture_output=True, env=environment)
            assert changed.returncode != 0 and 'making .venv' in changed.stdout
            assert not stamp.exists(), 'a set-up that failed must not pass for done'
    finally:
        file.write_text(text)
        stamp.write_text(was)


def test_what_a_set_up_makes_is_ignored_by_git():
    made = ['.venv/bin/python', 'build/stage', 'worldmodel_ros.egg-info/PKG-INFO', 'out/demo/summary.json',
            *(str(path.relative_to(ROOT)) for folder in ('action', 'msg', 'srv')
              for path in (ROOT / 'worldmodel_ros' / folder).glob('*.py')),
            *(str(path.relative_to(ROOT)) for path in (ROOT / 'worldmodel_ros').glob('*.so'))]
    assert len(made) > 10
    ignored = run(['git', 'check-ignore', *made], cwd=ROOT).splitlines()
    assert sorted(ignored) == sorted(made)
