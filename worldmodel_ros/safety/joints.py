"""Where the joints of a robot are, as measured."""

import math
from collections.abc import Sequence

Row = tuple[float, ...]


class MeasuredPositions:
    """
    The positions of the joints `names` [rad or m], each known for `timeout` s (steady clock) after it was heard.

    Joints that others have on the same topic are passed over, and one robot's may come in several messages.
    """

    def __init__(self, names: Sequence[str], timeout: float = 0.2) -> None:
        self.names = tuple(names)
        self.timeout = timeout
        self._heard: dict[str, tuple[float, float]] = {}  # name to position and time

    def hear(self, names: Sequence[str], positions: Sequence[float], now: float) -> str:
        """Take a measurement of some joints; return why it is refused, or ''. A refused one changes nothing."""
        if not positions:
            return ''  # of speeds or efforts only
        if len(names) != len(positions):
            return f'joint_states has {len(positions)} positions for {len(names)} names'
        heard = {name: (at, now) for name, at in zip(names, positions) if name in self.names}
        for name, (at, _) in heard.items():
            if not math.isfinite(at):
                return f'joint_states has {name} at {at}'
        self._heard.update(heard)
        return ''

    def unknown(self, now: float) -> str:
        """Return which joint's position is not known, since when, and the remedy; '' if all are known."""
        for name in self.names:
            _, heard_at = self._heard.get(name, (0.0, -math.inf))
            if not now - heard_at <= self.timeout:
                since = 'never was' if math.isinf(heard_at) else f'was last heard {now - heard_at:.3f} s ago'
                return (f'the position of {name} {since} on joint_states, and nothing moves from a position that is not '
                        f'known: start the joint_state_broadcaster, or remap joint_states (joint_state_timeout_s is '
                        f'{self.timeout:g})')
        return ''

    def row(self, now: float) -> Row:
        """Return the positions in the order of `names`. Raises ValueError where one is not known."""
        if reason := self.unknown(now):
            raise ValueError(reason)
        return tuple(self._heard[name][0] for name in self.names)
