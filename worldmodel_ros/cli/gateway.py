"""`worldmodel gateway`: robots and clients of other machines, before `worldmodel serve`."""
from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import yaml

from worldmodel_ros.exit_codes import BAD_CONFIGURATION

_EXAMPLES = """\
examples:
  worldmodel serve &  worldmodel gateway           openpi clients of this machine, at ws://127.0.0.1:8000
  worldmodel gateway --new-token arm               a token for a robot, and its entry for the file of accounts
  worldmodel gateway --host 0.0.0.0 --accounts accounts.yaml --certificate host.pem --key host.key    other machines, by TLS
  worldmodel gateway --contract FILE               what the keys of your observations mean (see config/gateway.yaml)

It holds no model, and may be started before the engine, after it, or again. Exit codes: 0 after SIGINT or SIGTERM, 2 for
a configuration that is refused, 1 for everything else, such as a port in use.
"""
_DESCRIPTION = 'Lets robots and clients connect over the network, in the dialects that they have.'


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    _add_arguments(subparsers.add_parser(
        'gateway', help='let robots and clients of other machines use the engine', description=_DESCRIPTION,
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter))


def main() -> int:
    """Run the subcommand as a program of its own, which is how the bring-up starts it."""
    parser = argparse.ArgumentParser('gateway', description=_DESCRIPTION)
    _add_arguments(parser)
    return _run(parser.parse_args())


class _File(argparse.Action):
    """Takes options from a file; those that come after it on the command line win."""

    def __call__(self, parser, namespace, value, option_string=None):
        if not value:
            return
        known = {action.dest: action for action in parser._actions if action.dest not in ('help', 'options', 'new_token')}
        try:
            given = yaml.safe_load(Path(value).read_text()) or {}
            for name, option in given.items():
                action = known[name]
                read = action.type or str
                if isinstance(action, argparse._StoreTrueAction):
                    if not isinstance(option, bool):
                        raise ValueError(f'{name} is true or false')
                    setattr(namespace, name, option)
                else:
                    setattr(namespace, name, [read(each) for each in option] if action.nargs else read(option))
        except KeyError as error:
            parser.error(f'{value}: there is no option {error}: there are {", ".join(sorted(known))}')
        except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
            parser.error(f'{value} is no file of options: {error}')


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--options', default='', metavar='FILE', action=_File, help='take these options from a YAML file, by '
                        'their names with _ for -; those after it on the command line win')
    parser.add_argument('--host', default='127.0.0.1', help='address to listen at (default: 127.0.0.1, this machine alone)')
    parser.add_argument('--port', type=int, default=8000, metavar='N', help='0 for any free one (default: 8000)')
    parser.add_argument('--socket', default='auto', metavar='PATH', help='of the engine (default: auto, this user\'s own)')
    parser.add_argument('--contract', default='', metavar='FILE',
                        help='what the keys of openpi observations mean (default: as in config/gateway.yaml)')
    parser.add_argument('--accounts', default='', metavar='FILE', help='who may connect; needed off this machine')
    parser.add_argument('--certificate', default='', metavar='FILE', help='PEM chain, for TLS 1.3')
    parser.add_argument('--key', default='', metavar='FILE', help='of the certificate, PEM')
    parser.add_argument('--client-ca', default='', metavar='FILE', help='clients need a certificate that this one signed')
    parser.add_argument('--plaintext', action='store_true', help='permit other machines without TLS')
    parser.add_argument('--origin', nargs='+', default=[], metavar='URL', help='pages whose scripts may connect '
                        '(default: none; clients that are no browsers send no origin)')
    parser.add_argument('--message-mb', type=float, default=8.0, metavar='MB', help='longest message (default: 8)')
    parser.add_argument('--connects', type=float, default=20.0, metavar='N', help='connections a second that one address '
                        'may open, ten times as many all together; 0: any number (default: 20)')
    parser.add_argument('--idle', type=float, default=300.0, metavar='S',
                        help='a connection from which nothing comes for so long is closed [s] (default: 300)')
    parser.add_argument('--linger', type=float, default=30.0, metavar='S',
                        help='a named session waits so long for its client to come back [s] (default: 30)')
    parser.add_argument('--audit', default='', metavar='FILE', help='who did what, as lines of JSON, without payloads')
    parser.add_argument('--new-token', default='', metavar='NAME', help='print a token and its entry, and end')
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
        return run(Options(
            chosen.host, chosen.port, chosen.socket or 'auto', chosen.contract, chosen.accounts, chosen.certificate, chosen.key,
            chosen.client_ca, chosen.plaintext, tuple(chosen.origin), chosen.message_mb, chosen.connects, chosen.idle,
            chosen.linger, chosen.audit))
    except (GatewayError, AccountError, ContractError) as error:
        return _refused(error)
    except OSError as error:  # AddressError too
        return _refused(error, 1)


def _refused(error: object, code: int = BAD_CONFIGURATION) -> int:
    print(f'worldmodel gateway: {error}', file=sys.stderr)
    return code
