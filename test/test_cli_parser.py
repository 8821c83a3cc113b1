"""The command line: what it accepts, what it says, and what it does not import."""
import argparse
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from demo_recordings import what_if

from worldmodel_ros import cli
from worldmodel_ros.cli import arguments, checks
from worldmodel_ros.sim.task_scenes import SCENES

DOCS = Path(__file__).parent.parent / 'docs'
PROGRAMS = ('demo', 'up', 'replay', 'record', 'what-if', 'sim', 'train', 'evaluate', 'export', 'doctor')


@pytest.mark.parametrize('program', PROGRAMS)
def test_help_of_every_subcommand_teaches_by_example(program, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([program, '--help'])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert 'examples:' in text and f'worldmodel {program}' in text


def test_help_loads_nothing_heavy():
    script = ('import sys\nfrom worldmodel_ros.cli import parser\nparser().format_help()\n'
              'heavy = {"torch", "mujoco", "rclpy", "matplotlib", "cv2", "numpy"}\n'
              'print(sorted(heavy & set(sys.modules)))')
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == '[]', done.stderr


def test_version_is_told(capsys):
    with pytest.raises(SystemExit):
        cli.main(['--version'])
    assert capsys.readouterr().out.startswith('worldmodel ')


@pytest.mark.parametrize('line, complaint', [
    (['demo', '--goal', 'purple'], 'red, green, blue, yellow'),
    (['demo', '--goal', ','], 'red, green, blue, yellow'),
    (['demo', '--goal', 'red', '--task', 'street'], 'not allowed with'),
    (['demo', '--task', 'fly'], 'street'),
    (['demo', '--seconds', '-1'], 'not a number above 0'),
    (['demo', '--seconds', 'nan'], 'not a number above 0'),
    (['up', '--set', 'seed=7'], 'NAME:=VALUE'),
    (['sim', '--seed', '-1'], "'-1' is no seed"), (['finetune', 'bag', '--out', 'x', '--seed', '-1'], "'-1' is no seed"),
    (['up', '--namespace', 'left arm'], "'left arm' is no ROS namespace"),
    (['record', '--namespace', '/2nd'], "'/2nd' is no ROS namespace"),
    (['what-if', '--names', 'sideways'], 'invalid choice'),
    ([], 'SUBCOMMAND'),
])
def test_wrong_arguments_are_refused_with_what_is_allowed(line, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(line)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize('program, name, option, values', [
    ('up', 'set', '--set', [('seed', '7'), ('goal', 'red'), ('model', 'tiny')]),
    ('up', 'parameters', '--parameters', [Path('limits.yaml'), Path('arm.yaml'), Path('mine.yaml')]),
    ('record', 'parameters', '--parameters', [Path('limits.yaml'), Path('arm.yaml'), Path('mine.yaml')]),
    ('gateway', 'origins', '--origin', ['https://one', 'https://two', 'https://three'])])
def test_an_option_given_twice_has_the_values_of_both(program, name, option, values):
    first, second, third = (':='.join(value) if name == 'set' else str(value) for value in values)
    parser = cli.parser()
    before = getattr(parser.parse_args([program]), name)
    assert getattr(parser.parse_args([program, option, first, option, second, third]), name) == values
    assert getattr(parser.parse_args([program]), name) == before and not before


def test_no_option_with_several_values_drops_those_given_before():
    def options(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    yield from options(each)
            elif action.option_strings and action.nargs == '+':
                yield action
    found = list(options(cli.parser()))
    assert len(found) > 10
    assert [action.option_strings for action in found if not isinstance(action, argparse._ExtendAction) or action.default] == []


def test_goals_and_assignments_are_read():
    assert arguments.goals('red, blue') == ['red', 'blue']
    assert arguments.assignment('cmd_vel:=/base/cmd_vel') == ('cmd_vel', '/base/cmd_vel')
    assert arguments.namespace('/left/') == 'left'
    assert arguments.namespace('/') == '' and arguments.namespace('floor_2/left') == 'floor_2/left'
    for wrong in ('1x', 'left robot', 'left//right', 'left-right', 'a/2', '~left'):
        with pytest.raises(argparse.ArgumentTypeError, match='no ROS namespace'):
            arguments.namespace(wrong)


@pytest.mark.parametrize('line', [['sim', '--seconds', '0.1', '--size', '64', '--out'], ['up', '--logs'], ['demo', '--out']])
def test_a_folder_that_cannot_be_written_is_named(line, capsys, tmp_path):
    (tmp_path / 'file').touch()
    assert cli.main([*line, str(tmp_path / 'file/out')]) == 1
    assert f'{tmp_path}/file' in (said := capsys.readouterr().err) and 'Not a directory' in said


def test_up_names_an_argument_that_the_bringup_does_not_have(capsys, tmp_path):
    assert cli.main(['up', '--set', 'colour:=red', '--logs', str(tmp_path)]) == 1
    assert "'colour' is unknown" in capsys.readouterr().err


def test_up_names_an_argument_that_only_the_simulated_robot_has(capsys, tmp_path):
    assert cli.main(['up', '--target', 'robot', '--set', 'seed:=7', '--logs', str(tmp_path)]) == 1
    assert "argument 'seed' has no effect with --target robot: leave it out" in capsys.readouterr().err


def test_up_shows_the_arguments_of_a_target_and_starts_nothing(capsys, tmp_path):
    assert cli.main(['up', '--target', 'robot', '--show-args', '--logs', str(tmp_path / 'log')]) == 0
    shown = capsys.readouterr().out
    assert 'image_transport\n    Raw: camera/image_raw' in shown and 'Allowed: raw, compressed. Default: raw.' in shown
    assert 'seed\n' not in shown and not (tmp_path / 'log').exists()


def test_the_demo_drives_a_task_on_a_forecast_or_goals_by_the_policy(monkeypatch):
    seen = []
    monkeypatch.setattr('worldmodel_ros.demo.run.run_demo', lambda options, observing: seen.append(options) or 0)
    for words in ([], ['--task', 'follow', '--set', 'forecast:=out/scene'], ['--goal', 'red,blue']):
        assert cli.main(['demo', *words]) == 0
    street, follow, goals = seen
    assert (street.plan.task, street.plan.goals, street.arguments['forecast']) == ('street', [], 'tiny')
    assert (follow.plan.task, follow.arguments['forecast']) == ('follow', 'out/scene')
    assert (goals.plan.task, goals.plan.goals, goals.arguments['forecast']) == ('', ['red', 'blue'], '')


def test_the_demo_takes_what_set_gives_or_names_the_option_instead(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr('worldmodel_ros.demo.run.run_demo', lambda options, observing: seen.append(options) or 0)
    assert cli.main(['demo', '--set', 'model:=out/mine', 'seed:=7']) == 0
    assert (seen[0].arguments['model'], seen[0].arguments['seed']) == ('out/mine', '7')
    for name, value in (('task', 'follow'), ('goal', 'red')):
        assert cli.main(['demo', '--set', f'{name}:={value}']) == 2
        assert f'--{name} {value}' in capsys.readouterr().err


def test_the_demo_kills_nothing_after_its_end(capsys):
    assert cli.main(['demo', '--kill-at', '3', '--kill-at', '30']) == 2
    assert '--kill-at 30 is not within --seconds 30' in capsys.readouterr().err


def test_an_answer_of_what_if_shows_what_each_term_of_the_task_gives(monkeypatch, tmp_path, capsys):
    answer = what_if(1, truth=False)
    answer = replace(answer, terms=('reach red (weight 1)', 'keep 0.12 m to everything (weight 2)'),
                     branches=tuple(replace(branch, terms=(-0.5, -2.0)) for branch in answer.branches))
    monkeypatch.setattr('worldmodel_ros.bringup.environment.node_environment', lambda *args, **kwargs: {})
    monkeypatch.setattr('worldmodel_ros.nodes.common.what_if_client.ask_once', lambda *args: (answer, None))
    assert cli.main(['what-if', '--out', str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.count('score -2.50: -0.50 reach red (weight 1); -2.00 keep 0.12 m to everything (weight 2)') == 4


def test_the_tasks_of_the_demo_are_those_of_the_simulated_robot():
    assert set(arguments.TASKS) == set(SCENES)


def test_demo_names_an_argument_that_the_bringup_does_not_have(capsys, tmp_path):
    assert cli.main(['demo', '--set', 'colour:=red', '--out', str(tmp_path)]) == 1
    assert "'colour' is unknown" in capsys.readouterr().err


def test_a_domain_that_is_no_number_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv('ROS_DOMAIN_ID', 'kitchen')
    with pytest.raises(SystemExit, match='kitchen'):
        cli.main(['up', '--logs', str(tmp_path)])


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(checks, 'MODULES', ('numpy', 'no_such_module'))
    finding = checks.packages({})
    assert finding.level is checks.Level.FAIL and 'no_such_module' in finding.text and finding.remedy
    monkeypatch.setattr(checks, 'environment', lambda logs: {})
    monkeypatch.setattr(checks, 'QUICK', (lambda _: finding, checks.python))
    assert cli.main(['doctor', '--quick']) == 1
    output = capsys.readouterr().out
    assert 'FAIL' in output and '->' in output and 'cannot run here yet' in output


def test_doctor_is_content_with_warnings(monkeypatch, capsys):
    monkeypatch.setattr(checks, 'environment', lambda logs: {})
    monkeypatch.setattr(checks, 'QUICK', (checks.large_images,))
    assert cli.main(['doctor', '--quick']) == 0
    assert 'WARN' in capsys.readouterr().out


def test_doctor_refuses_what_is_no_topic():
    from worldmodel_ros.cli.checks import Level, camera
    found = camera('/front camera', 'tiny')
    assert found.level is Level.FAIL and "'/front camera' is no topic" in found.text and '--camera' in found.remedy


def test_doctor_logs_to_a_folder_of_its_own_and_removes_it(monkeypatch, tmp_path):
    def look(surroundings):
        seen.append(Path(surroundings['ROS_LOG_DIR']))
        seen[-1].joinpath('log').touch()
        return checks.Finding(checks.Level.OK, '')
    seen = []
    monkeypatch.delenv('ROS_HOME', raising=False)
    monkeypatch.delenv('ROS_LOG_DIR', raising=False)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(checks, 'QUICK', (look,))
    assert cli.main(['doctor', '--quick']) == cli.main(['doctor', '--quick']) == 0
    assert seen[0] != seen[1] and {folder.parent for folder in seen} == {tmp_path} and not list(tmp_path.iterdir())


@pytest.mark.parametrize('limit, level', [(0, 'WARN'), (29, 'WARN'), (30, 'OK'), (99, 'OK'), (resource.RLIM_INFINITY, 'OK')])
def test_doctor_wants_the_real_time_priorities_that_the_shipped_files_request(limit, level, monkeypatch):
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    monkeypatch.setattr(resource, 'getrlimit', lambda kind: (limit, limit))
    found = checks.real_time({})
    assert found.level.name == level
    line = '@realtime - rtprio 30'
    assert (line in found.remedy) == (level == 'WARN') and line in DOCS.joinpath('installing.md').read_text()


def test_doctor_survives_what_crashes():
    code, output = checks._child('import os; os.abort()', {})
    assert code != 0 and output
