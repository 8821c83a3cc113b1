"""
Accounts: who may connect, by hashed tokens and client certificates, and each one's limits.

The tokens are random and long (``new_token``), so one round of SHA-256 protects them: guessing is infeasible.
"""
from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.-]{0,63}')
_SHA256 = re.compile(r'[0-9a-f]{64}')
_SCHEMES = ('bearer', 'api-key')
_BASIC = 'basic'  # for browsers, which ask for a name, which is ignored, and a password: the token
_LONGEST_TOKEN = 512  # characters


class AccountError(ValueError):
    """An invalid file of accounts; the text says why."""


@dataclass(frozen=True)
class Account:
    """
    A robot or a person. Authenticated by ``sha256``, the hash of a token in hexadecimal digits, or by ``certificate``, the
    common name of a client certificate, or by both together.

    ``sessions``: at a time; ``openings`` of sessions, ``messages`` and ``megabytes``: per second, 0 for no limit. ``fleet``: a
    host or robot of this host's fleet, which may open each session by its name on the engine, and have sessions moved here.
    """

    name: str
    sha256: str = ''
    certificate: str = ''
    sessions: int = 8
    messages: float = 100.0
    megabytes: float = 50.0
    openings: float = 2.0
    fleet: bool = False

    def __post_init__(self) -> None:
        """Raise AccountError for invalid values."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise AccountError(f'{self.name!r} is no name: letters, digits, "_", "." and "-", at most 64 of them')
        if not isinstance(self.certificate, str) or not isinstance(self.sha256, str) or (
                self.sha256 and not _SHA256.fullmatch(self.sha256)):
            raise AccountError(f'{self.name}: sha256 must be 64 hexadecimal digits, and certificate a text')
        for name in ('sessions', 'messages', 'megabytes', 'openings'):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise AccountError(f'{self.name}: {name} is {value!r}: it must be a number, 0 or more')
        if not isinstance(self.fleet, bool) or (self.fleet and not self.certificate):
            raise AccountError(f'{self.name}: fleet is {self.fleet!r}: it must be true or false, and one of a fleet is known '
                               'by a certificate')
        if not isinstance(self.sessions, int):
            raise AccountError(f'{self.name}: sessions is {self.sessions!r}: it must be a whole number')


ANYBODY = Account('local', sessions=64, messages=0.0, megabytes=0.0, openings=0.0)  # when no accounts are configured


class Accounts:
    """The accounts of a file."""

    def __init__(self, accounts: tuple[Account, ...]) -> None:
        """Raises AccountError for accounts with the same name or credentials, or without credentials."""
        names = [each.name for each in accounts]
        keys = [(each.sha256, each.certificate) for each in accounts]
        if len(set(names)) < len(names) or len(set(keys)) < len(keys):
            raise AccountError('two accounts have the same name, or the same token and certificate')
        nameless = [each.name for each in accounts if not each.sha256 and not each.certificate]
        if nameless:
            raise AccountError(f'{nameless[0]} has neither sha256 nor certificate')
        self._accounts = accounts

    @classmethod
    def read(cls, path: Path) -> Accounts:
        """Return the accounts of a YAML file. Raises AccountError."""
        try:
            loaded = yaml.safe_load(path.read_text())
            entries = loaded.get('accounts') if isinstance(loaded, Mapping) else None
            if not isinstance(entries, list):
                raise AccountError(f'{path} is no file of accounts: it must be a map with a list, accounts')
            known = {each.name for each in fields(Account)}
            for entry in entries:
                if not isinstance(entry, Mapping) or 'name' not in entry or set(entry) - known:
                    raise AccountError(f'{path}: an account has a name and, of the others, only '
                                       f'{", ".join(sorted(known - {"name"}))}')
            return cls(tuple(Account(**entry) for entry in entries))
        except (OSError, yaml.YAMLError, TypeError, UnicodeDecodeError) as error:
            raise AccountError(f'{path} is no file of accounts: {error}') from error

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, account: Account) -> bool:
        return account in self._accounts

    def find(self, authorization: str, certificate: str) -> Account | None:
        """
        Return the account of an ``Authorization`` header (``Bearer TOKEN``, ``Api-Key TOKEN``, or ``Basic`` with the token as
        password) and the common name of a verified client certificate; None: there is none. Takes as long for a wrong token
        as for a right one.
        """
        scheme, _, token = authorization.strip().partition(' ')
        if scheme.lower() == _BASIC:
            scheme, token = _SCHEMES[0], _password(token)
        given = digest(token) if scheme.lower() in _SCHEMES and 0 < len(token) <= _LONGEST_TOKEN else ''
        found = None
        for each in self._accounts:
            is_token = hmac.compare_digest(each.sha256 or digest(''), given or digest('')) and bool(given)
            if (is_token or not each.sha256) and (not each.certificate or each.certificate == certificate):
                found = found or each
        return found


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded[:2 * _LONGEST_TOKEN], validate=True).decode().partition(':')[2]
    except ValueError:  # invalid base64 or UTF-8
        return ''


def digest(token: str) -> str:
    """Return the hash of a token, as written in a file of accounts."""
    return hashlib.sha256(token.strip().encode()).hexdigest()


def new_token() -> str:
    """Return a new random token of 256 bits."""
    return secrets.token_urlsafe(32)


def certificate_name(certificate: Mapping[str, Any] | None) -> str:
    """Return the common name in a verified certificate from ``ssl.SSLSocket.getpeercert``; empty: none."""
    for part in (certificate or {}).get('subject', ()):
        for name, value in part:
            if name == 'commonName':
                return value
    return ''
