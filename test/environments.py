"""Runs commands outside this virtual environment, for the tests that build and install the package."""
import os
import subprocess

import pytest

# Variables of this virtual environment that would lead another one's process back to it.
THIS_ENVIRONMENT = ('_ROS_WHEELS_BOOTSTRAP_COMPLETE', 'LD_LIBRARY_PATH', 'AMENT_PREFIX_PATH',
                    'CMAKE_PREFIX_PATH', 'PYTHONPATH', 'VIRTUAL_ENV')


def clean_environment(**changes):
    """Return os.environ without this virtual environment, with ``changes``."""
    return {**{k: v for k, v in os.environ.items() if k not in THIS_ENVIRONMENT}, **changes}


def run(command, **options):
    """Run a command and return its output; if it fails, fail the test with the end of that."""
    command = [str(part) for part in command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        shown = ' '.join(command[:6])
        pytest.fail(f'{shown} ... ended with {done.returncode}:\n{done.stdout[-4000:]}', pytrace=False)
    return done.stdout
