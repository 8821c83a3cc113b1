"""The command that trains a model over tiles and judges it: all of it with next to nothing to do, its time, what it refuses."""
import importlib
import json
import re
import time
from pathlib import Path

import pytest
import yaml
from small_model import small_model

from worldmodel_ros.model.checkpoint_description import read_description
from worldmodel_ros.train.run import portable
from worldmodel_ros.train.run.config import read_config

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def train_tiles(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    return importlib.import_module('train_tiles')


@pytest.mark.slow
def test_a_model_is_trained_and_judged_in_one_command(train_tiles, tmp_path, monkeypatch):
    judge = train_tiles.Plan.judge  # test_tile_benchmark.py has its other parts
    kept = {'chunk_time_small_tiles', 'memory_small_tiles', 'prediction_small_minutes', 'weights_small_tiles'}
    monkeypatch.setattr(train_tiles.Plan, 'judge', lambda plan: [
        [job for job in group if job.name in kept] for group in judge(plan)])
    options = ['--folder', str(tmp_path), '--smoke', '--gpus', '0', '--seconds', '540', '--stages']
    assert train_tiles.main([*options, 'train', 'judge']) == 0, {
        path.name: path.read_text()[-2000:] for path in (tmp_path / 'logs').iterdir()}
    result = json.loads((tmp_path / 'results' / 'train_tiles.json').read_text())
    assert [(each['program'], each['exit_status']) for each in result['programs']] == [(name, 0) for name in (
        'train_small_tiles', 'train_small_minutes', 'chunk_time_small_tiles', 'memory_small_tiles', 'prediction_small_minutes',
        'weights_small_tiles')]
    assert read_description(tmp_path / 'small_tiles' / 'final').preset.name == 'smoke_tiles'
    found, other = result['numbers']['small_tiles'], result['numbers']['small_minutes']
    errors = [row['latent_error'] for row in found['weights'].values()]
    assert list(found['weights']) == ['before rounding', 'as finished'] and errors[0] == 0.0 < errors[1]
    assert found['agreement_with_training']['rms_error_max'] < 1e-3
    assert found['turned_away']['1.5 s']['episodes'] >= 1
    assert set(found['chunk_ms']) == {'paged bf16', 'paged fp8', 'cloned cache'} and found['times_faster_than_cloned'] > 0.0
    ours, theirs = (each['prediction_db']['2 steps']['1.0 s'] for each in (found, other))
    assert result['numbers']['prediction_db_over_compared']['1.0 s'] == pytest.approx(ours - theirs, abs=1e-3)
    # A finished run is taken.
    assert train_tiles.main([*options, 'train']) == 0
    again = json.loads((tmp_path / 'results' / 'train_tiles.json').read_text())
    assert [set(each) for each in again['programs']] == [{'program', 'taken'}] * 2 and again['numbers'] == result['numbers']


@pytest.mark.slow
def test_a_run_that_time_stops_is_judged_by_its_newest_weights_and_goes_on(train_tiles, tmp_path, monkeypatch):
    # It saves often besides, and is told to end when it has saved steps of its own: its log says nothing in its first 5 s.
    monkeypatch.setattr(train_tiles, 'SMOKE', (*train_tiles.SMOKE, 'teacher.steps=100000', 'checkpoint_minutes=0.005'))
    monkeypatch.setattr(train_tiles, 'SAVING', 1000.0)
    plan, log = train_tiles.Plan(tmp_path, True, 60.0, 0), tmp_path / 'train_small_tiles.log'
    progress, steps = tmp_path / 'small_tiles' / 'teacher' / 'progress', []
    monkeypatch.setattr(train_tiles.Program, 'tell', told_when(train_tiles.Program.tell, lambda: any(
        int(saved.name.removeprefix('step-')) > max(steps, default=0) for saved in progress.glob('step-*'))))
    for attempt in range(2):
        found = train_tiles.Schedule(tmp_path, 200.0, 0, train_tiles.surroundings(0)[0], lambda: None)
        found.run(plan.train(200.0)[:1])
        assert found.done[0]['exit_status'] == 130, log.read_text()
        steps.append(int(re.search(r'saved at step (\d+) of', log.read_text())[1]))
        if not attempt:
            found.run(plan.newest())
            assert [each['exit_status'] for each in found.done] == [130, 0]
            taken = read_description(plan.weights('small_tiles'))
            assert plan.weights('small_tiles').name == 'newest' and taken.preset.name == 'smoke_tiles'
            assert taken.provenance['stages']['teacher']['steps'] == steps[0]
    assert f'goes on at step {steps[0]} of' in log.read_text() and steps[1] > steps[0] > 0


@pytest.mark.parametrize('arguments, complaint', [
    (['--smoke', '--seconds', '0'], '--seconds is 0: give what the command may take'),
    (['--gpus', '0'], 'no GPU is there to train on'),
    (['--smoke', '--gpus', '77'], '--gpus is 77, and this machine has '),
    (['--smoke', '--workers', '1'], '--workers is 1: one is the training itself'),
    (['--smoke', '--training-seconds', '-1'], '--training-seconds is -1: it must be above zero'),
    (['--smoke', '--stages', 'judge'], 'has no weights to judge: begin with --stages train'),
    (['--smoke', '--stages', 'guess'], "invalid choice: 'guess'")])
def test_what_cannot_be_is_refused(train_tiles, tmp_path, capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        train_tiles.main(['--folder', str(tmp_path / 'out'), *arguments])
    assert complaint in capsys.readouterr().err and not (tmp_path / 'out').exists()


def test_a_file_is_no_folder(train_tiles, tmp_path, capsys):
    (tmp_path / 'out').touch()
    with pytest.raises(SystemExit):
        train_tiles.main(['--folder', str(tmp_path / 'out'), '--smoke'])
    assert 'is a file: name a folder' in capsys.readouterr().err


@pytest.mark.parametrize('training, needed', [(None, 140), (300.0, 410)])
def test_time_that_is_too_short_to_train_in_is_refused_with_what_it_takes(train_tiles, tmp_path, training, needed):
    plan = train_tiles.Plan(tmp_path, False, training, 1)
    options = train_tiles.argparse.Namespace(folder=tmp_path, seconds=120.0, training_seconds=training, stages=['train'],
                                             smoke=False, workers=14)
    assert f'take {needed} with start' in train_tiles._refused(options, plan, 1, 1)
    options.seconds = needed
    assert train_tiles._refused(options, plan, 1, 1) == ''


def changes(job):
    """Configuration file and overrides of a program that trains."""
    given = dict(zip(job.arguments[3::2], job.arguments[4::2]))
    return Path(given['--config']), [value for flag, value in zip(job.arguments, job.arguments[1:]) if flag == '--set']


def test_both_models_are_trained_for_the_same_seconds_and_what_was_begun_keeps_its_own(train_tiles, tmp_path):
    plan = train_tiles.Plan(tmp_path, False, None, 2)
    tiles, compared = (read_config(*changes(job)) for job in plan.train(585.0))
    assert (tiles.preset, compared.preset) == ('small_tiles', 'small_narrow')
    assert tiles.teacher.max_minutes == compared.teacher.max_minutes == pytest.approx(475.0 / 60.0, abs=1e-3)
    assert tiles.data == compared.data
    (tmp_path / 'small_tiles' / 'teacher').mkdir(parents=True)
    assert not plan.begun('small_tiles') and not plan.newest()
    (tmp_path / 'small_tiles' / 'teacher' / 'model.json').touch()  # its stage is finished, the model is not written yet
    assert plan.begun('small_tiles') and [job.name for job in plan.newest()] == ['newest_small_tiles']
    (tmp_path / 'small_tiles' / 'config.yaml').write_text(yaml.safe_dump({'teacher': {'max_minutes': 2.5}}))
    assert [read_config(*changes(job)).teacher.max_minutes for job in plan.train(585.0)] == [2.5, 2.5]


def test_a_run_goes_on_from_portable_weights_for_as_many_seconds_more(train_tiles, tmp_path):
    carried = tmp_path / 'small_tiles' / 'portable'
    portable.write(carried, small_model(), 'teacher', 900, 450.0, 8)
    plan = train_tiles.Plan(tmp_path, False, None, 1, 14)
    config = read_config(*changes(plan.train(560.0)[0]))
    assert config.teacher.max_minutes == pytest.approx(900.0 / 60.0, abs=1e-3) and config.workers == 14
    assert config.autoencoder == str(carried) and config.portable
    assert plan.weights('small_tiles') == carried and plan.begun('small_tiles') and not plan.newest()
    # What it is compared with has the same seconds in all.
    assert read_config(*changes(plan.train(560.0)[1])).teacher.max_minutes == pytest.approx(900.0 / 60.0, abs=1e-3)
    begun = {'autoencoder': 'tiny', 'teacher': {'max_minutes': 2.5}}
    (tmp_path / 'small_tiles' / 'config.yaml').write_text(yaml.safe_dump(begun))
    assert read_config(*changes(plan.train(560.0)[0])).autoencoder == 'tiny'  # a run that was begun keeps its own


def test_a_program_sees_one_of_the_gpus_that_this_one_sees(train_tiles, tmp_path, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3, 5')
    code = ('-c', 'import os, sys\nprint(os.environ["CUDA_VISIBLE_DEVICES"])')
    program = train_tiles.Program('seen', 20.0, *code, environment={}, gpus=(1,))
    program.begin(tmp_path)
    assert program.end(20.0)['exit_status'] == 0 and (tmp_path / 'seen.log').read_text() == '5\n'


def test_ablations_differ_in_what_cache_layers_see(train_tiles, tmp_path):
    jobs = train_tiles.Plan(tmp_path, False, None, 1).ablations()
    training, judging = jobs[::2], jobs[1::2]
    assert all(first.gives in second.needs for first, second in zip(training, judging))
    presets = {job.name: read_config(*changes(job)).model_preset for job in training}
    assert len(presets) == len(set(map(str, presets.values()))) == len(judging) == 7
    assert presets['train_ablations_window-of-64'].context_frames == presets['train_ablations_as-it-is'].context_frames == 64


def schedule(train_tiles, tmp_path, seconds, *jobs, gpus=2):
    found = train_tiles.Schedule(tmp_path, seconds, gpus, {}, lambda: None)
    start = time.monotonic()
    found.run(jobs)
    return found.done, time.monotonic() - start


def test_what_does_not_fit_or_lacks_what_it_needs_is_left_out_and_said(train_tiles, tmp_path):
    job, done = train_tiles.Job, ('-c', '')
    (tmp_path / 'there').touch()
    found, _ = schedule(train_tiles, tmp_path, 60.0, job('long', 100.0, done), job('needy', 0.0, done, (tmp_path / 'none',)),
                        job('short', 1.0, done), job('finished', 0.0, done, gives=tmp_path / 'there'))
    by_name = {each['program']: each for each in found}
    assert by_name['long']['left_out'].startswith('it takes 100 s at least, and ')
    assert by_name['needy']['left_out'] == f'{tmp_path / "none"} is not there'
    assert by_name['finished']['taken'] == f'{tmp_path / "there"} is there' and by_name['short']['exit_status'] == 0


def test_what_another_program_is_to_give_is_waited_for(train_tiles, tmp_path):
    job, file, none = train_tiles.Job, tmp_path / 'made', tmp_path / 'none'
    make = ('-c', f'import time\ntime.sleep(1.0)\nopen({str(file)!r}, "w").close()')
    found, _ = schedule(train_tiles, tmp_path, 60.0, job('makes', 0.0, make, gives=file),
                        job('takes', 0.0, ('-c', f'open({str(file)!r})'), (file,)),
                        job('fails', 0.0, ('-c', '1 / 0'), gives=none), job('in_vain', 0.0, ('-c', ''), (none,)))
    assert {each['program']: each.get('exit_status', each.get('left_out')) for each in found} == {
        'makes': 0, 'takes': 0, 'fails': 1, 'in_vain': f'{none} is not there'}


def test_when_time_is_up_what_can_save_has_been_told_to_and_the_rest_is_ended(train_tiles, tmp_path, monkeypatch):
    monkeypatch.setattr(train_tiles, 'SAVING', 1000.0)
    saves = ('-c', 'import signal, time, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n'
                   'print("ready", flush=True)\ntime.sleep(600)')
    monkeypatch.setattr(train_tiles.Program, 'tell', told_when(
        train_tiles.Program.tell, lambda: 'ready' in (tmp_path / 'saves.log').read_text()))
    found, took = schedule(train_tiles, tmp_path, 8.0, train_tiles.Job('saves', 0.0, saves, saves=True),
                           train_tiles.Job('stays', 0.0, ('-c', 'import time\ntime.sleep(600)')))
    assert {each['program']: each['exit_status'] for each in found} == {'saves': 130, 'stays': None}
    assert took < 30.0


def told_when(tell, ready):
    def told(program):
        if ready():
            tell(program)
    return told


def test_programs_end_with_the_command_that_started_them(train_tiles, tmp_path):
    def fail():
        raise KeyboardInterrupt

    child = tmp_path / 'child'
    slow = ('-c', f'import os, time\nopen({str(child)!r}, "w").write(str(os.getpid()))\ntime.sleep(600)')
    found = train_tiles.Schedule(tmp_path, 60.0, 2, {}, fail)
    with pytest.raises(KeyboardInterrupt):
        found.run([train_tiles.Job('slow', 0.0, slow), train_tiles.Job(
            'short', 0.0, ('-c', f'import pathlib, time\nchild = pathlib.Path({str(child)!r})\n'
                        'while not (child.exists() and child.read_text()):\n    time.sleep(0.05)'))])
    assert not Path('/proc', child.read_text() or 'none').exists()
