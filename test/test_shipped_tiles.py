"""The shipped model over tiles, as it is served: found by its name, and better than the last image where a robot turns."""
import numpy as np

from worldmodel_ros.engine.loading import load
from worldmodel_ros.evaluate.drive.pictures import psnr
from worldmodel_ros.evaluate.quality.horizons import finish
from worldmodel_ros.sim.world import World

PERIOD, TURN = 0.1, 0.8  # s, rad/s
SEEN, AHEAD = 4, 4  # images, of which one is before any action


def test_small_tiles_knows_what_comes_into_view():
    world = World(7_400_003, image_size=(128, 128))
    action = np.array([0.0, TURN], np.float32)
    session = load('small_tiles', 'torch', sessions=1).open_session()
    session.observe(world.render(), np.zeros(2, np.float32))
    for _ in range(SEEN - 1):
        world.step(action, PERIOD)
        last = world.render()
        session.observe(last, action)
    future = finish(session.what_if(np.tile(action, (AHEAD, 1)), 2))
    gained = []
    for predicted in future.frames:
        world.step(action, PERIOD)
        true = world.render()
        gained.append(psnr(predicted, true) - psnr(last, true))
    assert len(gained) == AHEAD and min(gained) > 3.0, gained  # dB
