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
    notes = [*(['with `allow_faults` alone'] if param.fault else []),
             *([f'formerly `{param.formerly}`'] if param.formerly else [])]
    return param.description + (f' ({"; ".join(notes)})' if notes else '')


def tables() -> str:
    lines = ['# Parameters', '',
             'Written by `tools/parameter_tables.py` from `worldmodel_ros/parameters/`, which the nodes declare them from; a',
             'test keeps the two equal. Where a file in `config/` sets one otherwise, its comment says why. Fixed ones are',
             'read when the node starts; those that are fixed while configured, when it is configured. A former name is',
             'accepted for one release, with a warning.']
    for node, params in TABLES.items():
        lines += ['', f'## {node}', '', '| parameter | type | default | unit | allowed | fixed | meaning |',
                  '|---|---|---|---|---|---|---|']
        lines += [f'| `{p.name}` | {p.type} | {default(p)} | {p.unit} | {allowed(p)} | {fixed(p)} | {meaning(p)} |'
                  for p in params]
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    print(tables(), end='')
