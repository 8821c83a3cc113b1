"""What a node's observations go to: its own engine, or the one that it shares with other robots."""

from collections.abc import Callable
from typing import Any

import numpy as np
from rclpy.node import Node

from worldmodel_ros.control.responder import Listener, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.serving.client.failover import FailoverWorker
from worldmodel_ros.serving.transport.address import socket_path


def make_worker(node: Node, server: str, engine: Any, executed: Callable[[int | None, int], np.ndarray],
                responder: Responder, listener: Listener) -> Worker | FailoverWorker:
    """Return the worker of an activation; `server` as in the parameter of that name."""
    own = Worker(engine, executed, responder, listener)
    if not server:
        return own
    logger = node.get_logger()

    def say(text: str) -> None:
        if worker.degraded_reason:
            logger.warning(text)
        else:
            logger.info(text)

    worker = FailoverWorker(socket_path(server), node.get_fully_qualified_name(), own, engine.spec, executed, responder,
                            listener, say)
    return worker
