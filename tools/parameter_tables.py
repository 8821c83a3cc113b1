"""Writes docs/parameters.md from the tables by which the nodes declare their parameters.

    .venv/bin/python tools/parameter_tables.py > docs/parameters.md
"""
from __future__ import annotations

from worldmodel_ros.parameters.declaration import Param
from worldmodel_ros.parameters.tables import TABLES


def allowed(param: Param) -> str:
    return ', '.join(f'`{choice}`' for choice in param.choices) if param.choices else param.allowed()


def default(param: Param) -> str:
    if param.default is None:
        return 'unset'
    return f'`{str(param.default).lower() if isinstance(param.default, bool) else repr(param.default)}`'


def fixed(param: Param) -> str:
    return 'yes' if param.read_only else 'while configured' if param.while_configured else ''


def meaning(param: Param) -> str:
    notes = [*(['only with `allow_faults`'] if param.fault else []),
             *([f'formerly `{param.formerly}`'] if param.formerly else [])]
    return param.description + (f' ({"; ".join(notes)})' if notes else '')


def tables() -> str:
    lines = ['# Parameters', '',
             '`tools/parameter_tables.py` writes this page from `worldmodel_ros/parameters/`, where the nodes declare their',
             'parameters; a test keeps the two equal. If a file in `config/` sets another value, its comment says why. Fixed',
             'parameters are read when the node starts; those fixed while configured, when it is configured. A former name is',
             'accepted for one release, with a warning. A name that no node has, and that looks like a misspelt one, ends the',
             'node with the name that is meant; ROS would ignore it.']
    for node, params in TABLES.items():
        lines += ['', f'## {node}', '', '| parameter | type | default | unit | allowed | fixed | meaning |',
                  '|---|---|---|---|---|---|---|']
        lines += [f'| `{p.name}` | {p.type} | {default(p)} | {p.unit} | {allowed(p)} | {fixed(p)} | {meaning(p)} |'
                  for p in params]
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    print(tables(), end='')
