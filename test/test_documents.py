"""Documents say what the code says."""
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_parameter_tables_are_those_of_the_nodes():
    spec = importlib.util.spec_from_file_location('parameter_tables', ROOT / 'tools' / 'parameter_tables.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / 'docs' / 'parameters.md').read_text() == module.tables(), \
        'run .venv/bin/python tools/parameter_tables.py > docs/parameters.md'


def test_links_and_pictures_of_the_documents_exist():
    for document in (ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))):
        for target in re.findall(r'\]\(([^)#\s]+)', document.read_text()):
            if '://' not in target:
                assert (document.parent / target).exists(), f'{document.name} links to {target}'
