"""What-if client: asks the model for predictions, then the simulator for the truth, from the same observation."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import rclpy
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.demo.recording import Branch, Recording, WhatIf
from worldmodel_ros.inputs.images import ImageError, read
from worldmodel_ros.msg import WhatIfBranch
from worldmodel_ros.nodes.common.messages import NS, duration_message, nanoseconds
from worldmodel_ros.srv import WhatIf as WhatIfService

MODEL_NODE = 'world_model_node'
ROBOT_NODE = 'sim_robot'
IMAGE, COMPRESSED_IMAGE = 'camera/image_raw', 'camera/image_raw/compressed'
PICTURE_SIZE = (64, 64)  # height and width of what the shipped model sees and predicts [pixels]
PATIENCE = 10.0  # after which an unanswered request is given up [s]
_OF_THE_MODEL = 0.8  # fraction of the timeout given to the model; the rest is for images and the simulator's answer


class WhatIfClient:
    """Sends one request at a time, without blocking; ``on_answer`` is called on the executor's thread."""

    def __init__(self, node: Node, on_answer: Callable[[WhatIf], None], model: str, robot: str = '') -> None:
        """``model`` and ``robot``: names of nodes in the node's own namespace; without a robot there is no ground truth."""
        self._node = node
        self._on_answer = on_answer
        self._model = node.create_client(WhatIfService, f'{model}/what_if')
        self._robot = node.create_client(WhatIfService, f'{robot}/what_if') if robot else None
        self._asked: float | None = None
        self.refusal = ''   # text of the newest refusal

    @property
    def reachable(self) -> bool:
        """Whether the model's service is available."""
        return self._model.service_is_ready()

    def ask(self, names: tuple[str, ...], goal: str, horizon: float, deadline: float = 0.0) -> bool:
        """Send a request; ``horizon`` and ``deadline`` of the model's answer in s, 0: the model's default. Return False if the
        service is not available or a request is pending."""
        if not self.reachable:
            return False
        if self._asked is not None and time.monotonic() - self._asked < PATIENCE:
            return False
        self._asked = time.monotonic()
        request = WhatIfService.Request(names=list(names), goal=goal, horizon=horizon,
                                        deadline=duration_message(round(deadline * NS)))
        self._model.call_async(request).add_done_callback(partial(self._on_model, goal, self._asked))
        return True

    def _on_model(self, goal: str, asked: float, future: Future) -> None:
        answer: WhatIfService.Response = future.result()
        if not answer.success:
            self.refusal = answer.message
            self._asked = None
            return
        result = partial(
            WhatIf, nanoseconds(answer.header.stamp), goal, answer.step_period, answer.elapsed,
            time.monotonic() - asked, tuple(_branch(b) for b in answer.branches), terms=tuple(answer.terms),
            left_out=answer.message)
        if self._robot is None or not self._robot.service_is_ready():
            self._finish(result())
            return
        # The actions themselves, not their names: so a plan of the policy is played in the simulator, too.
        question = WhatIfService.Request(
            actions=[b.actions for b in answer.branches], goal=goal, observation_stamp=answer.header.stamp)
        names = [b.name for b in answer.branches]
        self._robot.call_async(question).add_done_callback(partial(self._on_robot, result, names))

    def _on_robot(self, result: Callable[..., WhatIf], names: list[str], future: Future) -> None:
        truth: WhatIfService.Response = future.result()
        answer = result(truth=tuple(_branch(b, name) for name, b in zip(names, truth.branches)))
        if not truth.success:
            self.refusal = truth.message
            answer = replace(answer, left_out='; '.join(filter(None, [
                answer.left_out, f'what really follows is not shown: {truth.message}'])))
        self._finish(answer)

    def _finish(self, answer: WhatIf) -> None:
        self._asked = None
        self._on_answer(answer)


def ask_once(names: tuple[str, ...], goal: str, horizon: float, namespace: str,
             timeout: float, images: tuple[str, str] = (IMAGE, COMPRESSED_IMAGE)) -> tuple[WhatIf, np.ndarray | None]:
    """
    Send one request to a running system; return the answer and the image it starts from, (H, W, 3) or None.

    ``images``: topics of the raw and of the compressed camera image; one of them suffices. Most of ``timeout`` [s] is given to
    the model. Raises RuntimeError, with the remedy, if the model refuses or no answer comes within ``timeout`` seconds.
    """
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = Node('what_if_client', namespace=namespace)
        recent = Recording()
        answers: list[WhatIf] = []
        client = WhatIfClient(node, answers.append, MODEL_NODE, ROBOT_NODE)
        for kind, topic in zip((Image, CompressedImage), images):
            node.create_subscription(kind, topic, partial(record_image, recent), qos_profile_sensor_data)
        give_up = time.monotonic() + timeout
        asked = False
        while not answers and not client.refusal:
            if time.monotonic() > give_up:
                raise RuntimeError(_silence(node, client, timeout, () if recent.images else images))
            # Only once there is an image, so that the one that the answer starts from is among those received.
            asked = asked or (bool(recent.images) and client.ask(names, goal, horizon, _OF_THE_MODEL * timeout))
            rclpy.spin_once(node, timeout_sec=0.1)
        if not answers:
            raise RuntimeError(f'the model refused: {client.refusal}')
        return answers[0], recent.image_at(answers[0].stamp, tolerance=0.0)
    finally:
        rclpy.try_shutdown()


def _silence(node: Node, client: WhatIfClient, timeout: float, silent_images: tuple[str, ...]) -> str:
    service = f'{node.get_namespace().rstrip("/")}/{MODEL_NODE}/what_if'
    if not client.reachable:
        return (f'{service} has no server after {timeout:.0f} s: is the system up ("worldmodel up"), with '
                'the same ROS_DOMAIN_ID, ROS_AUTOMATIC_DISCOVERY_RANGE and namespace as here?')
    if silent_images:
        topics = ' and '.join(node.resolve_topic_name(topic) for topic in silent_images)
        return (f'{service} is there, but no camera image came within {timeout:.0f} s on {topics}: where the robot '
                'names it otherwise, give --image or --compressed-image')
    return f'{service} is there, but no answer came within {timeout:.0f} s: look at /diagnostics'


def record_image(recording: Recording, message: Image | CompressedImage) -> None:
    """Append a camera image, raw or compressed, at the size of the model's images; skip it if it is broken."""
    try:
        image = read(message, PICTURE_SIZE)
    except ImageError:
        return
    recording.add_image(nanoseconds(message.header.stamp), image.copy())


def _branch(branch: WhatIfBranch, name: str = '') -> Branch:
    return Branch(name or branch.name, tuple(frame.data.tobytes() for frame in branch.frames),
                  np.array(branch.collision_risk, np.float32), float(branch.progress),
                  np.stack([branch.x, branch.y, branch.yaw], axis=1).astype(np.float64), tuple(branch.terms))
