"""The environment of the nodes' processes on a machine without a ROS 2 distribution."""
from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Mapping

DISCOVERY_RANGE = 'ROS_AUTOMATIC_DISCOVERY_RANGE'

# The ports of higher domains reach into the range that Linux gives to outgoing connections.
DOMAIN_IDS = range(1, 102)
# RTPS 2.2, 9.6.1.1: from a domain's first port, the one for multicast, which goes unused where discovery is
# limited to this machine, and those for the metatraffic of the first participants.
_PORTS = (0, *range(10, 74, 2))


def free_domain_id() -> int:
    """
    Return a random ROS domain that no process of this machine uses.

    :raises RuntimeError: if all of DOMAIN_IDS are taken.
    """
    for domain_id in random.sample(DOMAIN_IDS, len(DOMAIN_IDS)):
        if all(_is_free(7400 + 250 * domain_id + port) for port in _PORTS):
            return domain_id
    raise RuntimeError(f'all ROS domains from {DOMAIN_IDS[0]} to {DOMAIN_IDS[-1]} are in use on this '
                       'machine: stop some nodes, or give a domain id')


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(('', port))
        except OSError:
            return False
    return True


def node_environment(description: Mapping[str, str], domain_id: int, ros_home: str, *,
                     this_machine_only: bool) -> dict[str, str]:
    """
    Return the environment for the nodes: this process's own, completed where it leaves something open.

    :param description: variables that apply unless the user has set them.
    :param domain_id: the nodes' ROS_DOMAIN_ID, which wins over an inherited one.
    :param ros_home: where ROS writes its logs, unless ROS_HOME is set.
    :param this_machine_only: hear no other machine, unless ROS_AUTOMATIC_DISCOVERY_RANGE is set: for what is simulated
        or played, which must not drive a robot in the next room. A real robot's camera may well be on another machine.
    """
    environment = dict(os.environ)
    defaults = {
        **description,
        # The wheels do not set it, and nothing of ROS is found without.
        'AMENT_PREFIX_PATH': sys.prefix,
        'ROS_HOME': ros_home,
        **({DISCOVERY_RANGE: 'LOCALHOST'} if this_machine_only else {}),
        # Without it the last words of a process that dies stay in its buffer.
        'PYTHONUNBUFFERED': '1',
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    environment['ROS_DOMAIN_ID'] = str(domain_id)
    return environment


def network(environment: Mapping[str, str]) -> str:
    """Return, for a person, in which part of the network nodes with this environment hear others."""
    discovery_range = environment.get(DISCOVERY_RANGE) or 'SUBNET, as ROS does by default'
    return f'ROS_DOMAIN_ID={environment["ROS_DOMAIN_ID"]}, {DISCOVERY_RANGE}={discovery_range}'
