"""All stages, one after the other: what they leave, what is taken instead of done again, and what is refused."""
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_model import SMALL

from worldmodel_ros import cli
from worldmodel_ros.model import checkpoint, presets
from worldmodel_ros.model.checkpoint_description import read_description, weight_files
from worldmodel_ros.model.sampling import ONE_STEP, TWO_STEP
from worldmodel_ros.train.data import lerobot
from worldmodel_ros.train.run import metrics, newest, progress, table, variants
from worldmodel_ros.train.run.config import TrainConfig, from_dict
from worldmodel_ros.train.run.loop import Interrupted
from worldmodel_ros.train.run.ranks import Ranks
from worldmodel_ros.train.run.reading import ConfigError
from worldmodel_ros.train.run.run import Run
from worldmodel_ros.train.run.stages import quality_command, run_stages

CLIP = {'batch': 2, 'clip_frames': 14, 'chunks': 2}
CONFIG = {
    'preset': 'small-test', 'compile': False, 'workers': 1,
    'data': {'episodes': 3, 'frames': 40, 'first_seed': 13, 'held_back': 3},  # 16 to 18 hit something
    'vae': {'steps': 3, 'rate': 1e-3, 'objective': {'batch': 4}},
    'teacher': {'steps': 3, 'rate': 1e-3, 'objective': CLIP},
    'student': {'steps': 3, 'rate': 1e-3, 'objective': CLIP},
    'self_forcing': {'steps': 3, 'rate': 1e-3, 'objective': {**CLIP, 'crop_frames': 10}},
    'imitation': {'steps': 3, 'rate': 1e-3, 'objective': {'batch': 2}},
    'decoder': {'steps': 3, 'rate': 1e-3, 'objective': {'batch': 4, 'streams': 2, 'ahead': 4, 'adversary_width': 8}},
    'calibration': {'batches': 2, 'batch': 8},
    'evaluation': {'episodes': 1, 'batches': 1, 'batch': 2}}


@pytest.fixture(scope='module', autouse=True)
def small_preset():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, 'small-test', SMALL)
        patch.setattr(metrics, 'SAMPLERS', {'two_step': TWO_STEP, 'one_step': ONE_STEP})
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


def config(*overrides: str) -> TrainConfig:
    return from_dict(CONFIG, 'test', overrides)


def train(out, *overrides, stages=(), others=()):
    run_stages(Run(config(*overrides), out, Ranks(torch.device('cpu')), others), stages)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp('run')
    train(out)
    return out


def test_a_run_leaves_the_shipped_model_with_where_it_comes_from(run):
    assert checkpoint.load(run / 'final').preset == SMALL
    assert {path.name for path in run.glob('*.safetensors')} == {'points.safetensors'}
    provenance = read_description(run / 'final').provenance
    assert {name: stage.get('steps') for name, stage in provenance['stages'].items()} == {
        'data': None, 'vae': 3, 'teacher': 3, 'student': 3, 'self_forcing': 3, 'imitation': 3, 'decoder': 3}
    assert provenance['stages']['data']['seeds'] == '13:16' and provenance['seed'] == 0
    assert provenance['stages']['teacher']['device'] and provenance['stages']['teacher']['seconds'] > 0
    assert provenance['contact_calibration']['frames'] > 0


def test_a_run_leaves_curves_and_metrics(run):
    assert (run / 'curves.png').stat().st_size > 1000
    found = json.loads((run / 'evaluation' / 'metrics.json').read_text())['psnr_db']
    assert set(found) == {'two_step', 'one_step', 'copy_last', 'vae'}
    assert np.isfinite([row['mean'] for row in found.values()]).all()


def test_each_stage_goes_on_from_the_one_before(run):
    learning = ('vae', 'teacher', 'student', 'self_forcing', 'imitation', 'decoder')
    weights = {stage: checkpoint.load(run / stage).state_dict() for stage in learning}
    for before, after in zip(learning[:3], learning[1:4]):
        assert torch.equal(weights[before]['vae.decoder.inp.weight'], weights[after]['vae.decoder.inp.weight'])
        assert not torch.equal(weights[before]['dit.embed.weight'], weights[after]['dit.embed.weight'])
    for before, after, part in (('self_forcing', 'imitation', 'action_head.'), ('imitation', 'decoder', 'vae.decoder.')):
        moved = [name for name, value in weights[before].items() if not torch.equal(value, weights[after][name])]
        assert moved and all(name.startswith(part) for name in moved)


def test_stages_record_what_they_did_to_near_predictions(run):
    for stage in ('teacher', 'student', 'self_forcing'):
        errors = json.loads((run / stage / 'stage.json').read_text())['short_horizon']
        assert set(errors['before']) == set(errors['after']) == {'flow', 'two_step', 'one_step'}
    # The same clips and noise: what one stage leaves, the next one finds.
    found = {stage: json.loads((run / stage / 'stage.json').read_text())['short_horizon'] for stage in
             ('teacher', 'student', 'self_forcing')}
    assert found['student']['before'] == found['teacher']['after'] and found['student']['after'] != found['teacher']['after']
    assert found['self_forcing']['before'] == found['student']['after'] and not found['self_forcing']['lost']


def test_a_stage_that_spoils_near_predictions_says_so_loudly(run, tmp_path, capsys):
    train(tmp_path, 'self_forcing.rate=1.0', stages=('self_forcing',), others=[run])
    lost = json.loads((tmp_path / 'self_forcing' / 'stage.json').read_text())['short_horizon']['lost']
    assert [text.split()[0] for text in lost] == ['flow', 'two_step', 'one_step']
    assert '[self_forcing] WARNING: this stage made near predictions worse: flow ' in capsys.readouterr().err


def test_a_run_begins_with_a_student_from_elsewhere(run, tmp_path, capsys):
    (tmp_path / 'run.yaml').write_text(json.dumps(CONFIG))
    out, command = tmp_path / 'out', ['train', '--config', str(tmp_path / 'run.yaml'), '--device', 'cpu']
    cli.main([*command, '--out', str(out), '--init', str(run / 'student'), '--take-from', str(run),
              '--stages', 'data,self_forcing,imitation,decoder,calibration'])
    assert '[data] taken from' in capsys.readouterr().out
    assert not (out / 'teacher').exists() and not (out / 'student').exists()
    near = [json.loads((folder / 'self_forcing' / 'stage.json').read_text())['short_horizon']['before']
            for folder in (run, out)]
    assert near[0] == near[1]
    assert read_description(out / 'final').provenance['continues'][0]['stage'] == 'student'


def test_the_newest_weights_of_a_run_are_those_of_its_last_stage_or_of_its_last_progress(run, tmp_path, capsys):
    assert newest.main([str(run), str(tmp_path / 'saved')]) == 0
    done = checkpoint.load(run / 'decoder').state_dict()
    saved = checkpoint.load(tmp_path / 'saved').state_dict()
    torch.testing.assert_close(saved['dit.embed.weight'], done['dit.embed.weight'], rtol=1e-2, atol=1e-2)  # bfloat16
    going = tmp_path / 'going'
    going.mkdir()
    (going / 'config.yaml').write_text((run / 'config.yaml').read_text())
    assert newest.main([str(going), str(tmp_path / 'none')]) == 1
    assert 'has no weights of decoder, imitation, self_forcing, student, teacher yet' in capsys.readouterr().err
    averaged = {f'averaged.{name}': tensor for name, tensor in done.items()}
    progress.save(going / 'student' / 'progress', progress.Progress(7, 1.0, averaged, {}), Ranks(torch.device('cpu')))
    model, provenance = newest.newest(going)
    assert torch.equal(model.state_dict()['dit.embed.weight'], done['dit.embed.weight'])
    assert provenance['unfinished'] == 'in student' and provenance['stages']['student']['steps'] == 7


def test_finished_stages_are_taken(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob('*.safetensors')}
    train(run)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items()) and before
    said = capsys.readouterr().out
    for stage in ('data', 'vae', 'teacher', 'student', 'self_forcing', 'imitation', 'decoder', 'calibration', 'evaluation'):
        assert f'[{stage}] taken from {run / stage}' in said


def test_a_stage_of_another_configuration_is_not_taken_for_this_one(run):
    with pytest.raises(ConfigError, match=r'student was made with another configuration \(student.steps 3 there, 5 now\)'):
        train(run, 'student.steps=5')


def test_a_model_saved_with_other_bits_is_not_taken_for_this_one(run, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r'calibration was made with another configuration \(weight_bits 16 there, 8 now\)'):
        train(run, 'weight_bits=8')
    train(tmp_path, 'weight_bits=8', 'evaluation=null', others=[run])
    said = capsys.readouterr().out
    assert '[decoder] taken from' in said and '[calibration] taken' not in said
    assert any(tensor.dtype == torch.int8 for file in weight_files(tmp_path / 'final') for tensor in load_file(file).values())


def test_a_record_from_before_that_does_not_name_the_bits_has_16(tmp_path):
    made = Run(config(), tmp_path, Ranks(torch.device('cpu')))
    for stage in ('calibration', 'evaluation'):
        made.record(stage, complete=True)
        path = tmp_path / stage / 'stage.json'
        record = json.loads(path.read_text())
        del record['config']['weight_bits']
        path.write_text(json.dumps(record))
        assert made.find(stage) == path.parent
        with pytest.raises(ConfigError, match='weight_bits 16 there, 8 now'):
            Run(config('weight_bits=8'), tmp_path, Ranks(torch.device('cpu'))).find(stage)


def test_a_command_that_is_refused_leaves_the_configuration_of_the_run_as_it_is(run):
    before = (run / 'config.yaml').read_text()
    with pytest.raises(ConfigError, match='was made with another configuration'):
        train(run, 'teacher.steps=4')
    assert (run / 'config.yaml').read_text() == before


def test_another_run_takes_what_is_the_same_and_does_the_rest(run, tmp_path, capsys):
    train(tmp_path, 'student.steps=2', stages=('data', 'vae', 'teacher', 'student'), others=[run])
    said = capsys.readouterr().out
    assert f'[teacher] taken from {run / "teacher"}' in said and '[student] taken' not in said
    assert json.loads((tmp_path / 'student' / 'stage.json').read_text())['steps'] == 2
    assert not (tmp_path / 'teacher').exists()


def test_what_another_run_has_differently_is_named(run, tmp_path):
    with pytest.raises(ConfigError, match=r'vae is not complete in .*; .*has it of another configuration \(seed 0 there'):
        train(tmp_path, 'seed=4', stages=('teacher',), others=[run])


def test_a_run_repeats_to_the_bit(run, tmp_path):
    train(tmp_path, stages=('data', 'vae', 'teacher'))
    first, second = (checkpoint.load(folder / 'teacher').state_dict() for folder in (run, tmp_path))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_recorded_drives_without_labels_go_on_from_a_model_whose_heads_and_autoencoder_stay(run, tmp_path):
    drives = tmp_path / 'drives'
    for path in sorted((run / 'data' / 'train').rglob('*.*')):
        (drives / path.relative_to(run / 'data' / 'train')).parent.mkdir(parents=True, exist_ok=True)
        (drives / path.relative_to(run / 'data' / 'train')).write_bytes(path.read_bytes())
    info = drives / 'meta' / 'info.json'
    info.write_text(info.read_text().replace('"label.', '"other.'))
    train(tmp_path / 'run', f'data.folders=[{drives}]', f'init={run / "final"}', 'vae=null', 'imitation=null',
          'decoder=null', 'evaluation=null')
    first, second = (checkpoint.load(folder / 'final').state_dict() for folder in (run, tmp_path / 'run'))
    moved = {name.split('.')[0] for name in first if not torch.equal(first[name], second[name])}
    assert moved == {'dit'}
    provenance = read_description(tmp_path / 'run' / 'final').provenance
    assert provenance['continues'][0]['stages']['data']['seeds'] == '13:16'
    assert provenance['stages']['data']['folders'] == [str(drives)] and 'contact_calibration' not in provenance


def test_clips_longer_than_the_drives_and_labels_that_lack_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match='data.frames is 40, and the longest clip of a stage takes 60 frames'):
        config('teacher.objective.clip_frames=60')
    with pytest.raises(ConfigError, match='the longest of 3 episodes has 40 frames, and a clip takes 60'):
        train(tmp_path / 'a', 'teacher.objective.clip_frames=60', f'data.folders=[{run / "data" / "train"}]')
    with pytest.raises(ConfigError, match='self_forcing.objective: clip_frames is 13: choose the window'):
        train(tmp_path / 'b', 'self_forcing.objective.clip_frames=13', others=[run])


@pytest.mark.parametrize('stages, overrides, complaint', [
    (('teachers',), (), 'teachers is no stage: choose from data, vae'),
    (('teacher',), (), 'the stage data is not complete in .*: leave it in --stages'),
    (('vae',), ('vae=null', 'init=somewhere'), 'vae is null in the configuration'),
    (('data',), ('data.mix={tourist: 1}',), "data: the mix names .'tourist'.: choose from expert"),
    (('data',), ('imitation=null', 'data.live=3', 'data.begin=1', 'data.mix={tourist: 1}'), "data: the mix names .'tourist'."),
    (('data',), ('data.mix={expert: 0}',), 'data: the mix has the weights .*: give finite ones'),
    (('data',), ('data.mix={expert: 1, ram: -0.5}',), 'data: the mix has the weights .*: give finite ones'),
    (('data',), ('data.mix={expert: .nan}',), 'data: the mix has the weights .*: give finite ones'),
])
def test_stages_that_cannot_be_done_are_refused_with_the_reason(tmp_path, stages, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        train(tmp_path, *overrides, stages=stages)


def test_a_record_is_replaced_as_a_whole_and_one_that_is_damaged_is_named(tmp_path, monkeypatch):
    made = Run(config(), tmp_path, Ranks(torch.device('cpu')))
    made.record('vae', complete=False)
    monkeypatch.setattr('pathlib.Path.replace', lambda *_: 0 / 0)  # it ends before
    with pytest.raises(ZeroDivisionError):
        made.record('vae', complete=True)
    assert made.find('vae') is None and json.loads((tmp_path / 'vae' / 'stage.json').read_text())['complete'] is False
    (tmp_path / 'vae' / 'stage.json').write_text('{"complete": tr')
    with pytest.raises(ConfigError, match=r'vae.stage.json is damaged .*: delete .*vae to make this stage again'):
        made.find('vae')


def test_data_that_was_being_written_is_begun_anew(tmp_path):
    (tmp_path / 'data' / 'train' / 'data').mkdir(parents=True)
    train(tmp_path, stages=('data',))
    assert len(lerobot.load([tmp_path / 'data' / 'train'], 'cpu', SMALL)) == 3


def test_the_command_that_judges_quality_is_one_that_the_command_line_has(tmp_path):
    command = quality_command(tmp_path, '1000000:1000002', tmp_path / 'q.json', ('horizons', 'drift'), 3)
    assert command[:3] == [sys.executable, '-m', 'worldmodel_ros.cli']
    chosen = cli.parser().parse_args(command[3:])
    assert chosen.workers == 3


def test_an_unknown_key_ends_the_command_with_the_reason(tmp_path, capsys):
    (tmp_path / 'run.yaml').write_text('preset: tiny\nstepz: 3\n')
    with pytest.raises(SystemExit, match=r'worldmodel train: .*run.yaml: stepz is not known'):
        cli.main(['train', '--config', str(tmp_path / 'run.yaml'), '--out', str(tmp_path / 'out')])


def test_variants_share_the_gpus_and_one_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def command(config, out, device):
        out.mkdir(parents=True)
        code = f'import os, sys; print(os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[1:]); sys.exit({out.name == "b"})'
        return [sys.executable, '-c', code]

    monkeypatch.setattr(variants, '_command', command)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    names = {name: config() for name in 'abc'}
    failed = variants.run_variants(variants.Variants(config(), ('data',), names), tmp_path, 2, 'cpu', [tmp_path / 'x'])
    assert failed == ['b'] and f'failed, see {tmp_path / "b"}/log.txt' in capsys.readouterr().out
    said = {name: (tmp_path / name / 'log.txt').read_text().split(maxsplit=1) for name in ('shared', *'abc')}
    assert said['shared'][1].strip() == f"['--stages', 'data', '--take-from', '{tmp_path / 'x'}']"
    assert said['c'][1].strip() == f"['--take-from', '{tmp_path / 'x'}', '{tmp_path / 'shared'}']"
    assert {said['a'][0], said['b'][0]} == {'0', '1'}


@pytest.mark.parametrize('shared', [('data',), ()])
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_variants_that_are_told_to_end_interrupt_their_trainings(tmp_path, monkeypatch, number, shared):
    code = ('import os, signal, sys, time\n'
            'signal.signal(signal.SIGINT, lambda *_: (print("saved", flush=True), sys.exit(1)))\n'
            'os.kill(int(sys.argv[1]), int(sys.argv[2])); time.sleep(60)')  # once it is there, its parent is told

    def command(config, out, device):
        out.mkdir(parents=True)
        return [sys.executable, '-c', code, str(os.getpid()), str(int(number))]
    monkeypatch.setattr(variants, '_command', command)
    with pytest.raises(Interrupted, match='the variants that were running have ended; the same command goes on'):
        variants.run_variants(variants.Variants(config(), shared, {'a': config(), 'b': config()}), tmp_path, 1, 'cpu')
    begun = 'shared' if shared else 'a'
    assert {path.name for path in tmp_path.iterdir()} == {begun}
    assert (tmp_path / begun / 'log.txt').read_text() == 'saved\n'


def test_variants_refuse_stages(tmp_path):
    (tmp_path / 'base.yaml').write_text(json.dumps(CONFIG))
    (tmp_path / 'variants.yaml').write_text(json.dumps({'base': 'base.yaml', 'variants': [{'name': 'a'}]}))
    with pytest.raises(SystemExit, match='--stages data: .*variants.yaml has variants, which go through all their stages'):
        cli.main(['train', '--config', str(tmp_path / 'variants.yaml'), '--stages', 'data', '--out', str(tmp_path / 'out'),
                  '--device', 'cpu'])
    assert not (tmp_path / 'out').exists()


def test_the_table_has_what_the_evaluations_found(tmp_path):
    (tmp_path / 'a' / 'evaluation').mkdir(parents=True)
    (tmp_path / 'a' / 'evaluation' / 'quality.json').write_text(json.dumps(
        {'horizons': {'1.0': {'two_step': {'psnr_db': 24.256}}}, 'what_if_ranking': {'1.0': 0.96}}))
    text = table.write_table(tmp_path, ['a', 'b'])
    assert text.splitlines() == ['| run | PSNR 1.0 s two_step | what-if 1 s |', '|---|---|---|', '| a | 24.26 | 0.96 |',
                                 '| b | not evaluated |']
    assert json.loads((tmp_path / 'table.json').read_text())['a']['what-if 1 s'] == 0.96
    subprocess.run([sys.executable, '-m', 'worldmodel_ros.train.run.table', str(tmp_path)], check=True, capture_output=True)
