"""The description of the nodes to run (config/bringup.yaml): reading, checking, and resolving it for one robot."""
from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from collections.abc import Hashable, Iterable, Mapping

import yaml

from worldmodel_ros import dds_security
from worldmodel_ros.paths import config_directory

TARGETS = ('sim', 'robot', 'replay')


class DescriptionError(ValueError):
    """The description, or a value given for one of its arguments, is invalid."""


@dataclass(frozen=True)
class NodeDescription:
    """One node and its process: the executable, parameter files, parameters and remappings."""

    name: str
    package: str
    executable: str
    lifecycle: bool = False
    only_for: tuple[str, ...] = ()  # of TARGETS; empty: all
    only_with: tuple[str, ...] = ()  # arguments; runs only if one has a value other than false or another machine's URL
    shared: bool = False          # one process for all robots, not a ROS node: its parameters are command-line options
    parameter_files: tuple[Path, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)  # override the files
    remappings: Mapping[str, str] = field(default_factory=dict)
    respawn: bool = False
    respawn_delay: float = 0.0    # s
    grace: float = 0.0            # s, from SIGINT to SIGKILL; 0: as for all nodes
    required: bool = False        # when it ends, everything is stopped
    environment: Mapping[str, str] = field(default_factory=dict)  # of this process only
    environment_on_this_machine: Mapping[str, str] = field(default_factory=dict)  # overrides it if DDS stays on this machine

    def full_name(self, namespace: str = '') -> str:
        """Return the node's name in the graph, such as /robot1/command_gate; shared processes have no namespace."""
        return absolute_namespace('' if self.shared else namespace).rstrip('/') + '/' + self.name

    def enclave(self, namespace: str = '') -> list[str]:
        """Return the options that set the node's enclave to its full name, if DDS security is requested, else none."""
        return ['--enclave', self.full_name(namespace)] if dds_security.is_asked_for(os.environ) else []

    def own_environment(self, inherited: Mapping[str, str], shared: Mapping[str, str]) -> dict[str, str]:
        """
        Return this node's own variables, except those that the user has set: for which ``inherited`` has a value other than the
        shared one.

        ``environment_on_this_machine`` applies with ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST, if no static peers are named and
        the user has set no variable of ``environment``.
        """
        own = {name: value for name, value in self.environment.items() if inherited.get(name) in (None, shared.get(name))}
        if (len(own) == len(self.environment) and inherited.get('ROS_AUTOMATIC_DISCOVERY_RANGE') == 'LOCALHOST'
                and not inherited.get('ROS_STATIC_PEERS')):
            own.update(self.environment_on_this_machine)
        return own

    def command_line(self, namespace: str = '') -> list[str]:
        """Return the command-line arguments of this node or shared process."""
        if self.shared:
            return [f'--{name.replace("_", "-")}={value}' for name, value in self.parameters.items()]
        return self.ros_arguments(namespace)

    def ros_arguments(self, namespace: str = '') -> list[str]:
        """Return the command-line arguments of this node, from --ros-args on."""
        arguments = ['--ros-args', *self.enclave(namespace), '-r', f'__node:={self.name}']
        if namespace:
            arguments += ['-r', f'__ns:={absolute_namespace(namespace)}']
        for source, target in self.remappings.items():
            arguments += ['-r', f'{source}:={target}']
        for path in self.parameter_files:
            arguments += ['--params-file', str(path)]
        for name, value in self.parameters.items():
            # Flow style: rcl parses the value as YAML.
            text = yaml.dump(value, Dumper=_QuotedText, default_flow_style=True, width=float('inf'))
            text = text.removesuffix('...\n').strip()  # the end marker that YAML puts after a bare scalar
            arguments += ['-p', f'{name}:={text}']
        return arguments


class _QuotedText(yaml.SafeDumper):
    """Always quotes text: rcl reads more of it as numbers (1e5) than PyYAML does."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar('tag:yaml.org,2002:str', text, style="'")


_QuotedText.add_representer(str, _QuotedText.represent_str)


@dataclass(frozen=True)
class Argument:
    """A named value given at the start, and the parameters and remappings that it sets."""

    name: str
    description: str = ''         # empty: that of the parameter that it sets
    default: Any = None           # None: the parameter files decide
    text: bool = False            # the value is text, even 007, no or 1e5; otherwise it is read as YAML
    values: Mapping[Any, Any] = field(default_factory=dict)       # given value -> parameter value, where they differ
    parameters: Mapping[str, str] = field(default_factory=dict)   # node -> parameter
    remappings: Mapping[str, str] = field(default_factory=dict)   # node -> topic

    def meant(self, given: Any) -> Any:
        """Return the parameter value for a given value."""
        value = read(given)
        if isinstance(value, Hashable) and value in self.values:
            return self.values[value]
        return str(given) if self.text else value


@dataclass(frozen=True)
class Description:
    """The nodes to run, in starting order, the arguments that configure them, and their shared environment."""

    nodes: tuple[NodeDescription, ...]
    arguments: tuple[Argument, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def resolve(self, target: str, arguments: Mapping[str, Any] | None = None,
                parameter_files: Iterable[str | Path] = (),
                parameters: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[NodeDescription, ...]:
        """
        Return the nodes of one robot with the arguments applied, in starting order.

        :param target: 'sim' (the simulated robot is one of the nodes), 'robot', or 'replay' (a bag is played).
        :param arguments: values by argument name; text, as in ``ros2 launch name:=value``, is read as YAML unless the
            argument is a text argument. None or '' leaves an argument at its default.
        :param parameter_files: read after the files of the description, which they override.
        :param parameters: values by node and parameter, which override everything else.
        :raises DescriptionError: for an unknown target, argument or node, or a file that does not exist.
        """
        if target not in TARGETS:
            raise DescriptionError(f"target '{target}' is unknown: give one of {', '.join(TARGETS)}")
        given = {name: value for name, value in (arguments or {}).items() if value not in (None, '')}
        known = [argument.name for argument in self.arguments]
        for name in given:
            if name not in known:
                raise DescriptionError(
                    f"argument '{name}' is unknown: the description has {', '.join(known)}")
        extra = tuple(Path(path).expanduser().absolute() for path in parameter_files)
        for path in extra:
            if not path.is_file():
                raise DescriptionError(f'parameter file {path} does not exist')
        nodes = [node for node in self.nodes if target in (node.only_for or TARGETS)
                 and (not node.only_with or any(asks(given.get(name, False)) for name in node.only_with))]
        parameters = parameters or {}
        for name in parameters:
            if name not in [node.name for node in nodes]:
                raise DescriptionError(f"no node '{name}' to set parameters of: there are "
                                       f"{', '.join(node.name for node in nodes)}")
        return tuple(self._apply(node, given, extra, parameters.get(node.name, {})) for node in nodes)

    def arguments_for(self, target: str) -> tuple[Argument, ...]:
        """Return the arguments that affect a node of a target."""
        names = {node.name for node in self.nodes if target in (node.only_for or TARGETS)}
        return tuple(argument for argument in self.arguments
                     if names & {*argument.parameters, *argument.remappings})

    def help(self, argument: Argument) -> str:
        """Return the description of an argument, by default that of the first parameter that it sets."""
        if argument.description:
            return argument.description
        from worldmodel_ros.parameters.tables import TABLES  # lazily: not needed to start nodes
        executables = {node.name: node.executable for node in self.nodes}
        return next((param.help() for node, name in argument.parameters.items()
                     for param in TABLES.get(executables[node], ()) if param.name == name), '')

    def _apply(self, node: NodeDescription, given: Mapping[str, Any], files: tuple[Path, ...],
               overrides: Mapping[str, Any]) -> NodeDescription:
        parameters, remappings = dict(node.parameters), dict(node.remappings)
        for argument in self.arguments:
            value = given.get(argument.name, argument.default)
            if value is None:
                continue
            if node.name in argument.parameters:
                parameters[argument.parameters[node.name]] = argument.meant(value)
            if node.name in argument.remappings:
                remappings[argument.remappings[node.name]] = str(value)
        return replace(node, parameters={**parameters, **overrides}, remappings=remappings,
                       parameter_files=node.parameter_files + files)


def read(value: Any) -> Any:
    """Return the value of an argument, parsed as YAML if it is text; invalid YAML stays text."""
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value


def asks(value: Any) -> bool:
    """Return whether a value requests a process on this machine."""
    return read(value) is not False and '://' not in str(value)


def absolute_namespace(namespace: str) -> str:
    """Return a namespace with a leading slash, '/' for none."""
    return '/' + namespace.strip('/')


def load(path: str | Path | None = None) -> Description:
    """
    Read a description; by default the package's own config/bringup.yaml.

    :raises DescriptionError: naming the file, the entry, what is wrong and what is allowed.
    """
    path = Path(path) if path else config_directory() / 'bringup.yaml'
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise DescriptionError(f'{path} cannot be read: {error.strerror}') from error
    except yaml.YAMLError as error:
        raise DescriptionError(f'{path} is not YAML: {error}') from error
    return _Reader(path).description(content)


class _Reader:
    """Converts parsed YAML to a Description; every error names the file and entry."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def description(self, content: Any) -> Description:
        self._mapping('the file', content, {'nodes', 'arguments', 'environment'}, required={'nodes'})
        if not isinstance(content['nodes'], list) or not content['nodes']:
            raise self._error('nodes', 'must be a list with at least one node')
        nodes = tuple(self._node(f'nodes[{k}]', entry) for k, entry in enumerate(content['nodes']))
        names = [node.name for node in nodes]
        for name in names:
            if names.count(name) > 1:
                raise self._error('nodes', f"two nodes are named '{name}': give each its own name")
        arguments = self._mapping('arguments', content.get('arguments') or {})
        for node in nodes:
            for name in node.only_with:
                if name not in arguments:
                    raise self._error(f'nodes ({node.name})', f"only_with is '{name}', which is not an argument: there are "
                                                              f"{', '.join(arguments)}")
        return Description(
            nodes, tuple(self._argument(name, entry, names) for name, entry in arguments.items()),
            self._environment('environment', content.get('environment')))

    def _node(self, where: str, entry: Any) -> NodeDescription:
        # In the file, ``parameters`` names parameter files; values belong in those or in an argument.
        self._mapping(where, entry, {f.name for f in fields(NodeDescription)} - {'parameter_files'},
                      required={'name', 'package', 'executable'})
        where = f"{where} ({entry['name']})"
        values = dict(entry)
        for key, kind in (('name', str), ('package', str), ('executable', str),
                          ('lifecycle', bool), ('shared', bool), ('respawn', bool), ('required', bool)):
            if key in values and not isinstance(values[key], kind):
                raise self._error(where, f'{key} is {values[key]!r}: it must be a {kind.__name__}')
        for key in ('only_for', 'only_with'):
            names = values.get(key, [])
            names = [names] if isinstance(names, str) else names
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise self._error(where, f'{key} is {names!r}: it must be a string or a list of strings')
            values[key] = tuple(names)
        for target in values['only_for']:
            if target not in TARGETS:
                raise self._error(where, f"only_for is '{target}': it must be one of {', '.join(TARGETS)}")
        for key in ('respawn_delay', 'grace'):
            time = values.get(key, 0.0)
            if isinstance(time, bool) or not isinstance(time, (int, float)) or time < 0:
                raise self._error(where, f'{key} is {time!r}: it must be a number of seconds, 0 or more')
        files = values.pop('parameters', [])
        if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
            raise self._error(where, 'parameters must be a list of file names')
        paths = tuple(self._path.parent / name for name in files)
        for path in paths:
            if not path.is_file():
                raise self._error(where, f'parameter file {path} does not exist')
        values['remappings'] = self._texts(f'{where}: remappings', values.get('remappings') or {})
        for key in ('environment', 'environment_on_this_machine'):
            values[key] = self._environment(f'{where}: {key}', values.get(key))
        return NodeDescription(parameter_files=paths, **values)

    def _argument(self, name: str, entry: Any, nodes: list[str]) -> Argument:
        where = f'arguments: {name}'
        self._mapping(where, entry, {f.name for f in fields(Argument)} - {'name'})
        if not entry.get('parameters'):
            self._mapping(where, entry, required={'description'})
        values = self._mapping(f'{where}: values', entry.get('values') or {})
        text = entry.get('text', False)
        if not isinstance(text, bool):
            raise self._error(where, f'text is {text!r}: it must be a bool')
        targets = {key: self._texts(f'{where}: {key}', entry.get(key) or {})
                   for key in ('parameters', 'remappings')}
        for key, mapping in targets.items():
            for node in mapping:
                if node not in nodes:
                    raise self._error(
                        f'{where}: {key}', f"'{node}' is no node here: there are {', '.join(nodes)}")
        return Argument(name, str(entry.get('description', '')), entry.get('default'), text, values, **targets)

    def _environment(self, where: str, value: Any) -> dict[str, str]:
        return {name: text.replace('{config}', str(self._path.parent))
                for name, text in self._texts(where, value or {}).items()}

    def _texts(self, where: str, value: Any) -> dict[str, str]:
        self._mapping(where, value)
        for key, text in value.items():
            if not isinstance(text, str):
                raise self._error(where, f'{key} is {text!r}: it must be text (in quotes)')
        return value

    def _mapping(self, where: str, value: Any, known: set[str] | None = None,
                 required: Iterable[str] = ()) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error(where, f'must be a mapping, but is {type(value).__name__}')
        if known is not None:
            for key in value:
                if key not in known:
                    raise self._error(
                        where, f"key '{key}' is unknown: the keys are {', '.join(sorted(known))}")
        for key in required:
            if key not in value:
                raise self._error(where, f"key '{key}' is missing")
        return value

    def _error(self, where: str, problem: str) -> DescriptionError:
        return DescriptionError(f'{self._path}: {where}: {problem}')
