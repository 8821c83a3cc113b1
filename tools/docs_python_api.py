"""Describes the Python API for the documentation site from the sources, without importing them (tools/docs_site.py)."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from docs_site import escaped


def is_public(name: str) -> bool:
    return not name.startswith('_')


def object_lines(thing: griffe.Object, kind: str, colons: int) -> list[str]:
    """One name as a directive of Sphinx's Python domain."""
    fence = ':' * colons
    if kind in ('class', 'exception'):
        init = thing.members.get('__init__')
        signature = f'{thing.name}{parameters(init, skip=1)}' if init is not None and init.is_function else thing.name
    elif kind in ('attribute', 'property'):
        signature = thing.name
    else:
        signature = f'{thing.name}{parameters(thing, skip=int(kind in ("method", "classmethod")))}'
        signature += f' -> {thing.returns}' if thing.returns is not None else ''
    lines = ['', f'{fence}{{py:{kind}}} {signature}']
    if kind in ('attribute', 'property'):
        lines += [f':type: {thing.annotation}'] if thing.annotation is not None else []
    lines += [f':canonical: {thing.path}'] if kind == 'class' else []
    lines += ['', text_of(thing)]
    if isinstance(thing, griffe.Class):
        if any(str(base).endswith(('Enum', 'Flag')) for base in thing.bases):
            values = [member for member in thing.members.values()
                      if member.is_attribute and is_public(member.name) and 'property' not in member.labels]
            lines += ['', ', '.join(f'`{member.name} = {member.value}`' for member in values)]
        lines += [line for member in thing.members.values() for line in member_lines(member, colons - 1)]
    return [*lines, fence]


def member_lines(member: griffe.Object | griffe.Alias, colons: int) -> list[str]:
    """Return a class's member, if it is public and documented."""
    if member.is_alias or not is_public(member.name) or not member.docstring:
        return []
    if member.is_function:
        kind = next((label for label in ('staticmethod', 'classmethod') if label in member.labels), 'method')
    elif member.is_attribute:
        kind = 'property' if 'property' in member.labels else 'attribute'
    else:
        return []
    return object_lines(member, kind, colons)


def parameters(function: griffe.Function, skip: int) -> str:
    """Return the parameters as written, without the first ``skip`` ones (``self``)."""
    shown, star = [], False
    for parameter in list(function.parameters)[skip:]:
        name, kind = parameter.name, parameter.kind
        if kind is griffe.ParameterKind.var_positional:
            name, star = f'*{name}', True
        elif kind is griffe.ParameterKind.var_keyword:
            name = f'**{name}'
        elif kind is griffe.ParameterKind.keyword_only and not star:
            shown.append('*')
            star = True
        text = name if parameter.annotation is None else f'{name}: {parameter.annotation}'
        if parameter.default is not None and not name.startswith('*'):
            text += f' = {parameter.default}' if parameter.annotation is not None else f'={parameter.default}'
        shown.append(text)
    return f'({", ".join(shown)})'


def text_of(thing: griffe.Object) -> str:
    """Return the docstring as Markdown; its only markup is code spans and lists."""
    text = thing.docstring.value if thing.docstring else ''
    parts = re.split(r'(`+[^`]*`+)', text)
    parts[::2] = [re.sub(r'([*_\\<\[\]~#$])', r'\\\1', re.sub(r'^( *)\* ', r'\1- ', part, flags=re.MULTILINE))
                  for part in parts[::2]]
    return ''.join(parts)


def module_lines(module: griffe.Module) -> list[str]:
    """Return the section of one module: its public classes and functions that have a docstring."""
    names = [member for member in module.members.values()
             if not member.is_alias and is_public(member.name) and member.docstring and (member.is_class or member.is_function)]
    if not names:
        return []
    lines = ['', f'({module.path})=', f'## {module.name if not module.is_init_module else module.path}', '',
             f'`{module.path}`' if not module.is_init_module else '', '',
             '' if module.is_init_module else text_of(module), '', f':::{{py:currentmodule}} {module.path}', ':::']
    for member in names:
        exception = member.is_class and any(str(base).endswith(('Error', 'Exception')) for base in member.bases)
        lines += object_lines(member, 'exception' if exception else 'class' if member.is_class else 'function', 5)
    return lines


def packages(module: griffe.Module) -> Iterator[griffe.Module]:
    """Yield the package and its subpackages, except generated messages and folders without Python."""
    yield module
    for member in module.members.values():
        if not member.is_alias and member.is_module and member.is_init_module and is_public(member.name):
            if member.path not in (f'{module.path}.msg', f'{module.path}.srv', f'{module.path}.action'):
                yield from packages(member)


def summary(module: griffe.Module) -> str:
    return escaped(' '.join(module.docstring.value.split('\n\n')[0].split())) if module.docstring else ''


def python_pages(root: Path, name: str) -> dict[str, str]:
    """Return pages by their path on the site: one per package, with the public names of its modules, and an index."""
    loaded = griffe.load(name, search_paths=[root], allow_inspection=False)
    pages, index = {}, []
    for package in sorted(packages(loaded), key=lambda package: package.path):
        modules = [member for _, member in sorted(package.members.items()) if not member.is_alias and member.is_module
                   and not member.is_init_module and is_public(member.name)]
        sections = {module.name: module_lines(module) for module in modules}
        body = [line for lines in [module_lines(package), *sections.values()] for line in lines]
        lines = [f'# {package.path}', '', text_of(package)]
        if modules:
            lines += ['', '| module | |', '|---|---|']
            lines += [f'| [`{module.name}`](<#{module.path}>) | {summary(module)} |' if sections[module.name] else
                      f'| `{module.name}` | {summary(module)} |' for module in modules]
        pages[f'reference/python/{package.path}.md'] = '\n'.join([*lines, *body]) + '\n'
        index.append(f'| [`{package.path}`](python/{package.path}.md) | {summary(package)} |')
    pages['reference/python.md'] = '\n'.join([
        '# Python API', '', 'Public names that have a docstring, read from the sources when this page was built.', '',
        '| package | |', '|---|---|', *index]) + '\n'
    return pages
