"""The benchmark that judges decisions in fresh rooms: what it asks for, what it writes, and how it goes on."""
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'benchmarks'))

import control_judged
import result_file

from worldmodel_ros.evaluate.control.controllers import applies
from worldmodel_ros.evaluate.control.episode import Episode
from worldmodel_ros.evaluate.control.run import _ANOTHER, PLAIN, Job, Question
from worldmodel_ros.evaluate.control.tasks import RUN_TIME_TASKS, TASKS

FIRST = control_judged.SEEDS.start


def ended(job, success):
    return Episode(job.seed, success, 0, 1.0, 0, 'done')


def line(job, success):
    episode = vars(ended(job, success))
    return json.dumps({'rung': 'two_step', 'model': 'tiny', 'forecast': 'tiny', **vars(job), 'episode': episode}) + '\n'


def first_rooms(rooms):
    """Episodes of that many rooms of the first part; of the last room the last controller is missing."""
    part = control_judged.PARTS[0]
    return list(part.jobs(FIRST))[:rooms * len(part.controllers) - 1]


def seeds(content, told=False):
    """Numbers under keys that speak of seeds, however deep, and in commands that do."""
    if isinstance(content, dict):
        return {seed for key, value in content.items() for seed in seeds(value, told or 'seed' in key)}
    if isinstance(content, list):
        return {seed for value in content for seed in seeds(value, told)}
    if isinstance(content, str):
        return {int(number) for number in re.findall(r'\d{5,}', content)} if told or 'seed' in content else set()
    return {content} if told and isinstance(content, int) else set()


def test_no_result_has_used_the_seeds():
    used = set()
    for file in (result_file.ROOT / 'benchmarks' / 'results').glob('*.json'):
        if not file.name.startswith('control_judged'):
            used |= seeds(json.loads(file.read_text()))
    assert {15911956, 24569817, 9831000} <= used  # seeds are found where results tell them
    assert not [seed for seed in used if seed in control_judged.SEEDS]
    assert control_judged.SEEDS.start + _ANOTHER >= control_judged.SEEDS.stop  # nor are rooms another's future


def test_the_parts_are_of_tasks_that_their_controllers_can_be_told():
    for part in control_judged.PARTS:
        question = Question(range(FIRST, FIRST + part.begin + part.rooms), (part.task,), part.controllers,
                            variants=(part.variant,) if part.variant != PLAIN else (), forecast='tiny')
        assert set(part.jobs(FIRST)) <= set(question.jobs())
        assert all(applies(controller, TASKS[part.task]) for controller in part.controllers)
        assert len(list(part.jobs(FIRST))) == part.rooms * len(part.controllers)
    rooms = {task: sum(part.rooms for part in control_judged.PARTS if part.task == task and part.name in (task, 'runtime'))
             for task in TASKS}
    assert rooms['intercept'] == 1000
    assert {rooms[task] for task in ('street', 'rooms', 'recall', *RUN_TIME_TASKS)} == {500}


def test_a_room_counts_when_all_have_driven_it():
    done = {job: ended(job, job.controller != 'reactive') for job in first_rooms(3)}
    rows = control_judged.judged(FIRST, done, 'tiny')['parts']['intercept']['tasks']['intercept']
    assert {row['n'] for row in rows.values()} == {2}
    assert set(rows) == {'oracle', 'reactive', 'none', 'one_step', 'two_step'}
    assert (rows['one_step']['success'], rows['reactive']['success']) == (1.0, 0.0)


def test_a_variant_is_compared_with_the_same_rooms():
    plain, delay = (next(part for part in control_judged.PARTS if (part.name, part.variant) == ('delay', variant))
                    for variant in (PLAIN, 'delay'))
    done = {job: ended(job, True) for job in list(plain.jobs(FIRST))[:5 * len(plain.controllers)]}
    done |= {job: ended(job, job.controller != 'one_step' or job.seed > FIRST)
             for job in list(delay.jobs(FIRST))[:4 * len(delay.controllers)]}
    result = control_judged.judged(FIRST, done, 'tiny')
    part, printed = result['parts']['delay'], control_judged.summary(result)['delay']
    assert part['changed']['delay']['street']['one_step'] == {'won': 0, 'lost': 1, 'n': 4, 'p': 1.0}
    assert part['changed']['delay']['street']['oracle'] == {'won': 0, 'lost': 0, 'n': 4, 'p': 1.0}
    assert (part['tasks']['street']['one_step']['n'], part['variants']['delay']['street']['one_step']['n']) == (5, 4)
    assert (printed['street']['one_step'], printed['street, delay']['one_step']) == ('1.0 of 5', '0.75 of 4')


def test_a_run_goes_on_from_its_file_alone(tmp_path, monkeypatch, capsys):
    kept, result = tmp_path / 'e.jsonl', tmp_path / 'r.json'
    kept.write_text(''.join(line(job, True) for job in first_rooms(2)))
    arguments = ['control_judged.py', '--seconds', '0', '--workers', '1', '--episodes', str(kept), '--json', str(result)]
    monkeypatch.setattr(sys, 'argv', arguments)
    with pytest.raises(SystemExit):
        control_judged.main()
    assert '--first' in capsys.readouterr().err
    monkeypatch.setattr(sys, 'argv', [*arguments, '--first', str(FIRST)])
    assert control_judged.main() == 0
    assert json.loads(capsys.readouterr().out)['intercept']['intercept']['oracle'] == '1.0 of 1'
    found = json.loads(result.read_text())
    assert (found['first_seed'], found['episodes'], found['episodes_of_earlier_runs']) == (FIRST, 9, 9)
    assert {'command', 'machine', 'versions', 'definitions', 'controllers', 'rungs'} <= set(found)
    assert len(kept.read_text().splitlines()) == 9 and found['earlier_runs'] == []


def test_a_result_that_is_written_elsewhere_says_on_what_the_episodes_were_driven(tmp_path, monkeypatch, capsys):
    kept, result = tmp_path / 'e.jsonl', tmp_path / 'r.json'
    kept.write_text(''.join(line(job, True) for job in first_rooms(2)))

    def write(first, rendered_by):
        monkeypatch.setenv('MUJOCO_GL', rendered_by)
        monkeypatch.setattr(sys, 'argv', ['control_judged.py', '--seconds', '0', '--workers', '1', '--first', str(first),
                                          '--episodes', str(kept), '--json', str(result)])
        assert control_judged.main() == 0
        return json.loads(result.read_text())
    driven = write(FIRST, 'egl')
    written = write(FIRST, 'osmesa')
    assert written['earlier_runs'] == [{key: driven[key] for key in control_judged.OF_A_RUN}]
    assert (written['earlier_runs'][0]['rendered_by'], written['rendered_by']) == ('egl', 'osmesa')
    assert [run['rendered_by'] for run in write(FIRST, 'egl')['earlier_runs']] == ['egl', 'osmesa']
    assert write(FIRST + 1, 'egl')['earlier_runs'] == []  # other rooms


def test_what_was_driven_is_written_when_an_episode_breaks_the_run(tmp_path, monkeypatch):
    job = Job(PLAIN, 'intercept', 'oracle', FIRST)

    def breaks(*_):
        yield job, ended(job, True)
        raise RuntimeError('no GPU')
    monkeypatch.setattr(control_judged, 'driven', breaks)
    monkeypatch.setattr(control_judged, 'WRITING', 1e9)  # nothing is written on the way
    monkeypatch.setattr(sys, 'argv', ['control_judged.py', '--json', str(tmp_path / 'r.json')])
    with pytest.raises(RuntimeError, match='no GPU'):
        control_judged.main()
    found = json.loads((tmp_path / 'r.json').read_text())
    assert found['episodes'] == 1
    assert found['first_seed'] in control_judged.SEEDS
