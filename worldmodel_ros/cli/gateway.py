"""``worldmodel gateway``: lets robots and clients on other machines connect to ``worldmodel serve``."""
from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from worldmodel_ros.exit_codes import BAD_CONFIGURATION

_EXAMPLES = """\
examples:
  worldmodel serve &  worldmodel gateway           openpi clients on this machine, at ws://127.0.0.1:8000
  worldmodel gateway --new-token arm               a token for a robot, and its entry for the accounts file
  worldmodel gateway --host 0.0.0.0 --accounts accounts.yaml --certificate host.pem --key host.key    other machines, over TLS
  worldmodel gateway --contract FILE               the meaning of the keys in your observations (see config/gateway.yaml)

It holds no model, and can be started before or after the engine, or restarted. Exit codes: 0 after
SIGINT or SIGTERM, 2 if the configuration is refused, 1 for any other error, such as a port in use.
"""
_KINDS = {'str': str, 'int': int, 'float': (int, float), 'bool': bool, 'tuple[str, ...]': (list, tuple)}
_DESCRIPTION = 'Lets robots and clients connect over the network, each in its own dialect.'


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    _add_arguments(subparsers.add_parser(
        'gateway', help='let robots and clients on other machines use the engine', description=_DESCRIPTION,
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter))


def main() -> int:
    """Run the subcommand as a separate program, as the bring-up does."""
    parser = argparse.ArgumentParser('gateway', description=_DESCRIPTION)
    _add_arguments(parser)
    return _run(parser.parse_args())


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    # No defaults here: options not given may be in the options file, and else have the default of gateway.process.Options.
    parser.add_argument('--options', default='', metavar='FILE', help='YAML file with these options, with _ instead of - in '
                        'their names; the command line overrides it')
    parser.add_argument('--host', help='address to listen on (default: 127.0.0.1, this machine only)')
    parser.add_argument('--port', type=int, metavar='N', help='port to listen on, 0 for any free one (default: 8000)')
    parser.add_argument('--socket', metavar='PATH', help='socket of the engine (default: auto, per user)')
    parser.add_argument('--contract', metavar='FILE',
                        help='YAML file for the keys of openpi observations (default: as in config/gateway.yaml)')
    parser.add_argument('--accounts', metavar='FILE', help='YAML file of who may connect; required for other machines')
    parser.add_argument('--certificate', metavar='FILE', help='PEM certificate chain, for TLS 1.3')
    parser.add_argument('--key', metavar='FILE', help='key of the certificate, PEM')
    parser.add_argument('--client-ca', metavar='FILE', help='clients need a certificate signed by this CA')
    parser.add_argument('--plaintext', action='store_true', default=None, help='allow other machines without TLS')
    parser.add_argument('--origins', '--origin', nargs='+', action='extend', metavar='URL', help='web pages whose scripts may '
                        'connect (default: none; clients other than browsers send no origin)')
    parser.add_argument('--message-mb', type=float, metavar='MB', help='maximum size of a message (default: 8)')
    parser.add_argument('--connects', type=float, metavar='N', help='connections per second from one address; '
                        'in total, ten times as many; 0: unlimited (default: 20)')
    parser.add_argument('--idle', type=float, metavar='S',
                        help='close a connection after this long without a message [s] (default: 300)')
    parser.add_argument('--linger', type=float, metavar='S',
                        help='time that a named session waits for its client to reconnect [s], up to 600 (default: 30)')
    parser.add_argument('--audit', metavar='FILE', help='audit log: who did what, as JSON lines, without payloads')
    parser.add_argument('--store', metavar='FOLDER', help='session store that this host keeps for its fleet\'s '
                        'servers; needs --client-ca, and accounts with fleet: true')
    parser.add_argument('--world', metavar='PATH', help='socket of worldmodel serve with an open world model, which answers '
                        'the camera dialect instead of the engine')
    parser.add_argument('--new-token', default='', metavar='NAME', help='print a token and its accounts entry, and exit')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    missing = [name for name in ('websockets', 'msgspec') if find_spec(name) is None]
    if missing:
        return _refused(f'{" and ".join(missing)} is not installed: pip install "worldmodel-ros[net]"')
    from worldmodel_ros.serving.gateway.accounts import AccountError, Account, digest, new_token
    from worldmodel_ros.serving.gateway.contract import ContractError
    from worldmodel_ros.serving.gateway.process import GatewayError, Options, run
    try:
        if chosen.new_token:
            token = new_token()
            entry = Account(chosen.new_token, digest(token))
            print(f'# The token, which is written down nowhere else: {token}\n'
                  f'accounts:\n  - name: {entry.name}\n    sha256: {entry.sha256}')
            return 0
        given = {each.name: getattr(chosen, each.name) for each in fields(Options) if getattr(chosen, each.name) is not None}
        return run(Options(**{**_from_file(chosen.options), **given}))
    except (GatewayError, AccountError, ContractError) as error:
        return _refused(error)
    except OSError as error:  # AddressError too
        return _refused(error, 1)


def _from_file(file: str) -> dict[str, Any]:
    """Return the options in a file. Raises GatewayError."""
    from worldmodel_ros.serving.gateway.process import GatewayError, Options
    if not file:
        return {}
    kinds = {each.name: each.type for each in fields(Options)}
    try:
        given = yaml.safe_load(Path(file).read_text()) or {}
        if not isinstance(given, dict):
            raise GatewayError(f'{file} is no file of options: it must be a map, such as {{host: 0.0.0.0}}')
        for name, value in given.items():
            if name not in kinds:
                raise GatewayError(f'{file}: there is no option {name!r}: the options are {", ".join(kinds)}')
            if not isinstance(value, _KINDS[kinds[name]]) or (isinstance(value, bool) and kinds[name] != 'bool'):
                raise GatewayError(f'{file}: {name} is {value!r}: it must be {kinds[name]}')
        return given
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise GatewayError(f'{file} is no file of options: {error}') from error


def _refused(error: object, code: int = BAD_CONFIGURATION) -> int:
    print(f'worldmodel gateway: {error}', file=sys.stderr)
    return code
