"""What a parameter's declaration says, and refuses."""
import re

import pytest

from worldmodel_ros.parameters.declaration import Param


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
