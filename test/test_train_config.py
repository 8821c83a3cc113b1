"""A run's configuration: what is shipped can be read, and what is wrong is named with its place and the remedy."""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from worldmodel_ros.cli import main as cli
from worldmodel_ros.sim import rollout
from worldmodel_ros.train.run import config as configuration
from worldmodel_ros.train.run.config import from_dict, read_config
from worldmodel_ros.train.run.ranks import Ranks
from worldmodel_ros.train.run.reading import ConfigError
from worldmodel_ros.train.run.run import Run
from worldmodel_ros.train.run.variants import read_variants

FOLDER = Path(__file__).resolve().parents[1] / 'config' / 'train'
SMOKE = FOLDER / 'smoke.yaml'


@pytest.mark.parametrize('path', [p for p in sorted(FOLDER.glob('*.yaml')) if not p.stem.endswith('ablations')],
                         ids=lambda path: path.stem)
def test_a_shipped_configuration_can_be_read(path):
    config = read_config(path)
    assert config.preset in path.read_text() and (config.teacher or config.imitation or config.decoder).steps > 0
    assert config.data.frames >= config.clip_frames


@pytest.mark.parametrize('file', ['ablations.yaml', 'small_tiles_ablations.yaml'])
def test_the_shipped_ablations_differ_from_their_base_in_what_they_name(file):
    variants = read_variants(FOLDER / file, ['seed=3'])
    named = {entry['name']: entry.get('set') or {} for entry in yaml.safe_load((FOLDER / file).read_text())['variants']}
    assert list(variants.configs) == list(named) and len(named) >= 3
    for name, changes in named.items():
        assert variants.configs[name].seed == 3
        assert (variants.configs[name] != variants.base) == bool(changes), name


def test_what_cache_layers_see_can_be_less_than_the_preset_says():
    whole = read_config(FOLDER / 'small_tiles.yaml').model_preset
    changed = {name: config.model_preset for name, config in
               read_variants(FOLDER / 'small_tiles_ablations.yaml').configs.items()}
    assert changed == {'as-it-is': whole, 'no-heading': replace(whole, heading_pairs=0),
                       'no-temporal-pattern': replace(whole, patterns=((4, 0, 0),)),
                       'no-sinks': replace(whole, sink_slabs=0), 'no-keyframes': replace(whole, keyframe_slabs=0),
                       'window-of-64': replace(whole, keyframe_slabs=0, window_frames=64),
                       'window-of-16': replace(whole, keyframe_slabs=0, window_frames=16)}


def test_values_given_on_the_command_line_win():
    config = read_config(SMOKE, ['teacher.steps=7', 'teacher.rate=2e-4', 'self_forcing=null',
                                 'student.objective.bootstrap=true', 'evaluation.parts=[drift]'])
    assert (config.teacher.steps, config.teacher.rate, config.self_forcing) == (7, 2e-4, None)
    assert config.student.objective.bootstrap and config.evaluation.parts == ('drift',)
    assert config.student.steps == read_config(SMOKE).student.steps


@pytest.mark.parametrize('change, complaint', [
    ('teacher.stepz=7', 'teacher.stepz is not known; the keys of teacher are steps, rate, '),
    ('teacher.objective.chunk=7', 'teacher.objective.chunk is not known'),
    ('vae={rate: 1.0}', 'vae.steps is missing'),
    ('teacher.steps=many', "teacher.steps must be of type int, got 'many'"),
    ('teacher.steps=0', r'teacher.steps \(0\) must be above zero'),
    ('teacher.rate=.nan', 'teacher.rate is nan: it must be above zero, and finite'),
    ('teacher.rate=.inf', 'teacher.rate is inf: it must be above zero, and finite'),
    ('teacher.max_minutes=0', 'teacher.max_minutes is 0.0: it must be above zero, and finite'),
    ('teacher.average=-1', 'teacher.average is -1.0: it must be from 0 to below 1'),
    ('teacher.average=1', 'teacher.average is 1.0: it must be from 0 to below 1'),
    ('vae.warm_up=-1', 'vae.warm_up is -1.0: it must be from 0 to 1'),
    ('vae.decay=-0.1', 'vae.decay is -0.1: it must be zero or more, and finite'),
    ('checkpoint_minutes=-1', 'checkpoint_minutes is -1.0: it must be above zero, and finite'),
    ('teacher.objective.context_noise=-3', 'teacher.objective.context_noise is -3.0: it must be zero or more, and finite'),
    ('teacher.objective.full_windows=1.5', 'teacher.objective.full_windows is 1.5: it must be from 0 to 1'),
    ('student.objective.truth_weight=7', 'student.objective.truth_weight is 7.0: it must be from 0 to 1'),
    ('student.objective.half_truth_weight=.nan', 'student.objective.half_truth_weight is nan: it must be from 0 to 1'),
    ('self_forcing.objective.tether_share=-1', 'self_forcing.objective.tether_share is -1.0: it must be from 0 to 1'),
    ('self_forcing.objective.truth_distance=0', 'self_forcing.objective.truth_distance is 0.0: it must be above zero'),
    ('decoder.objective.adversary_rate=0', 'decoder.objective.adversary_rate is 0.0: it must be above zero'),
    ('decoder.objective.energy_weight=.nan', 'decoder.objective.energy_weight is nan: it must be zero or more'),
    ('compile=1', 'compile must be of type bool, got 1'),
    ('data.folders=here', "data.folders must be a list of names, got 'here'"),
    ('student.objective.contact_share=2', 'student.objective.contact_share is 2.0: it must be from 0 to 1'),
    ('data.mix=expert', "data.mix must be a section of keys, got 'expert'"),
    ('data.mix={expert: much}', "data.mix.expert must be of type float, got 'much'"),
    ('student=5', 'student must be a section of keys, got 5'),
    ('teacher.objective.flow_weight=steep', "teacher.objective.flow_weight is 'steep': choose"),
    ('memory={window_frames: 8}', "memory is for presets with tiles, and 'tiny' has none"),
    ('memory={sinks: 8}', 'memory.sinks is not known; the keys of memory are window_frames, sink_slabs, '
     'keyframe_slabs, temporal'),
    ('teacher.matrix_rate=0', 'teacher.matrix_rate is 0.0: it must be above zero'),
    ('teacher.objective.pieces=5', 'teacher.objective.pieces is 5: it must divide clip_frames'),
    ('teacher.objective.served_share=2', 'teacher.objective.served_share is 2.0'),
    ('preset=enormous', "preset 'enormous' is unknown: choose from tiny"),
    ('preset=robot_3b', "preset 'robot_3b' has tiles, over which the stages self_forcing and imitation do not"),
    ('data.measured=0.5', 'data.measured is 0.5: give a share of 0 to 1, of episodes that are simulated while the model'),
    ('data.live=4', 'data.live holds 4 of 8 episodes that are simulated, and training begins with 128'),
    ('data={live: 4, begin: 0}', 'training begins with 0: give no folders, and begin with 1 to as many'),
    ('vae=null', 'give the stage, or a model to take the autoencoder from'),
    ('data.first_seed=999999', 'only those below 1000000 are for training'),
    ('evaluation.first_seed=5', 'evaluation.first_seed 5 is a seed for training: take one from 1000000 on'),
    ('evaluation.first_seed=-1', 'take one from 1000000 on'),
    ('seed=-1', 'seed is -1, and must not be below zero'),
    ('data.frames=63', 'data.frames is 63, and the longest clip of a stage takes 64 frames: simulate longer episodes'),
    ('data.episodes=0', r'data.episodes \(0\) must be above zero'),
    ('data.held_back=-1', r'held_back \(-1\) and live \(0\) must not be below zero'),
    ('vae.objective.batch=0', r'vae.objective.batch \(0\) must be above zero'),
    ('teacher.objective.batch=0', r'teacher.objective.batch \(0\) must be above zero'),
    ('student.objective.substeps=0', r'student.objective.substeps \(0\) must be above zero'),
    ('self_forcing.objective.reuse=0', r'self_forcing.objective.reuse \(0\) must be above zero'),
    ('imitation.objective.batch=0', r'imitation.objective.batch \(0\) must be above zero'),
    ('calibration.batches=0', r'calibration.batches \(0\) must be above zero'),
    ('evaluation.batch=0', r'evaluation.batch \(0\) must be above zero'),
])
def test_what_is_wrong_is_named_with_its_place(change, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        read_config(SMOKE, [change])
    assert str(error.value).startswith(f'{SMOKE}: ')


@pytest.mark.parametrize('held, complaint', [
    ('imitation={steps: 1, rate: 1.0}', 'the stage imitation takes the features of all episodes as it begins'),
    ('teacher.objective.imagined_share=0.5', 'data.live holds 4 of 8 .* teacher.objective.imagined_share would go on with'),
    ('student.objective.contact_share=0.5', 'student.objective.contact_share would go on with .* set data.live to 8'),
    ('self_forcing={steps: 1, rate: 1.0}', 'and self_forcing would go on with'),
    ('decoder={steps: 1, rate: 1.0}', 'and decoder would go on with'), ('seed=2', None)])
def test_stages_that_go_on_with_their_clips_learn_from_no_episodes_that_are_replaced(held, complaint, tmp_path):
    changes = ['self_forcing=null', 'imitation=null', 'decoder=null', 'data.live=4', 'data.begin=2', held]

    def begin(*more, processes=1):
        Run(read_config(SMOKE, [*changes, *more]), tmp_path, Ranks(torch.device('cpu'), 0, processes)).begin(())
    if complaint is None:
        begin()
        return
    with pytest.raises(ConfigError, match=complaint):
        begin()
    if 'imitation' not in held:
        begin('data.live=8')
        begin(processes=2)  # each simulates and holds its half
        with pytest.raises(ConfigError, match='data.live holds 4 of 5 episodes of a process'):
            begin('data.episodes=9', processes=2)


def test_processes_hold_back_the_same_live_episodes_whatever_their_number(monkeypatch, tmp_path):
    config, asked = read_config(SMOKE, ['imitation=null', 'data.live=8', 'data.begin=1', 'data.first_seed=40']), []

    def simulation(seeds, held_back, *_):
        asked.append((seeds, held_back))
        return SimpleNamespace(wait=lambda _: None)
    monkeypatch.setattr('worldmodel_ros.train.run.run.Simulation', simulation)
    for processes in (1, 3):
        asked.clear()
        for rank in range(processes):
            Run(config, tmp_path, Ranks(torch.device('cpu'), rank, processes)).simulation()
        assert sorted(seed for seeds, _ in asked for seed in seeds) == list(range(40, 48))
        assert [list(held_back) for _, held_back in asked] == [[48, 49], *[[]] * (processes - 1)]


def test_each_process_has_as_many_live_episodes_as_it_begins_with(tmp_path, monkeypatch):
    config = read_config(SMOKE, ['imitation=null', 'data.live=8', 'data.begin=3'])
    Run(config, tmp_path, Ranks(torch.device('cpu'), 0, 2)).begin(())
    with pytest.raises(ConfigError, match='data.begin is 3, and one of 3 processes simulates only 2 of 8 episodes: lower'):
        Run(config, tmp_path, Ranks(torch.device('cpu'), 0, 3)).begin(())

    def wait(count):
        raise RuntimeError(f'the simulation ended after {count - 1} episodes')
    monkeypatch.setattr('worldmodel_ros.train.run.run.Simulation', lambda *_: SimpleNamespace(wait=wait))
    with pytest.raises(ConfigError, match='data: the simulation ended after 2 episodes'):
        Run(config, tmp_path, Ranks(torch.device('cpu'))).simulation()


def test_episodes_are_as_long_as_the_clips_that_a_model_is_judged_on():
    content = {'preset': 'tiny', 'vae': {'steps': 1, 'rate': 1.0}, 'data': {'frames': 20, 'held_back': 0}}
    assert from_dict(content, 'test').clip_frames == 3
    for judged in ({'data': {'frames': 20}}, {'evaluation': {}}):
        with pytest.raises(ConfigError, match='data.frames is 20, .* takes 28 frames: simulate longer episodes$'):
            from_dict(content | judged, 'test')


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    with pytest.raises(ConfigError, match='nowhere.yaml cannot be read as YAML'):
        read_config(tmp_path / 'nowhere.yaml')
    (tmp_path / 'list.yaml').write_text('- 1\n')
    with pytest.raises(ConfigError, match='must hold keys and values; config/train/tiny.yaml is an example'):
        read_config(tmp_path / 'list.yaml')
    with pytest.raises(ConfigError, match='--set teacher: write KEY=VALUE'):
        read_config(SMOKE, ['teacher'])
    with pytest.raises(ConfigError, match='--set teacher.steps.x: steps is 3, and no section of keys'):
        read_config(SMOKE, ['teacher.steps.x=7'])


def test_a_stage_depends_on_itself_and_on_what_comes_before_it():
    before, after = read_config(SMOKE), read_config(SMOKE, ['student.steps=9', 'workers=5', 'checkpoint_minutes=1'])
    same = {stage: before.of_stage(stage) == after.of_stage(stage)
            for stage in ('data', 'vae', 'teacher', 'student', 'self_forcing', 'evaluation')}
    assert same == {'data': True, 'vae': True, 'teacher': True, 'student': False, 'self_forcing': False,
                    'evaluation': False}


def test_the_seeds_for_training_are_those_of_the_simulator():
    assert configuration.TRAINING_SEEDS == rollout.TRAINING_SEEDS


def test_a_variant_without_a_name_or_with_a_name_that_is_taken_is_refused(tmp_path):
    (tmp_path / 'base.yaml').write_text(SMOKE.read_text())
    path = tmp_path / 'variants.yaml'
    for variants, complaint in (([{'set': {}}], 'a variant has a name'),
                                ([{'name': 'a'}, {'name': 'a'}], "the name 'a' is taken"),
                                ([{'name': 'a', 'set': {'teacher.stepz': 1}}], 'variants.yaml: a: teacher.stepz is not')):
        path.write_text(yaml.safe_dump({'base': 'base.yaml', 'variants': variants}))
        with pytest.raises(ConfigError, match=complaint):
            read_variants(path)
    path.write_text(yaml.safe_dump({'base': 'base.yaml', 'variants': [], 'shard': []}))
    with pytest.raises(ConfigError, match='not known: shard'):
        read_variants(path)


def test_the_resolved_configuration_reads_back_as_itself():
    from worldmodel_ros.train.run.run import plain
    config = read_config(SMOKE, ['evaluation.parts=[drift]', 'data.mix.expert=1'])
    assert from_dict(plain(config), 'again') == config


@pytest.mark.parametrize('device, complaint', [('cuda', 'torch sees 0 GPUs here'), ('cuda:3', 'torch sees 0 GPUs here'),
                                               ('gpu', 'give cuda, cpu or auto')])
def test_a_device_that_this_machine_does_not_have_is_refused_by_name(device, complaint, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    with pytest.raises(SystemExit, match=f'--device {device}: .*{complaint}'):
        cli(['train', '--config', str(SMOKE), '--device', device, '--out', str(tmp_path)])


@pytest.mark.parametrize('config', [SMOKE, SMOKE.with_name('ablations.yaml')])
def test_more_gpus_than_this_machine_has_are_refused_before_any_process_starts(config, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr('os.execv', lambda *_: pytest.fail('processes were started'))
    with pytest.raises(SystemExit, match='--gpus 3: torch sees 2 here'):
        cli(['train', '--config', str(config), '--device', 'cuda', '--gpus', '3', '--out', str(tmp_path)])


def test_fine_tuning_refuses_a_gpu_that_this_machine_does_not_have(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    assert cli(['finetune', 'bag', '--device', 'cuda', '--out', str(tmp_path)]) == 1
    assert '--device cuda: torch sees 0 GPUs here' in capsys.readouterr().err
