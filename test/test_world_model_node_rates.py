"""The world model node and the rates of its inputs: the camera's, and that of the executed commands."""
import time

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticStatus
from world_model_rig import NS, active, wait_for

pytestmark = [pytest.mark.ros, pytest.mark.waiting]


def film(node, seconds, rate):
    """Be a camera of so many images a second by their stamps, as fast as the node takes them; return its ticks [s]."""
    start = node.now() - round(seconds * NS)
    for k in range(round(seconds * rate)):
        stamp = start + round(k * NS / rate)
        node.images.publish(node.image(stamp=stamp))
        wait_for(lambda: node.subject._activation.intake.frames._pacer._seen == stamp, 'the image')
    return np.array(node.subject._activation.statistics._stamps)


@pytest.mark.parametrize(('rate', 'shortest', 'longest', 'said'), [
    (25.0, 80, 120, ''), (15.0, 67, 133, 'up to 133 ms')])
def test_ticks_keep_the_models_time_and_what_cannot_fit_is_told(rate, shortest, longest, said):
    with active(deadline_s=10.0, camera_timeout_s=10.0) as node:
        steps = np.diff(film(node, 2.0, rate)) * 1e3
        assert (steps.min(), steps.max()) == pytest.approx((shortest, longest), abs=1.0)
        assert steps.mean() == pytest.approx(100.0, abs=3.0)
        level, text, _ = node.subject._report()
        assert said in text and ('multiple of that' in text) == bool(said)
        assert level == DiagnosticStatus.WARN or not said


def test_a_command_that_nobody_repeats_is_executed_until_the_base_brakes(capfd):
    with active(executed_timeout_s=0.3, deadline_s=10.0, camera_timeout_s=10.0) as node:
        observed = node.engine.sessions[-1].observed
        node.drive(0.4)
        node.images.publish(node.image())
        wait_for(lambda: len(observed) == 1, 'an observation')
        time.sleep(0.4)
        assert not node.subject._executed.actions.moving(node.now())
        node.images.publish(node.image())
        wait_for(lambda: len(observed) == 2, 'an observation')
        time.sleep(0.1)
        node.images.publish(node.image())
        wait_for(lambda: len(observed) == 3, 'an observation')
        assert 0.0 < observed[1][1][0] < 0.35 and not np.any(observed[2][1])
        node.drive(0.2)
        wait_for(lambda: 'executed_timeout_s to 0' in capfd.readouterr().err, 'the warning')
