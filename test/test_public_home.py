"""What a visitor relies on: workflows, the order of the documentation, the commands that are named, versions."""
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / '.github' / 'workflows').glob('*.yml'))
TARGETS = set(re.findall(r'^([a-z][\w-]*):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
MAKE = re.compile(r'(?<![\w./-])make ([a-z][\w-]*)')
each_workflow = pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.stem)


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / 'tools' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps(workflow):
    return [step for job in workflow['jobs'].values() for step in job['steps']]


def test_there_are_workflows():
    assert {path.stem for path in WORKFLOWS} >= {'checks', 'docs', 'python', 'ros'}


@each_workflow
def test_a_workflow_may_only_read_ends_in_time_and_runs_once(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow['permissions'] == {'contents': 'read'}
    assert workflow['concurrency']['group']
    assert set(workflow[True]) >= {'push', 'pull_request'}  # ``on``, which YAML 1.1 takes for a truth value
    for name, job in workflow['jobs'].items():
        assert 0 < job['timeout-minutes'] <= 120, name
        assert 'latest' not in job['runs-on'], name
        assert 'permissions' not in job, name


@each_workflow
def test_actions_are_pinned_to_a_commit_whose_release_is_named(path):
    text = path.read_text()
    used = [step['uses'] for step in steps(yaml.safe_load(text)) if 'uses' in step]
    assert used
    for action in used:
        assert re.search(rf'{re.escape(action)}  # v\d+\.\d+\.\d+$', text, re.MULTILINE), action
        assert re.fullmatch(r'[\w-]+/[\w-]+@[0-9a-f]{40}', action), action


@each_workflow
def test_a_workflow_calls_only_what_there_is(path):
    workflow = yaml.safe_load(path.read_text())
    scripts = '\n'.join(step['run'] for step in steps(workflow) if 'run' in step)
    assert set(MAKE.findall(scripts)) <= TARGETS
    for name in re.findall(r'(?<![\w/])(?:tools|test|scripts|benchmarks)/[\w./-]+', scripts):
        assert (ROOT / name).exists(), name
    files = re.findall(r'src/worldmodel_ros/([\w./-]+)', path.read_text())
    for name in files:
        assert (ROOT / name).exists(), name


def test_the_workflows_run_the_two_commands_of_the_readme_and_all_checks():
    called = {target for path in WORKFLOWS for step in steps(yaml.safe_load(path.read_text()))
              for target in MAKE.findall(step.get('run', ''))}
    assert {'demo', 'test', 'lint', 'docs', 'package'} <= called
    matrix = yaml.safe_load((ROOT / '.github/workflows/python.yml').read_text())['jobs']['two-commands']['strategy']['matrix']
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    supported = [entry.rpartition(' ')[2] for entry in project['classifiers'] if re.search(r'Python :: 3\.\d+$', entry)]
    assert matrix['python'] == supported


@pytest.mark.parametrize('name', ['README.md', 'CONTRIBUTING.md', 'docs/testing.md', 'docs/first_drive.md',
                                  '.pre-commit-config.yaml'])
def test_documents_name_only_targets_of_make_that_there_are(name):
    code = re.findall(r'(?s:```.*?```)|^ {4}.*$|`[^`\n]+`|entry: .*', (ROOT / name).read_text(), re.MULTILINE)
    named = {target for part in code for target in MAKE.findall(part)}
    assert named
    assert named <= TARGETS


def test_every_target_of_make_is_phony_and_in_its_help():
    text = (ROOT / 'Makefile').read_text()
    assert set(re.search(r'^\.PHONY: (.*)$', text, re.MULTILINE)[1].split()) == TARGETS
    assert set(re.findall(r"@echo 'make ([\w-]+)", text)) == TARGETS - {'help'}


def entries(contents):
    if isinstance(contents, dict):
        return [contents[key] for key in ('root', 'file') if key in contents] + [
            entry for value in contents.values() for entry in entries(value)]
    return [entry for each in contents for entry in entries(each)] if isinstance(contents, list) else []


def test_the_documentation_site_has_every_page_once():
    site = tool('docs_site')
    listed = entries(yaml.safe_load((ROOT / 'docs' / '_toc.yml').read_text()))
    written = [page.relative_to(ROOT / 'docs').with_suffix('').as_posix() for page in (ROOT / 'docs').rglob('*.md')]
    generated = ['reference/cli', 'reference/interfaces', 'reference/configuration', 'reference/python']
    assert sorted(listed) == sorted([*written, *generated, *(page.removesuffix('.md') for page in site.ROOT_PAGES.values())])


def test_links_of_the_documents_lead_to_pages_of_the_site():
    site = tool('docs_site')
    text, copies = site.rewritten(
        '[a](docs/model.md#training) [b](msg/ActionChunk.msg) [c](LICENSE) [d](#measured) [e](https://a.example/docs/model.md) '
        '`[f](docs/model.md)` [g](config/bringup.yaml)', 'README.md')
    assert text == ('[a](model.md#training) [b](reference/interfaces.md#actionchunk) [c](files/LICENSE) [d](#measured) '
                    '[e](https://a.example/docs/model.md) `[f](docs/model.md)` '
                    '[g](reference/configuration.md#config-bringup-yaml)')
    assert copies == {'LICENSE'}
    assert site.rewritten('[a](../README.md#measured) [b](cache.md)', 'docs/model.md') == (
        '[a](index.md#measured) [b](cache.md)', set())


def test_the_reference_has_every_interface_command_and_configuration_file(monkeypatch):
    site = tool('docs_site')
    for name in ('COLUMNS', 'NO_COLOR'):
        monkeypatch.setenv(name, '')  # set back afterwards
    monkeypatch.setattr(sys, 'path', [*sys.path])
    interfaces, commands, configuration = site.interfaces(), site.commands(), site.configuration()
    for path in [*ROOT.glob('msg/*.msg'), *ROOT.glob('srv/*.srv'), *ROOT.glob('action/*.action')]:
        section = interfaces.partition(f'\n## {path.stem}\n')[2].partition('\n## ')[0]
        declared = [line.split('#')[0].split()[1].partition('=')[0] for line in path.read_text().splitlines()
                    if line.split('#')[0].strip() not in ('', '---')]
        assert declared
        assert [name for name in declared if f'| `{name}` |' not in section] == [], path.name
    from worldmodel_ros import cli
    for name in cli.SUBCOMMANDS:
        assert f'# worldmodel {name.replace("_", "-")}\n' in commands
    for path in (ROOT / 'config').rglob('*.yaml'):
        assert f'## {path.relative_to(ROOT)}\n' in configuration


def test_the_versions_agree():
    assert tool('package').complaints(ROOT) == []


def test_versions_that_differ_and_releases_without_a_section_are_refused(tmp_path):
    package = tool('package')
    for name in ('pyproject.toml', 'package.xml', 'CHANGELOG.rst', 'worldmodel_ros/__init__.py'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    version = package.versions(tmp_path)['pyproject.toml']
    changelog = 'Changelog for package worldmodel_ros\n^^^^^\n\n{}\n------------------\n* A change.\n'
    (tmp_path / 'CHANGELOG.rst').write_text(changelog.format('Forthcoming'))
    assert package.complaints(tmp_path) == []
    assert package.complaints(tmp_path, f'v{version}') == [f'CHANGELOG.rst has no section {version}']
    (tmp_path / 'CHANGELOG.rst').write_text(changelog.format('0.0.1 (2020-01-01)'))
    assert package.complaints(tmp_path) == [f'CHANGELOG.rst has no section {version}, nor one called Forthcoming']
    (tmp_path / 'CHANGELOG.rst').write_text(changelog.format(f'{version} (2026-01-31)'))
    assert package.complaints(tmp_path, f'v{version}') == []
    assert package.complaints(tmp_path, 'v99.0.0') == [f'the tag is v99.0.0, the version {version}']
    manifest = (tmp_path / 'package.xml').read_text()
    (tmp_path / 'package.xml').write_text(manifest.replace(f'<version>{version}<', '<version>99.0.0<'))
    assert package.complaints(tmp_path) == [f'package.xml says 99.0.0, pyproject.toml {version}']


def test_the_tools_of_every_dependency_group_are_pinned():
    groups = tomllib.loads((ROOT / 'pyproject.toml').read_text())['dependency-groups']
    lines = (ROOT / 'constraints.txt').read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith('#')]
    pinned = {canonicalize_name(pin.name): pin.specifier for pin in pins}
    for requirement in (Requirement(each) for group in groups.values() for each in group):
        (pin,) = pinned[canonicalize_name(requirement.name)]
        assert pin.operator == '=='
        assert requirement.specifier.contains(pin.version)
    used = set(re.findall(r'tools/group_env\.sh (\w+)', (ROOT / 'Makefile').read_text()))
    assert used == set(groups)


def test_what_cmake_looks_for_when_testing_is_a_test_dependency():
    testing = (ROOT / 'CMakeLists.txt').read_text().partition('if(BUILD_TESTING)')[2]
    wanted = re.findall(r'find_package\((\w+) REQUIRED\)', testing)
    declared = re.findall(r'<test_depend>(\w+)</test_depend>', (ROOT / 'package.xml').read_text())
    assert wanted
    assert set(wanted) <= set(declared)
