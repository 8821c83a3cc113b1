"""Writes docs/parameters.md from the tables that the nodes declare their parameters from.

    .venv/bin/python tools/parameter_tables.py > docs/parameters.md
"""
from __future__ import annotations

from rclpy.parameter import Parameter

from worldmodel_ros.nodes.bag_player import node as bag_player
from worldmodel_ros.nodes.command_gate import parameters as command_gate_parameters
from worldmodel_ros.nodes.recorder import node as recorder
from worldmodel_ros.nodes.sim_robot import node as sim_robot
from worldmodel_ros.nodes.world_model import parameters as world_model_parameters

NODES = (
    ('world_model_node', world_model_parameters.parameters(lambda: False, lambda goal: None)),
    ('command_gate', command_gate_parameters.PARAMETERS),
    ('sim_robot', sim_robot.PARAMETERS),
    ('bag_player', bag_player.PARAMETERS),
    ('recorder', recorder.PARAMETERS),
)


def allowed(param) -> str:
    if param.choices:
        return ', '.join(f'`{choice}`' for choice in param.choices)
    if param.low is None and param.high is None:
        return ''
    low, high = ('' if bound is None else f'{bound:g}' for bound in (param.low, param.high))
    return f'{low} .. {high}'


def default(param) -> str:
    if isinstance(param.default, Parameter.Type):
        return 'unset'
    return f'`{str(param.default).lower() if isinstance(param.default, bool) else repr(param.default)}`'


def tables() -> str:
    lines = ['# Parameters', '',
             'Written by `tools/parameter_tables.py` from the tables that the nodes declare them from; a test keeps the two '
             'equal.', 'The files in `config/` set some of them otherwise, for one deployment. A name that ends in a unit '
             'has that unit.', 'Fixed ones are read when the node starts.']
    for node, params in NODES:
        lines += ['', f'## {node}', '', '| parameter | default | allowed | fixed | meaning |', '|---|---|---|---|---|']
        lines += [f'| `{p.name}` | {default(p)} | {allowed(p)} | {"yes" if p.read_only else ""} | '
                  f'{p.description}{" (with `allow_faults` alone)" if p.fault else ""} |'
                  for p in params]
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    print(tables(), end='')
