"""Documents say what the code says."""
import importlib.util
import re
import shlex
from pathlib import Path


from worldmodel_ros import cli
from worldmodel_ros.bringup import description as bringup
from worldmodel_ros.engine.loading import model_folder

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md')))


def test_the_parameter_tables_are_those_of_the_nodes():
    spec = importlib.util.spec_from_file_location('parameter_tables', ROOT / 'tools' / 'parameter_tables.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / 'docs' / 'parameters.md').read_text() == module.tables(), \
        'run .venv/bin/python tools/parameter_tables.py > docs/parameters.md'


def test_links_and_pictures_of_the_documents_exist():
    for document in DOCUMENTS:
        for target in re.findall(r'\]\(([^)#\s]+)', document.read_text()):
            if '://' not in target:
                assert (document.parent / target).exists(), f'{document.name} links to {target}'


def test_the_tests_that_the_documents_name_exist():
    for document in DOCUMENTS:
        file = None
        for name, test in re.findall(r'`(test_\w+\.py)?(?:::(test_\w+))?`', document.read_text()):
            file = name or file
            if name or test:
                text = (ROOT / 'test' / file).read_text()
                assert not test or f'def {test}(' in text, f'{document.name} names {test}, which {file} does not have'


def split(line):
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f'{line}: {error}') from error


def shell_lines(text):
    """Lines that begin with one of our commands, of a document's code blocks or of a help text."""
    for line in re.sub(r'\s*\\\n\s*', ' ', text).splitlines():
        # Helps explain a command on its line, after a wide gap.
        for part in re.split(r' &+(?: |$)|;', re.split(r'\s{2,}', line.strip().removeprefix('.venv/bin/'))[0]):
            if re.match(r'(worldmodel|ros2 launch worldmodel_ros) ', part.strip()):
                yield split(part)


def spans(document):
    """Commands between backticks in the running text, unless only a subcommand or an option is named."""
    for span in re.findall(r'(?<!`)`((?:worldmodel|ros2 launch worldmodel_ros) [^`]*)`', document.read_text()):
        words = split(span)
        if any(word.startswith('--') or ':=' in word for word in words[:-1]) or ':=' in words[-1]:
            yield words


def helps():
    actions = cli.parser()._subparsers._group_actions
    return [(f'worldmodel {name} --help', words) for name, sub in actions[0].choices.items()
            for words in shell_lines(sub.epilog or '')]


def written_commands():
    found = [(document.name, words) for document in DOCUMENTS
             for words in [*shell_lines(document.read_text()), *spans(document)]]
    return found + helps()


def is_model(name):
    """Whether it is shipped, or stands for a folder of the reader's."""
    return not name or name.isupper() or '/' in name or (model_folder(name) / 'model.json').is_file()


def test_commands_that_are_written_down_are_understood_and_name_models_that_are_shipped(capsys):
    commands = written_commands()
    assert len(commands) > 60
    assert {'README.md', 'serving.md', 'worldmodel serve --help'} <= {where for where, _ in commands}
    description = bringup.load()
    starters = {'up': 'sim', 'replay': 'replay', 'demo': 'sim'}
    targets = {'sim_demo': 'sim', 'multi_robot': 'sim', 'world_model': 'robot', 'replay': 'replay',
               'shared_control': 'robot'}
    own = {'joy_vel', 'collision_monitor', 'collision_monitor_params_file',
           'namespace', 'robots', 'params_file', 'autostart', 'activation_timeout'}
    for where, words in commands:
        line = f'{where}: {" ".join(words)}'
        if words[0] == 'ros2':
            name, *given = words[3:]
            assert (ROOT / 'launch' / name).is_file(), line
            target, settings = targets[name.removesuffix('.launch.py')], dict(word.split(':=', 1) for word in given)
        else:
            try:
                chosen = cli.parser().parse_args(words[1:])
            except SystemExit as ended:
                assert not ended.code, f'{line}\n{capsys.readouterr().err}'
                continue  # --help
            target, settings = getattr(chosen, 'target', starters.get(words[1])), {}
            for option in ('model', 'smaller'):
                models = getattr(chosen, option, None)
                for model in models if isinstance(models, list) else [models or '']:
                    assert is_model(str(model)), f'{line}: {model} is not shipped'
            if words[1] in starters:
                settings = dict(chosen.set)
        known = {argument.name for argument in description.arguments_for(target)} if target else set()
        assert set(settings) <= known | own, line
        for name in ('model', 'server_model'):
            assert is_model(settings.get(name, '')), f'{line}: {settings[name]} is not shipped'


def test_the_readme_is_read_in_a_minute_and_leads_to_the_rest():
    text = (ROOT / 'README.md').read_text()
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 900
    linked = set(re.findall(r'\]\(([^)#\s]+)', text))
    assert {'CONTRIBUTING.md', 'docs/first_drive.md', 'docs/performance.md', 'docs/own_robot.md'} <= linked
    assert re.search(r'ros2 launch worldmodel_ros .*ros2 service call /world_model_node/what_if', text, re.DOTALL)
    assert 'Not suitable for real robots as shipped' in text


def test_the_index_of_the_decisions_names_each_once_and_in_order():
    text = (ROOT / 'docs' / 'decisions.md').read_text()
    index, headings = text.partition('\n## ')[0], re.findall(r'^### (.*)$', text, re.MULTILINE)
    links = [(heading, re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')) for heading in headings]
    assert re.findall(r'^\* \[(.*)\]\(#(.*)\)$', index, re.MULTILINE) == links
