"""Node parameters: descriptors, refusals and run-time changes."""

import re

import pytest
import rclpy
from rclpy.context import Context
from rclpy.impl.rcutils_logger import RcutilsLogger
from rclpy.lifecycle import LifecycleNode
from rclpy.node import Node
from rclpy.parameter import Parameter

from worldmodel_ros.nodes.common.parameters import ParameterError, Parameters
from worldmodel_ros.parameters.declaration import Param
from worldmodel_ros.parameters.tables import TABLES

TABLE = (
    Param('deadline_s', 0.05, 'time allowed', low=0.0, high=1.0),
    Param('reserve_s', 0.004, 'part of it'),
    Param('mode', 'slow', 'what to do', choices=('slow', 'stop')),
    Param('count', 3, 'how many', low=1),
    Param('gains', (0.5, 0.1), 'two gains', check=lambda v: None if len(v) == 2 else 'give two gains'),
    Param('joints', None, 'names', type='string_array'),
    Param('model', 'tiny', 'fixed at the start', read_only=True),
    Param('linear.x.max_velocity', 0.6, 'highest speed', 'm/s', low=0.0, formerly='v_max'),
)


def reserve_fits(values):
    return None if values['reserve_s'] < values['deadline_s'] else 'reserve_s must be less than deadline_s'


@pytest.fixture(scope='module')
def context():
    context = Context()
    rclpy.init(context=context)
    yield context
    rclpy.shutdown(context=context)


@pytest.fixture(params=[Node, LifecycleNode])
def make(request, context):
    nodes = []

    def make(on_change=None, **overrides):
        node = request.param(
            'subject', context=context,
            parameter_overrides=[Parameter(name, value=value) for name, value in overrides.items()])
        nodes.append(node)
        return node, Parameters(node, TABLE, on_change, consistent=reserve_fits)

    yield make
    for node in nodes:
        node.destroy_node()


def change(node, **values):
    return node.set_parameters_atomically([Parameter(name, value=value) for name, value in values.items()])


def test_defaults_and_overrides_are_read_by_name(make):
    _, parameters = make(deadline_s=0.1)
    assert dict(parameters) == {'deadline_s': 0.1, 'reserve_s': 0.004, 'mode': 'slow', 'count': 3,
                                'gains': (0.5, 0.1), 'joints': None, 'model': 'tiny', 'linear.x.max_velocity': 0.6}


def test_descriptors_tell_description_range_and_choices(make):
    node, _ = make()
    deadline, mode, count, model, speed, former = node.describe_parameters(
        ['deadline_s', 'mode', 'count', 'model', 'linear.x.max_velocity', 'v_max'])
    assert (deadline.description, speed.description) == ('time allowed [s]', 'highest speed [m/s]')
    assert former.description == 'deprecated: use linear.x.max_velocity [m/s]'
    span = deadline.floating_point_range[0]
    assert (span.from_value, span.to_value) == (0.0, 1.0)
    assert mode.additional_constraints == 'one of: slow, stop'
    assert count.integer_range[0].from_value == 1
    assert model.read_only


def test_a_change_is_applied_and_told(make):
    told = []
    node, parameters = make(lambda name, value: told.append((name, value)))
    assert change(node, deadline_s=0.2, joints=['a', 'b']).successful
    assert (parameters['deadline_s'], parameters['joints']) == (0.2, ('a', 'b'))
    assert told == [('deadline_s', 0.2), ('joints', ('a', 'b'))]


@pytest.mark.parametrize('values, reason', [
    ({'deadline_s': 2.0}, 'Max: 1.0'), ({'deadline_s': float('nan')}, 'out of range'),
    ({'reserve_s': float('nan')}, 'finite'), ({'mode': 'fly'}, 'use one of: slow, stop'),
    ({'count': 0}, 'Min: 1'), ({'gains': [1.0]}, 'give two gains'),
    ({'gains': [1.0, float('inf')]}, 'finite'), ({'model': 'big'}, 'read-only'),
    ({'deadline_s': 0.004}, 'reserve_s must be less'), ({'deadline_s': 1}, 'expected')])
def test_a_bad_change_is_refused_with_its_reason_and_changes_nothing(make, values, reason):
    told = []
    node, parameters = make(lambda name, value: told.append(name))
    before = dict(parameters)
    result = change(node, **values)
    assert not result.successful and reason in result.reason
    assert dict(parameters) == before and told == []


def test_one_bad_value_refuses_all_that_came_with_it(make):
    node, parameters = make()
    assert not change(node, deadline_s=0.2, mode='fly').successful
    assert parameters['deadline_s'] == 0.05


def test_values_that_depend_on_each_other_change_together(make):
    node, parameters = make()
    assert not change(node, reserve_s=0.1).successful
    assert change(node, reserve_s=0.1, deadline_s=0.2).successful
    assert parameters['reserve_s'] == 0.1


@pytest.mark.parametrize('override, reason', [
    ({'deadline_s': 1}, 'decimal point'), ({'deadline_s': 7.0}, 'Max: 1.0'), ({'mode': 'fly'}, 'slow, stop'),
    ({'gains': [1.0]}, 'give two gains'), ({'reserve_s': 0.5}, 'reserve_s must be less')])
def test_a_node_cannot_start_with_a_bad_value(make, override, reason):
    with pytest.raises(ParameterError, match=reason):
        make(**override)


@pytest.fixture
def warnings(monkeypatch):
    """What nodes warn of."""
    told = []
    monkeypatch.setattr(RcutilsLogger, 'warning', lambda self, message, **options: told.append(message))
    return told


def test_a_former_name_is_taken_at_the_start_with_a_warning_that_names_the_new_one(make, warnings):
    node, parameters = make(v_max=0.2)
    assert parameters['linear.x.max_velocity'] == node.get_parameter('v_max').value == 0.2
    assert len(warnings) == 1 and re.search('v_max is deprecated.*: use linear.x.max_velocity', warnings[0])
    _, parameters = make(**{'v_max': 0.2, 'linear.x.max_velocity': 0.2})
    assert parameters['linear.x.max_velocity'] == 0.2


def test_a_former_name_is_set_with_a_warning_and_follows_the_new_one(make, warnings):
    changes = []
    node, parameters = make(lambda name, value: changes.append((name, value)))
    assert change(node, v_max=0.3).successful and len(warnings) == 1
    assert parameters['linear.x.max_velocity'] == node.get_parameter('linear.x.max_velocity').value == 0.3
    assert change(node, **{'linear.x.max_velocity': 0.4}).successful and len(warnings) == 1
    assert parameters['linear.x.max_velocity'] == node.get_parameter('v_max').value == 0.4
    assert changes == [('linear.x.max_velocity', 0.3), ('linear.x.max_velocity', 0.4)]
    for value in (-1.0, float('nan')):
        refused = change(node, v_max=value)
        assert not refused.successful and 'out of range' in refused.reason and parameters['linear.x.max_velocity'] == 0.4


def test_a_former_and_a_new_name_with_different_values_are_refused(make):
    both = {'v_max': 0.2, 'linear.x.max_velocity': 0.3}
    with pytest.raises(ParameterError, match=r'v_max \(0.2\) .* \(0.3\): give linear.x.max_velocity alone'):
        make(**both)
    node, parameters = make()
    refused = change(node, **both)
    assert not refused.successful and 'give linear.x.max_velocity alone' in refused.reason
    assert parameters['linear.x.max_velocity'] == node.get_parameter('v_max').value == 0.6
    assert change(node, **{'v_max': 0.2, 'linear.x.max_velocity': 0.2}).successful


@pytest.mark.parametrize('override, reason', [({'v_max': -1.0}, 'linear.x.max_velocity'), ({'v_max': 1}, 'decimal point')])
def test_a_bad_value_of_a_former_name_is_refused_at_the_start(make, override, reason):
    with pytest.raises(ParameterError, match=reason):
        make(**override)


@pytest.mark.parametrize('name, meant', [('linear.x.max_velocty', 'linear.x.max_velocity'), ('deadlines_s', 'deadline_s')])
def test_a_misspelt_name_is_refused_at_the_start(make, name, meant):
    with pytest.raises(ParameterError, match=f'there is no parameter {name}: {meant} is meant'):
        make(**{name: 0.3})


def test_what_is_for_other_nodes_or_for_rclpy_is_let_be_at_the_start(make):
    own = {param.name for param in TABLE}
    others = {param.name for table in TABLES.values() for param in table} - own
    names = [*others, 'my_planner.rate', 'qos_overrides./tf.publisher.depth']
    _, parameters = make(**dict.fromkeys(names, 1), use_sim_time=True)
    assert set(parameters) == own


def test_parameters_of_others_are_let_be(make):
    node, parameters = make()
    node.declare_parameter('other', 1.0)
    assert change(node, other=2.0).successful
    assert 'other' not in parameters
