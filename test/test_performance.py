"""Every number in the tables of DOCUMENTS is the one in the committed result that they name."""
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / 'docs' / 'performance.md'
DOCUMENTS = (DOCUMENT, *(ROOT / 'docs' / f'{name}.md' for name in (
    'tasks', 'task_results', 'faults', 'own_robot', 'open_models')))
RESULTS = ROOT / 'benchmarks' / 'results'
# Above each table of numbers: for every column of numbers FILE:PLACE, in which {} stands for what the last column says.
TABLE = re.compile(r'<!-- numbers: (.*?) -->\n\n((?:\|.*\n)+)')
NUMBER = re.compile(r'(-?[\d,]*\d(?:\.\d+)?)(?: (%|ms|s|dB))?')


def cells(line):
    return [cell.strip() for cell in line.strip().strip('|').split('|')]


def looked_up(data, place):
    """Return what a place holds: keys with dots between, ``rows[KEY=VALUE,...]`` for the only such row of a list.

    ``min(PLACE)`` is the least of a list, ``share(PLACE)`` a value's share of the sum of its siblings. A key with a dot is
    in quotes, a comma within a value has a backslash before it.
    """
    if match := re.fullmatch(r'(min|share)\((.*)\)', place):
        if match[1] == 'min':
            return min(looked_up(data, match[2]))
        return looked_up(data, match[2]) / sum(looked_up(data, match[2].rpartition('.')[0]).values())
    for quoted, key, chosen in re.findall(r'"([^"]+)"|(\w+)(?:\[((?:[^\]])*)\])?', place):
        data = data[quoted or key]
        if chosen:
            wanted = dict(part.replace('\\', '').split('=', 1) for part in re.split(r'(?<!\\),', chosen))
            found = [row for row in data if all(str(row.get(name)) == value for name, value in wanted.items())]
            assert len(found) == 1, f'{place}: {len(found)} rows'
            data, = found
    return data


def complaint(cell, value):
    """Return what is wrong with a cell, given the measured value; '' if it is that value, rounded."""
    match = NUMBER.fullmatch(cell)
    if not match:
        return f'{cell!r} is no number'
    shown = match[1].replace(',', '')
    scaled = value * (100 if match[2] == '%' else 1)
    half = 0.5 * 10.0 ** -len(shown.partition('.')[2])
    return '' if abs(float(shown) - scaled) <= half + 1e-9 else f'{cell} is {scaled:g} in the file'


def claims(document):
    for places, table in TABLE.findall(document.read_text()):
        places = places.split(' | ')
        for row in table.splitlines()[2:]:
            what, *shown, key = cells(row)
            assert len(shown) == len(places), row
            for cell, place in zip(shown, places, strict=True):
                if cell:
                    yield what, cell, place.replace('{}', key.strip('`'))


CLAIMS = [claim for document in DOCUMENTS for claim in claims(document)]


@pytest.mark.parametrize('what, cell, place', CLAIMS, ids=[place for *_, place in CLAIMS])
def test_a_number_is_the_one_in_its_file(what, cell, place):
    file, _, inside = place.partition(':')
    assert complaint(cell, looked_up(json.loads((RESULTS / file).read_text()), inside)) == '', what


# What the README's table says of a file, in the order of the numbers.
README = {
    'demo_street_epyc_2_cores.json': ('camera_to_command_ms.p50', 'camera_to_command_ms.p99', 'late_commands_published',
                                      'camera_to_command_ms.commands'),
    'kill_latency_epyc_2_cores.json': ('stop_ms.median', 'stop_ms.max', 'kills'),
    'control_judged_mean.json': (*(f'parts.street.tasks.street.{who}.success' for who in ('one_step', 'none', 'oracle')),
                                 'parts.street.tasks.street.one_step.n'),
    'ros_tick_base_h100.json': tuple(f'rows[run={run}].camera_to_command_ms.p99' for run in (
        r'a fourth machine of the same kind\, 30 s', r'and fewer kernels\, another machine of the same kind')),
    'attention_h200.json': tuple(f'rows[pattern=window,tokens=16384,kernel=paged,dtype={dtype}].ratio_flex'
                                 for dtype in ('fp8', 'bf16'))}
IN_README = {  # how a row says them
    'demo_street_epyc_2_cores.json': r'\[([\d.]+) / ([\d.]+) ms\]\S+, (\d+) of (\d+) late',
    'kill_latency_epyc_2_cores.json': r'\[(\d+) / (\d+) ms\]',
    'control_judged_mean.json': r'\[(\d+) / (\d+) / (\d+) %\]\S+ of (\d+)',
    'ros_tick_base_h100.json': r'\[([\d.]+) to ([\d.]+) ms\]',
    'attention_h200.json': r'\[([\d.]+) / ([\d.]+) times\]'}


@pytest.mark.parametrize('file', README)
def test_the_readmes_numbers_are_those_of_their_files(file):
    row, = (line for line in (ROOT / 'README.md').read_text().splitlines() if line.startswith('|') and file in line)
    shown = list(re.search(IN_README[file], row).groups())
    if file.startswith('kill'):
        shown.append(re.search(r'median / max of (\d+)', row)[1])
    data = json.loads((RESULTS / file).read_text())
    for cell, place in zip(shown, README[file], strict=True):
        assert complaint(f'{cell} %' if 'success' in place else cell, looked_up(data, place)) == '', place


def test_every_table_of_numbers_says_where_they_come_from():
    text = DOCUMENT.read_text()
    tables = re.findall(r'(?<=\n\n)((?:\|.*\n)+)', text)
    named = [table for _, table in TABLE.findall(text)]
    # What has no file above it says which column is which file, and holds no measured number.
    others = [table for table in tables if table not in named]
    assert len(named) >= 10 and len(CLAIMS) > 120
    assert [table for table in others if not table.startswith('| column | command | file | date |')] == []


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda document: document.name)
def test_every_file_of_the_tables_is_linked(document):
    text = document.read_text()
    for file in {place.partition(':')[0] for *_, place in claims(document)}:
        assert f'(../benchmarks/results/{file})' in text, file


def unread(text):
    """Return how many tables say where their numbers come from in a form that is not read, so that they are not compared."""
    return len(re.findall(r'<!--\s*numbers\b', text)) - len(TABLE.findall(text))


def test_no_table_that_names_its_files_is_left_out():
    named = {document: document.read_text() for document in (ROOT / 'docs').glob('*.md') if 'numbers:' in document.read_text()}
    assert set(DOCUMENTS) <= set(named)
    for document, text in named.items():
        assert unread(text) == 0, document.name
        assert document in DOCUMENTS or not TABLE.findall(text), document.name


def test_a_wrong_number_is_found():
    assert unread('<!-- numbers: file:place -->\n\n| a |\n') == 0
    assert unread('<!-- numbers: file:place -->\n| a |\n') == 1
    assert unread('<!-- numbers: file:place |\nfile:other -->\n\n| a |\n') == 1
    assert complaint('28.1 ms', 28.0931) == ''
    assert complaint('14 %', 0.1375) == ''
    assert complaint('28.2 ms', 28.0931) != ''
    assert complaint('1,001', 1000) != ''
    assert complaint('fast', 1.0) != ''
    data = {'rows': [{'a': 1, 'b': 'x, y', 'n': {'p': 3, 'q': 1}}, {'a': 2, 'b': 'x, y', 'n': {}}], 'list': [3, 2]}
    assert looked_up(data, 'rows[a=1,b=x\\, y].n.p') == 3
    assert looked_up(data, 'share(rows[a=1].n.p)') == 0.75
    assert looked_up(data, 'min(list)') == 2
    with pytest.raises(AssertionError, match='2 rows'):
        looked_up(data, 'rows[b=x\\, y].n.p')


def test_the_numbers_of_the_readme_are_in_the_tables():
    """Each number of the README's table links to a file, and docs/performance.md has it from there."""
    table = (ROOT / 'README.md').read_text().partition('## Five numbers')[2].partition('\n## ')[0]
    rows = re.findall(r'^\| .*?\[([^\]]+)\]\(benchmarks/results/([\w.]+)\)', table, re.MULTILINE)
    assert len(rows) == 5
    for numbers, file in rows:
        found = [NUMBER.fullmatch(cell)[1] for _, cell, place in CLAIMS if place.startswith(f'{file}:')]
        for number in re.findall(r'[\d.]+', numbers):
            assert number in found, f'{number} of {file}'


def test_the_memory_of_a_robot_that_has_ended_is_no_measurement(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'benchmarks')  # where its own imports are
    import sim_memory
    assert sim_memory.memory(os.getpid()) > 1.0
    process = subprocess.Popen(['true'])
    process.wait()
    with pytest.raises(RuntimeError, match='has ended'):
        sim_memory.memory(process.pid)
