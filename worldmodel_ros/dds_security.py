"""DDS security (SROS2): whether this process must use it, and whether it can."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

POLICY = 'sros2_policy.xml'  # in config/
_LIBRARY = re.compile(r'\S*/lib(?:fastrtps|fastdds)\.so\S*')
_PLUGIN = b'dds.sec.auth'  # the security plugins' properties are only in a Fast DDS built with them
_OFF = ('', '0', 'false', 'no', 'off')  # in lower case
_FILES = ('identity_ca.cert.pem', 'cert.pem', 'key.pem', 'permissions_ca.cert.pem', 'governance.p7s', 'permissions.p7s')


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Return whether ROS 2's environment variable requests security for nodes, also if in a spelling that rcl ignores."""
    return environment.get('ROS_SECURITY_ENABLE', '').strip().lower() not in _OFF


def loaded_library() -> Path | None:
    """Return the path of the Fast DDS library loaded in this process; None if none is, as with another middleware."""
    for line in Path('/proc/self/maps').read_text().splitlines():
        if found := _LIBRARY.search(line):
            return Path(found[0])
    return None


def has_security(library: Path) -> bool:
    """Return whether a Fast DDS was built with its security plugins; the one in the wheels on PyPI was not."""
    return _PLUGIN in library.read_bytes()


def enclave(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the enclave that rcl chooses for a process with these arguments and environment."""
    override = environment.get('ROS_SECURITY_ENCLAVE_OVERRIDE')
    if override:
        return override
    given = [value for option, value in zip(arguments, arguments[1:]) if option in ('-e', '--enclave')]
    return given[-1] if given else '/'


def refusal(arguments: Sequence[str], environment: Mapping[str, str], library: Path | None) -> str:
    """
    Return why a process with security enabled must not start; empty if security is not enabled, or is available.

    rcl itself continues unprotected if ROS_SECURITY_ENABLE is not exactly ``true``, or if the strategy is not Enforce and
    something is missing. ``library``: from ``loaded_library``; with a middleware other than Fast DDS, Enforce is the only
    safeguard.
    """
    if not is_asked_for(environment):
        return ''
    enable = environment['ROS_SECURITY_ENABLE']
    if enable != 'true':
        return f'ROS_SECURITY_ENABLE must be written "true", not "{enable}": ROS 2 takes anything else for false'
    strategy = environment.get('ROS_SECURITY_STRATEGY', '')
    if strategy != 'Enforce':
        return (f'ROS_SECURITY_ENABLE is true, and with ROS_SECURITY_STRATEGY={strategy or "Permissive"} nodes start without '
                'security where it is missing: set it to Enforce')
    if library is not None and not has_security(library):
        return (f'ROS_SECURITY_ENABLE is true, and {library} was built without DDS security: use the ROS 2 of a distribution, '
                'or set ROS_SECURITY_ENABLE=false to go without')
    keystore = environment.get('ROS_SECURITY_KEYSTORE', '')
    folder = Path(keystore) / 'enclaves' / enclave(arguments, environment).strip('/')
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if not keystore or missing:
        return (f'ROS_SECURITY_ENABLE is true, and {folder if keystore else "ROS_SECURITY_KEYSTORE"} has no '
                f'{", ".join(missing)}: make them by ros2 security generate_artifacts (docs/security.md)')
    return ''
