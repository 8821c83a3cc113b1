"""What is declared of the parameters is what files, documents and the code behind the nodes say."""
import re
from pathlib import Path

import pytest
import yaml

from worldmodel_ros import motion
from worldmodel_ros.control.ladder import Settings
from worldmodel_ros.inputs.ticks import EXECUTED_TIMEOUT, FrameSettings
from worldmodel_ros.nodes.command_gate.parameters import TWIST_OUTPUTS, inconsistency, make_limits, make_policy
from worldmodel_ros.nodes.world_model import parameters as world_model
from worldmodel_ros.parameters.command_gate import OUTPUTS
from worldmodel_ros.parameters.declaration import Param
from worldmodel_ros.parameters.tables import TABLES
from worldmodel_ros.parameters.velocity_limits import VELOCITY_LIMITS
from worldmodel_ros.safety.gate import Policy
from worldmodel_ros.safety.motion import INTERVAL
from worldmodel_ros.sim.world import LIMITS

ROOT = Path(__file__).resolve().parents[1]
OF_OTHER_PACKAGES = ('collision_monitor.yaml', 'twist_mux.yaml')
PARAMETER_FILES = [path for path in sorted((ROOT / 'config').glob('*.yaml'))
                   if 'ros__parameters' in path.read_text() and path.name not in OF_OTHER_PACKAGES]
DEFAULTS = {node: {param.name: param.default for param in params} for node, params in TABLES.items()}


def flat(values, prefix=''):
    """The parameters of a file, whose names may be nested or have dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value


def problems(text):
    """Say what is wrong with a parameter file: with its names, and with each value by itself."""
    for key, content in yaml.safe_load(text).items():
        node = key.removeprefix('/**/')
        if node not in TABLES:
            yield f'{key}: there is no such node'
            continue
        params = {param.name: param for param in TABLES[node]}
        for name, value in flat(content['ros__parameters']):
            if name not in params:
                yield f'{node}: there is no parameter {name}'
            elif reason := params[name].refusal(value):
                yield f'{node}: {reason}'


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def values_of(path):
    return dict(flat(yaml.safe_load(path.read_text())[f'/**/{path.stem}']['ros__parameters']))


def test_each_parameter_file_belongs_to_a_table():
    assert {path.stem for path in PARAMETER_FILES} == set(TABLES)


@pytest.mark.parametrize('path', PARAMETER_FILES, ids=lambda path: path.name)
def test_the_shipped_files_have_known_names_and_allowed_values(path):
    assert list(problems(path.read_text())) == []


@pytest.mark.parametrize('path', PARAMETER_FILES, ids=lambda path: path.name)
def test_a_shipped_value_that_is_not_the_default_is_commented_with_the_default_and_the_reason(path):
    defaults, text = DEFAULTS[path.stem], path.read_text()
    for name, value in values_of(path).items():
        comment = re.search(rf'^ +{re.escape(name)}:[^#\n]*(#.*(?:\n +#.*)*)?', text, re.MULTILINE)[1] or ''
        said = re.search(r'# default (\S+): ..', comment)
        if value == plain(defaults[name]):
            assert not said, f'{name} has its default: its comment need not say it'
        else:
            assert said and yaml.safe_load(said[1]) == defaults[name], \
                f'{name} is {value}: its comment has to begin with "default {defaults[name]!r}: " and the reason'


@pytest.mark.parametrize('path', PARAMETER_FILES, ids=lambda path: path.name)
def test_what_a_shipped_file_shows_in_a_comment_is_the_default(path):
    for name, value in re.findall(r'^ *# ([\w.]+): (\S+)', path.read_text(), re.MULTILINE):
        if name in DEFAULTS[path.stem]:
            assert yaml.safe_load(value) == DEFAULTS[path.stem][name], name


def test_the_gate_that_is_shipped_leaves_room_for_the_former_names():
    """They would contradict what is set there; once they are no longer accepted, the limits may be set."""
    renamed = {param.name for param in TABLES['command_gate'] if param.formerly}
    assert renamed and not renamed & set(values_of(ROOT / 'config/command_gate.yaml'))


def test_the_parameter_files_in_the_documents_would_be_taken():
    blocks = [(document.name, block) for document in (ROOT / 'docs').glob('*.md')
              for block in re.findall(r'^```yaml\n(.*?)^```', document.read_text(), re.MULTILINE | re.DOTALL)
              if 'ros__parameters' in block]
    assert blocks
    for name, block in blocks:
        assert list(problems(block)) == [], name


def test_the_table_of_the_first_parameters_has_the_declared_defaults():
    table = (ROOT / 'docs/topics.md').read_text().split('## Parameters')[1]
    rows = re.findall(r'^\| ([\w ]+) \| (`[^|]*`) \| ([^|]*) \|', table, re.MULTILINE)
    assert len(rows) > 8
    for node, names, values in rows:
        for name, value in zip(re.findall('`([^`]+)`', names), values.split(','), strict=True):
            tables = [DEFAULTS[node]] if node in DEFAULTS else [table for table in DEFAULTS.values() if name in table]
            assert tables, name
            assert {str(table[name]) for table in tables} == {value.strip(' `')}, f'{node}: {name}'


def test_the_code_behind_the_nodes_has_the_same_defaults():
    gate, model = DEFAULTS['command_gate'], DEFAULTS['world_model_node']
    assert make_policy(gate) == Policy() and gate['command_interval_max_s'] == INTERVAL
    assert make_limits(gate) == LIMITS.axes(), 'those of the simulated robot'
    assert inconsistency(gate) is None and set(TWIST_OUTPUTS) < set(OUTPUTS)
    assert world_model.ladder_settings(model) == Settings() and world_model.frame_settings(model) == FrameSettings()
    assert model['executed_timeout_s'] == EXECUTED_TIMEOUT and world_model.inconsistency(model) is None
    assert world_model.base_limits(model) == motion.LIMITS
    assert all(model[param.name] == gate[param.name] for param in VELOCITY_LIMITS)
    assert model['deadline_s'] == gate['deadline_s'] == DEFAULTS['sim_robot']['deadline_s']


def test_names_are_told_apart():
    for params in TABLES.values():
        names = [param.name for param in params] + [param.formerly for param in params if param.formerly]
        assert len(names) == len(set(names))


def test_a_parameter_knows_its_type_and_unit():
    assert [(Param(name, value, '').type, Param(name, value, '').unit) for name, value in (
        ('wait_s', 1.0), ('rate_hz', 1), ('on', True), ('s', 'text'), ('gains', (1.0, 2.0)), ('names', ('a',)))] == [
        ('double', 's'), ('int', 'Hz'), ('bool', ''), ('string', ''), ('double_array', ''), ('string_array', '')]
    assert Param('size', 1, '', 'pixels').unit == 'pixels'


@pytest.mark.parametrize('declared, value, reason', [
    ({'default': 1.0}, 1, 'is no double .*decimal point'), ({'default': 1}, True, 'True is no int'),
    ({'default': 1}, 2**63, 'is no int'), ({'default': 1}, 1.0, 'is no int'), ({'default': True}, 1, 'is no bool'),
    ({'default': 'a'}, 7, 'is no string'), ({'default': (1.0,)}, [1.0, 'a'], 'is no double_array'),
    ({'default': 1.0}, float('nan'), 'not finite'), ({'default': (1.0,)}, (float('inf'),), 'not finite'),
    ({'default': 1.0, 'low': 0.5}, 0.4, 'give 0.5 or more'), ({'default': 1.0, 'high': 2.0}, 2.1, 'give 2 or less'),
    ({'default': 1, 'low': 0, 'high': 2}, 3, r'give 0 \.\. 2'),
    ({'default': 'a', 'choices': ('a', 'b')}, 'c', 'use one of: a, b'),
    ({'default': 1, 'check': lambda value: 'no reason' if value > 1 else None}, 2, 'no reason')])
def test_a_value_is_refused_with_the_reason(declared, value, reason):
    param = Param(name='it', description='', **declared)
    assert re.search(f'^it: .*{reason}', param.refusal(value))
    assert param.refusal(declared['default']) is None and param.refusal(None) is None


@pytest.mark.parametrize('declared, reason', [
    ({'default': None}, 'give the type'), ({'default': ()}, 'give the type'), ({'default': 3, 'high': 2}, 'the default'),
    ({'default': 'c', 'choices': ('a', 'b')}, 'the default')])
def test_a_declaration_that_contradicts_itself_is_refused(declared, reason):
    with pytest.raises(ValueError, match=f'it: {reason}'):
        Param(name='it', description='', **declared)
