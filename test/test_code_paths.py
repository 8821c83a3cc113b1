"""The files through which a frame and a what-if question pass are those that docs/architecture.md names."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEST = Path(__file__).resolve().parent
WAYS = {'frame': ('The way of one frame', 20), 'what_if': ('The way of one what-if', 14)}


@pytest.fixture(scope='module')
def found():
    """What test/code_paths.py has found in both nodes, in a process of their own: the gate does not fit one of tests."""
    run = subprocess.run([sys.executable, 'code_paths.py'], cwd=TEST, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def named(heading):
    """Return the files that the document names under a heading."""
    text = (TEST.parent / 'docs' / 'architecture.md').read_text()
    return set(re.findall(r'`([^`]+\.py)`', text.partition(f'\n## {heading}\n')[2].partition('\n## ')[0]))


@pytest.mark.ros
@pytest.mark.untimed
@pytest.mark.parametrize('way', WAYS)
def test_a_way_runs_the_files_that_the_document_names_and_no_more_than_are_allowed(found, way):
    heading, most = WAYS[way]
    assert set(found[way]) == named(heading)
    assert len(found[way]) <= most
