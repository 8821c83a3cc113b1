"""Builds the documentation as a web site, in build/docs: ``make docs``.

    .envs/docs/bin/python tools/docs_site.py [OPTIONS OF SPHINX-BUILD]

The pages in docs/ are also read on GitHub, so they link to files of the repository by relative paths. They are copied to
build/docs-source with such links turned into links to the page that shows the file (messages, configuration), or to a copy
of it. Reference pages are generated next to them: messages from action/, msg/ and srv/, the command line from its
argument parsers, configuration from config/, the Python API from the sources. Only the argument parsers are imported from
the package, and they need only the standard library. A broken link or anchor, and any other warning, fails the
build.
"""
from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGED, SITE = ROOT / 'build' / 'docs-source', ROOT / 'build' / 'docs'
PACKAGE = 'worldmodel_ros'
# Files in the repository's root that are pages of the site.
ROOT_PAGES = {'README.md': 'index.md', 'CONTRIBUTING.md': 'contributing.md', 'CHANGELOG.rst': 'changelog.md'}
CODE = re.compile(r'(^ *```.*?^ *```|`[^`\n]*`)', re.DOTALL | re.MULTILINE)
LINK = re.compile(r'(\]\()([^)\s]+)(\))')
LANGUAGES = {'.yaml': 'yaml', '.rviz': 'yaml', '.xml': 'xml', '.json': 'json'}


# Links

def anchor(path: str) -> str:
    """Return the anchor of a file's section on a shared page: ``config/train/tiny.yaml`` -> ``config-train-tiny-yaml``."""
    return re.sub(r'\W+', '-', path).strip('-').lower()


def page_of(path: str) -> str:
    """Return the page, with an anchor, that shows a file of the repository; '' if the site only has a copy of it."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith('docs/'):
        return path.removeprefix('docs/')
    if re.fullmatch(r'(msg|srv|action)/\w+\.(msg|srv|action)', path):
        return f'reference/interfaces.md#{Path(path).stem.lower()}'
    if path.startswith('config/') and Path(path).suffix in LANGUAGES:
        return f'reference/configuration.md#{anchor(path)}'
    return ''


def rewritten(markdown: str, source: str) -> tuple[str, set[str]]:
    """Turn the links of a file of the repository into links of the site.

    ``source`` is the file's path in the repository. Returns the text, and the paths of linked files of which the site needs
    a copy.
    """
    copies, folder = set(), posixpath.dirname(page_of(source)) or '.'

    def link(match: re.Match) -> str:
        target, hash_, fragment = match[2].partition('#')
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not target or '://' in target or not (ROOT / path).is_file():
            return match[0]  # the build reports broken links
        shown = page_of(path)
        if not shown:
            copies.add(path)
            shown = f'files/{path}'
        shown, inner, own = shown.partition('#')
        return f'{match[1]}{posixpath.relpath(shown, folder)}{inner or hash_}{own or fragment}{match[3]}'

    parts = CODE.split(markdown)  # every second part is code
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return ''.join(parts), copies


# Generated pages

def escaped(text: str) -> str:
    """Escape Markdown's special characters in running text, except in its code spans; also for a table's cell."""
    parts = re.split(r'(`+[^`]*`+)', text)
    parts[::2] = [re.sub(r'([*_\\<\[\]~#$])', r'\\\1', part) for part in parts[::2]]
    return ''.join(parts).replace('|', r'\|')


def changelog() -> str:
    """Return the changelog, whose entries are the same in reStructuredText and in Markdown."""
    lines = (ROOT / 'CHANGELOG.rst').read_text().splitlines()
    return '\n'.join(['# Changelog', '', *(line for line in lines if not line.startswith(('^^^', 'Changelog for')))]) + '\n'


def configuration() -> str:
    """Return every file of config/, verbatim."""
    lines = ['# Configuration files', '',
             'The files that the launch files, `worldmodel` and the tests load, as they are. '
             'They are installed to `share/worldmodel_ros/config`.']
    for path in sorted((ROOT / 'config').rglob('*')):
        if path.suffix in LANGUAGES:
            name = str(path.relative_to(ROOT))
            lines += ['', f'({anchor(name)})=', f'## {name}', '', f'``` {LANGUAGES[path.suffix]}', path.read_text().rstrip(),
                      '```']
    return '\n'.join(lines) + '\n'


def interface_tables(text: str) -> tuple[str, list[str]]:
    """Return the leading comment of one part of an interface definition, and tables of its constants and fields."""
    lead, constants, fields = [], [], []
    for line in text.strip().splitlines():
        code, _, comment = line.partition('#')
        declaration, comment = code.split(), escaped(comment.strip())
        if not declaration:
            lead.append(comment)
        elif '=' in code:
            name, value = code.split(maxsplit=1)[1].split('=')
            constants.append(f'| `{name.strip()}` | `{value.strip()}` | {comment} |')
        else:
            fields.append(f'| `{declaration[1]}` | `{declaration[0]}` | {comment} |')
    tables = []
    for title, rows in (('constant | value', constants), ('field | type', fields)):
        tables += ['', f'| {title} | meaning |', '|---|---|---|', *rows] if rows else []
    return '\n'.join(lead).strip(), tables


def interfaces() -> str:
    """Return the actions, messages and services of action/, msg/ and srv/."""
    lines = ['# Messages, services and actions', '',
             'From the definitions in `action/`, `msg/` and `srv/`. Units are in brackets.']
    titles = {1: ('',), 2: ('Request', 'Response'), 3: ('Goal', 'Result', 'Feedback')}
    for path in (path for kind in ('msg', 'srv', 'action') for path in sorted((ROOT / kind).glob(f'*.{kind}'))):
        lines += ['', f'## {path.stem}', '', f'`worldmodel_ros/{path.parent.name}/{path.stem}`', '']
        parts = [interface_tables(part) for part in re.split(r'^---$', path.read_text(), flags=re.MULTILINE)]
        lines.append(parts[0][0])  # a comment at the top of a service applies to all of it
        for title, (lead, tables) in zip(titles[len(parts)], parts, strict=True):
            lines += ['', f'**{title}**'] if title else []
            lines += ['', lead] if lead and lead != parts[0][0] else []
            lines += tables
    return '\n'.join(lines) + '\n'


def command_lines(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """Yield the section of one command, and those of its subcommands."""
    yield from ('', '#' * level + ' ' + parser.prog, '')
    if parser.description:
        yield from (escaped(' '.join(parser.description.split())), '')
    yield from ('``` text', parser.format_usage().removeprefix('usage: ').strip(), '```', '')
    formatter = parser._get_formatter()
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    rows = [f'| `{formatter._format_action_invocation(action)}` | {escaped(formatter._expand_help(action))} |'
            for action in shown
            if not isinstance(action, argparse._HelpAction | argparse._VersionAction | argparse._SubParsersAction)]
    yield from ('| argument | meaning |', '|---|---|', *rows) if rows else ()
    yield from ('', '``` text', parser.epilog.strip(), '```') if parser.epilog else ()
    for action in shown:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from command_lines(subparser, level + 1)


def commands() -> str:
    """Return the command line, from its argument parsers."""
    os.environ.update(COLUMNS='100', NO_COLOR='1')
    sys.path.insert(0, str(ROOT))
    from worldmodel_ros import cli
    text = '\n'.join(['# Command line', *command_lines(cli.parser(), 2)]) + '\n'
    # If the training cannot be imported, the subcommand has no arguments, and reports that only when it is run.
    if '--config' not in text.partition('# worldmodel train')[2].partition('\n#')[0]:
        raise SystemExit('docs_site: the arguments of `worldmodel train` need more than the standard library now')
    return text


# The build

def stage() -> None:
    """Write the sources of the site into an empty folder."""
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(ROOT / 'docs', STAGED, ignore=shutil.ignore_patterns('*.md', '__pycache__'))
    pages, copies = {}, set()
    for path in [*(ROOT / 'docs').rglob('*.md'), *(ROOT / name for name in ROOT_PAGES if name.endswith('.md'))]:
        name = str(path.relative_to(ROOT))
        pages[page_of(name)], more = rewritten(path.read_text(), name)
        copies |= more
    from docs_python_api import python_pages  # needs griffe
    python = python_pages(ROOT, PACKAGE)
    pages |= {'changelog.md': changelog(), 'reference/configuration.md': configuration(), 'reference/cli.md': commands(),
              'reference/interfaces.md': interfaces(), **python}
    for name, text in pages.items():
        (STAGED / name).parent.mkdir(parents=True, exist_ok=True)
        (STAGED / name).write_text(text)
    for name in copies:
        (STAGED / 'files' / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, STAGED / 'files' / name)
    # The packages go below the index of the Python API.
    contents = (ROOT / 'docs' / '_toc.yml').read_text()
    entry = '      - file: reference/python\n'
    below = ''.join(f'          - file: {page}\n            title: {page.rpartition("/")[2].removeprefix(PACKAGE + ".")}\n'
                    for page in (name.removesuffix('.md') for name in python) if page != 'reference/python')
    if entry not in contents:
        raise SystemExit(f'docs_site: docs/_toc.yml has no line "{entry.strip()}"')
    (STAGED / '_toc.yml').write_text(contents.replace(entry, f'{entry}        entries:\n{below}'))


def main(options: list[str]) -> int:
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    code = subprocess.call([sys.executable, '-m', 'sphinx', '-b', 'html', '-W', '--keep-going', '-q', *options,
                            '-c', ROOT / 'docs', '-d', ROOT / 'build' / 'docs-doctrees', STAGED, SITE])
    if code == 0:
        print(f'docs: {(SITE / "index.html").relative_to(ROOT)}')
    return code


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
