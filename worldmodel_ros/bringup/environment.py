"""The environment of the nodes' processes on a machine without a ROS 2 distribution."""
from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Mapping

DISCOVERY_RANGE = 'ROS_AUTOMATIC_DISCOVERY_RANGE'

# The ports of higher domains overlap Linux's ephemeral port range.
DOMAIN_IDS = range(1, 102)
# RTPS 2.2, 9.6.1.1: offsets from a domain's first port: multicast, unused if discovery is limited to this machine, and the
# metatraffic of the first participants.
_PORTS = (0, *range(10, 74, 2))


def free_domain_id() -> int:
    """
    Return a random ROS domain that is not in use on this machine.

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


def node_environment(description: Mapping[str, str], domain_id: int, log_directory: str, *,
                     this_machine_only: bool) -> dict[str, str]:
    """
    Return the environment for the nodes: this process's own, with defaults for unset variables.

    :param description: variables that apply unless the user has set them.
    :param domain_id: the nodes' ROS_DOMAIN_ID, which overrides an inherited one.
    :param log_directory: where ROS writes its logs, unless ROS_HOME or ROS_LOG_DIR is set.
    :param this_machine_only: limit discovery to this machine, unless ROS_AUTOMATIC_DISCOVERY_RANGE is set. For simulation and
        replay, which must not drive a real robot nearby; a real robot's camera may well be on another machine.
    """
    environment = dict(os.environ)
    defaults = {
        **description,
        # The wheels do not set it, and ROS finds none of its packages without it.
        'AMENT_PREFIX_PATH': sys.prefix,
        # Not ROS_HOME, which also has the saved sessions.
        **({} if os.environ.get('ROS_HOME') else {'ROS_LOG_DIR': log_directory}),
        **({DISCOVERY_RANGE: 'LOCALHOST'} if this_machine_only else {}),
        # Otherwise the last output of a crashed process stays in its buffer.
        'PYTHONUNBUFFERED': '1',
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    environment['ROS_DOMAIN_ID'] = str(domain_id)
    return environment


def network(environment: Mapping[str, str]) -> str:
    """Return a description of the part of the network in which nodes with this environment discover others."""
    discovery_range = environment.get(DISCOVERY_RANGE) or 'SUBNET, as ROS does by default'
    return f'ROS_DOMAIN_ID={environment["ROS_DOMAIN_ID"]}, {DISCOVERY_RANGE}={discovery_range}'
