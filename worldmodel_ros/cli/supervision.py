"""Shared by the subcommands that start nodes and wait: ``up`` and ``replay``."""
from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from worldmodel_ros.cli import arguments

if TYPE_CHECKING:
    from worldmodel_ros.bringup.description import Description, NodeDescription
    from worldmodel_ros.bringup.supervisor import Supervisor


def supervise(command: str, chosen: argparse.Namespace,
              robots: Callable[[Description], Iterable[tuple[str, Iterable[NodeDescription]]]],
              starting: Callable[[Supervisor], str], wait: Callable[[Supervisor], int], this_machine_only: bool = True) -> int:
    """
    Start nodes, wait until they are ready, run ``wait``, and stop them; return the exit code.

    ``robots`` returns namespaces and their nodes, ``starting`` the first message to print. ``chosen`` has the options of
    ``arguments.add_start``. The code is that of ``wait``, 0 after Ctrl-C or SIGTERM, or 1 if something cannot be started, with
    the reason on standard error.
    """
    from worldmodel_ros.bringup.description import DescriptionError, load
    from worldmodel_ros.bringup.supervisor import Supervisor
    from worldmodel_ros.paths import NotInstalledError

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        description = load()
        brought_up = list(robots(description))
        with Supervisor(description.environment, chosen.logs, arguments.domain_id() or 0,
                        this_machine_only=this_machine_only, activation_timeout=chosen.activation_timeout) as supervisor:
            for namespace, nodes in brought_up:
                supervisor.add(nodes, namespace)
            print(starting(supervisor), flush=True)
            supervisor.start()
            supervisor.wait_ready(chosen.activation_timeout, partial(print, flush=True))
            return wait(supervisor)
    except KeyboardInterrupt:
        print('\nstopped')
        return 0
    except (DescriptionError, NotInstalledError, RuntimeError, ValueError) as error:
        print(f'worldmodel {command}: {error}', file=sys.stderr)
        return 1
