"""Which package imports which: the arrows of docs/architecture.md and no others, and no cycle anywhere."""
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = 'worldmodel_ros'
GENERATED = {'action', 'msg', 'srv'}
DOCUMENT = ROOT / 'docs' / 'architecture.md'
HAS_NO = {  # package -> libraries that none of its files may import
    **{name: {'rclpy'} for name in ('inputs', 'bags', 'model', 'kernels', 'cache', 'engine', 'serving')},
    **{name: {'rclpy', 'torch'} for name in ('safety', 'control', 'sim', 'datasets', 'parameters')}}


def modules():
    """Return name -> file of every module that is written by hand."""
    found = {}
    for file in sorted((ROOT / PACKAGE).rglob('*.py')):
        parts = file.relative_to(ROOT).with_suffix('').parts
        if parts[1] not in GENERATED:
            found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = file
    return found


def imported(name, file, known):
    """Return the modules that a module imports at run time, in functions too, and the libraries."""
    own, libraries = set(), set()

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and 'TYPE_CHECKING' in ast.unparse(child.test):
                for other in child.orelse:
                    visit(other)
                continue
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = name.split('.') if file.name == '__init__.py' else name.split('.')[:-1]
                if child.level:
                    base = '.'.join([*base[:len(base) - child.level + 1], *filter(None, [child.module])])
                else:
                    base = child.module
                targets = [f'{base}.{alias.name}' if f'{base}.{alias.name}' in known else base for alias in child.names]
            else:
                targets = []
            own.update(target for target in targets if target in known)
            libraries.update(target.partition('.')[0] for target in targets)
            visit(child)

    visit(ast.parse(file.read_text()))
    return own - {name}, libraries


@pytest.fixture(scope='module')
def graph():
    known = modules()
    return {name: imported(name, file, known) for name, file in known.items()}


def room(module):
    return module.split('.')[1] if module.count('.') else ''


def cycle(arrows):
    """Return a cycle of a graph, node -> nodes, as a list of nodes; [] if there is none."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return [*path[path.index(node):], node]
        if node in done:
            return []
        path.append(node)
        found = next((found for other in sorted(arrows.get(node, ())) if (found := visit(other))), [])
        path.pop()
        done.add(node)
        return found

    return next((found for node in sorted(arrows) if (found := visit(node))), [])


def allowed():
    """Return package -> packages, as the table of the document says."""
    rows = re.findall(r'^\| `(\w+)` \|([^|]*)\|', DOCUMENT.read_text(), re.MULTILINE)
    return {name: set(re.findall(r'`(\w+)`', others)) for name, others in rows}


def test_packages_import_what_the_table_of_the_document_says_and_nothing_else(graph):
    arrows = {}
    for module, (own, _) in graph.items():
        arrows.setdefault(room(module), set()).update(room(other) for other in own)
    arrows = {name: {other for other in others if other not in (name, '')} for name, others in arrows.items() if name}
    table = allowed()
    packages = {name for name in arrows if (ROOT / PACKAGE / name).is_dir()}
    assert packages == set(table), 'the table does not name the packages that there are'
    single = {name for name in arrows if name not in packages}  # files such as paths.py, which all may import
    for name in sorted(packages):
        others = arrows[name] - single
        assert others == table[name], f'{name} imports {sorted(others)}, the table says {sorted(table[name])}'
    for name in single:
        assert not arrows[name] - single, f'{name}.py imports {sorted(arrows[name] - single)}'


def test_no_package_imports_itself_by_way_of_others():
    assert cycle(allowed()) == []


def test_no_file_imports_itself_by_way_of_others(graph):
    assert cycle({name: own for name, (own, _) in graph.items()}) == []


def test_cycles_are_found():
    assert cycle({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == ['b', 'c', 'b']
    assert cycle({'a': {'b', 'c'}, 'b': {'c'}, 'c': set()}) == []


def defined(file):
    """Return the names of a file's functions and classes, as Class.method."""
    names = set()

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + child.name)
                visit(child, f'{prefix}{child.name}.')
    visit(ast.parse(file.read_text()), '')
    return names


@pytest.mark.parametrize('heading', ['The way of one frame', 'The way of one what-if'])
def test_the_files_and_functions_of_a_way_exist_and_are_counted(heading):
    text = DOCUMENT.read_text().partition(f'\n## {heading}\n')[2].partition('\n## ')[0]
    files, functions = [], 0
    for word in re.findall(r'`([^`]+)`', text):
        if word.endswith('.py'):
            files.append(word)
        elif word.endswith('()'):
            functions += 1
            assert word[:-2] in defined(ROOT / PACKAGE / files[-1]), f'{files[-1]} has no {word}'
    assert functions >= 15
    assert len(set(files)) == int(re.search(r'run code of (\d+) files', text)[1])


@pytest.mark.parametrize('package', HAS_NO)
def test_a_package_does_without_the_libraries_that_it_must_not_need(graph, package):
    for module, (_, libraries) in graph.items():
        if room(module) == package:
            assert not libraries & HAS_NO[package], f'{module} imports {sorted(libraries & HAS_NO[package])}'


def test_no_test_is_skipped_where_a_module_of_the_package_cannot_be_imported():
    # That is a failure: what such a module needs from elsewhere is asked for by its own name.
    skipped = re.compile(rf"importorskip\(\s*['\"]({PACKAGE}[\w.]*)")
    found = {(file.name, *skipped.findall(text)) for file in (ROOT / 'test').rglob('*.py')
             if (text := file.read_text()) and skipped.search(text)}
    assert not found


def test_a_process_of_a_model_starts_without_the_compilers():
    """They take two seconds of a core to import, in each process of the model, each time that it is started again."""
    program = ('import sys, worldmodel_ros.engine.distributed.worker, worldmodel_ros.engine.loading;'
               'print(sorted({"torch._dynamo", "torch._inductor", "sympy", "triton"} & set(sys.modules)))')
    done = subprocess.run([sys.executable, '-c', program], stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.stdout.strip() == '[]'


@pytest.mark.parametrize('name, file', [(name, file) for name, file in modules().items() if file.name == '__init__.py'])
def test_each_folder_says_what_belongs_there(name, file):
    text = ast.get_docstring(ast.parse(file.read_text())) or ''
    assert text.endswith('.'), f'{name} does not say what it is'
    if name.count('.') and name != f'{PACKAGE}.cli':
        first, _, second = text.partition('\n\n')
        assert first and second, f'{name} does not say in a second paragraph what belongs elsewhere'
