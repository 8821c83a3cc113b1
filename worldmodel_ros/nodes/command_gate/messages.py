"""
What the command gate hears, from bytes: bounded before it is deserialised, and with no field trusted.

DDS puts no bound on names and values, and tens of megabytes of them would take the thread that the watchdog has too for
longer than a stop may take. So the subscriptions are raw, and the length is looked at first.
"""

from collections.abc import Sequence
from typing import Any

from rclpy.serialization import deserialize_message
from sensor_msgs.msg import JointState

from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.safety.chunk import MAX_ROWS, Chunk, Fault, Refusal

_SECOND = 1_000_000_000
_OVERHEAD = 4096  # bytes, for the other fields and a frame_id
_PER_NAME = 8     # bytes, its length and alignment
MAX_JOINT_STATE = 65536  # bytes: some hundreds of joints, with speeds and efforts
_TIERS = {name: getattr(ActionChunk, name) for name in vars(ActionChunk) if name.startswith('TIER_')}


def max_chunk_bytes(names: Sequence[str]) -> int:
    """Return the length [bytes] of the longest ActionChunk that can be sound for the axes `names`."""
    return _OVERHEAD + sum(len(name.encode()) + _PER_NAME for name in names) + 4 * MAX_ROWS * len(names)


def read_chunk(data: bytes, max_bytes: int) -> Chunk | Refusal:
    """Return the chunk of a serialised ActionChunk, or why it is none. A stop is one whatever its other fields hold."""
    message = _deserialise(data, ActionChunk, max_bytes)
    if isinstance(message, Refusal):
        return message
    stop = message.tier == ActionChunk.TIER_STOP
    seconds, rest = message.header.stamp.sec, message.header.stamp.nanosec
    if not stop and not 0 <= rest < _SECOND:
        return Refusal(Fault.INVALID, f'header.stamp.nanosec is {rest}, it must be below {_SECOND}')
    if message.tier not in _TIERS.values():
        known = ', '.join(f'{value} ({name})' for name, value in _TIERS.items())
        return Refusal(
            Fault.INVALID, f'tier is {message.tier}, known are {known}: build the publisher and the gate with the same '
            'ActionChunk.msg')
    return Chunk(seconds * _SECOND + rest, message.episode_id, message.sequence, message.step_period, message.names,
                 message.values, stop)


def read_joint_state(data: bytes) -> JointState | Refusal:
    """Return the message of a serialised JointState, or why it is none."""
    return _deserialise(data, JointState, MAX_JOINT_STATE)


def _deserialise(data: bytes, kind: type, max_bytes: int) -> Any:
    if len(data) > max_bytes:
        return Refusal(
            Fault.SHAPE, f'{kind.__name__} of {len(data)} bytes: {max_bytes} are the most that is read, as the watchdog '
            'must not wait; send the beginning of the plan only, and no more joints than there are')
    try:
        return deserialize_message(data, kind)
    except Exception as error:  # of rclpy's C++, which has a type of its own for each layer
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return Refusal(
            Fault.SHAPE, f'{len(data)} bytes are no {kind.__name__} ({text}): build the publisher with the same message '
            'definition')
