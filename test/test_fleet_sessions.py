"""Servers with a store: robots go on in their own past, and move from server to server while they drive."""
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.fleet_robots import Robot, ServerProcess
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine import load
from worldmodel_ros.engine.session_store import claim, owner_of
from worldmodel_ros.serving.client.link import Unavailable, open_link
from worldmodel_ros.serving.fleet.move import MoveError, ask_move

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def engine():
    """Twins of the robots' sessions: the same model by the same back end, which never move."""
    return load('tiny', 'onnx', sessions=8)


@pytest.fixture(scope='module')
def fleet(tmp_path_factory):
    """Two servers of one store."""
    folder = tmp_path_factory.mktemp('fleet')
    servers = [ServerProcess(folder / f'{name}.sock', folder / 'store', options=('--backend', 'onnx')) for name in 'ab']
    try:
        yield [server.wait() for server in servers]
    finally:
        codes = [server.stop() for server in servers]
    assert codes == [0, 0], [server.log() for server in servers]


@pytest.fixture
def store(fleet):
    made = FileStore(fleet[0].path.parent / 'store')
    yield made
    made.close()


def assert_like_twin(robot, answer):
    """The answer is the twin's, bit for bit, pictures included."""
    assert answer.tier in (Tier.TWO_STEP, Tier.ONE_STEP), answer.reason
    plan, risk, frames = robot.twin_answers(answer.tier)
    np.testing.assert_array_equal(answer.plan, plan)
    if answer.frames is None:  # the session moved just after the answer: what was to be shown is not
        assert robot.server != answer.server
        return
    np.testing.assert_array_equal(answer.collision_risk, risk)
    np.testing.assert_array_equal(answer.frames, frames)


def drive(robot, ticks):
    for _ in range(ticks):
        answer = robot.tick(due=60.0, shown=True, patience=120.0)  # whatever else the machine does
        assert_like_twin(robot, answer)
    return answer


def test_a_robot_that_reconnects_goes_on_in_its_own_past(fleet, engine):
    robot = Robot(1, fleet[0].path, engine)
    assert (robot.link.frames, robot.generation) == (0, 1)
    drive(robot, 5)
    for seen in (5, 8):
        robot.connect(fleet[0].path)  # the former connection ends, and the session with it
        assert robot.link.frames == seen
        drive(robot, 3)
    robot.close()


def test_it_goes_on_at_another_server_too_and_the_former_owner_is_told_apart(fleet, engine, store):
    robot = Robot(2, fleet[0].path, engine)
    drive(robot, 3)
    first = robot.generation
    robot.close()
    wait_until_stored(fleet[0], robot)
    robot.connect(fleet[1].path)
    assert robot.link.frames == 3 and robot.generation == first + 1
    assert owner_of(store, robot.session) == (first + 1, str(fleet[1].path))
    drive(robot, 2)
    robot.close()


def wait_until_stored(server, robot):
    for _ in range(500):
        if robot.session not in [each.get('session') for each in server.status()['robots']]:
            time.sleep(0.3)  # it is being stored as it ended
            return
        time.sleep(0.01)
    raise AssertionError('the server has not noticed that the robot is gone')


def test_a_session_moves_between_two_ticks_and_its_next_chunk_is_the_same_bit_for_bit(fleet, engine, store):
    robot = Robot(3, fleet[0].path, engine)
    drive(robot, 4)
    for target, other in ((fleet[1], fleet[0]), (fleet[0], fleet[1])):
        generation = robot.generation
        moving = threading.Thread(target=ask_move, args=(robot.server, robot.session, target.path))
        moving.start()
        while robot.generation == generation:
            drive(robot, 1)
            robot.idle(0.05)
        moving.join()
        assert robot.server == target.path and robot.generation == generation + 1
        assert owner_of(store, robot.session) == (generation + 1, str(target.path))
        drive(robot, 3)
        assert robot.session not in [each.get('session') for each in other.status()['robots']]
    robot.close()


def test_a_robot_whose_former_connection_is_not_known_to_be_lost_can_be_moved(fleet, engine):
    robot = Robot(11, fleet[0].path, engine)
    drive(robot, 2)
    former, robot.link = robot.link, None  # as over a network that is gone
    robot.connect(fleet[0].path)
    drive(robot, 1)
    ask_move(fleet[0].path, robot.session, fleet[1].path, patience=60.0)
    drive(robot, 1)
    assert robot.server == fleet[1].path
    robot.close()
    former.connection.close()


def test_a_tick_that_comes_while_the_session_moves_is_answered_by_the_other_server(fleet, engine):
    robot = Robot(4, fleet[0].path, engine)
    drive(robot, 2)
    moving = threading.Thread(target=ask_move, args=(fleet[0].path, robot.session, fleet[1].path))
    moving.start()
    while robot.server == fleet[0].path:  # without a pause: one tick at least falls into the move
        drive(robot, 1)
    moving.join()
    drive(robot, 2)
    robot.close()


def test_where_the_other_server_cannot_take_it_the_session_stays_and_goes_on(fleet, engine, tmp_path):
    robot = Robot(5, fleet[0].path, engine)
    drive(robot, 2)
    with pytest.raises(MoveError, match='no server at'):
        ask_move(fleet[0].path, robot.session, tmp_path / 'absent.sock')
    with pytest.raises(MoveError, match='is not open here'):
        ask_move(fleet[1].path, robot.session, fleet[0].path)
    with pytest.raises(MoveError, match='it is here already'):
        ask_move(fleet[0].path, robot.session, fleet[0].path)
    drive(robot, 2)
    robot.close()


def test_a_move_that_fails_at_its_end_keeps_the_source_and_fences_the_target(fleet, engine, store):
    """Another process claims the generation, as a second mover would: exactly one of them owns the session."""
    robot = Robot(6, fleet[0].path, engine)
    drive(robot, 2)
    claim(store, robot.session, robot.generation + 1, str(fleet[1].path))
    with pytest.raises(MoveError):
        ask_move(fleet[0].path, robot.session, fleet[1].path)
    # It is fenced: nothing of it is stored from here any more, and who comes next is told.
    assert owner_of(store, robot.session) == (robot.generation + 1, str(fleet[1].path))
    robot.close()


def test_moves_that_wait_for_their_turn_are_in_the_way_of_no_session_that_comes(fleet, engine, tmp_path):
    stays, comes = Robot(9, fleet[0].path, engine), Robot(10, fleet[1].path, engine)
    for robot in (stays, comes):
        drive(robot, 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent, ThreadPoolExecutor(6) as threads:
        silent.bind(str(tmp_path / 'silent.sock'))
        silent.listen(8)
        moves = [threads.submit(ask_move, fleet[0].path, stays.session, tmp_path / 'silent.sock') for _ in range(6)]
        time.sleep(0.5)
        ask_move(fleet[1].path, comes.session, fleet[0].path)
        silent.close()
    assert all(isinstance(each.exception(), MoveError) for each in moves)
    for robot in (stays, comes):
        drive(robot, 2)
        assert robot.server == fleet[0].path
        robot.close()


def test_a_server_that_is_killed_loses_half_a_second_at_most(engine, tmp_path):
    servers = [ServerProcess(tmp_path / f'{name}.sock', tmp_path / 'store', options=('--backend', 'onnx')) for name in 'ab']
    try:
        for server in servers:
            server.wait()
        robot = Robot(7, servers[0].path, engine)
        for _ in range(12):
            robot.tick()
            robot.idle(0.08)
        servers[0].stop(kill=True)
        robot.link.connection.close()
        robot.link = None
        robot.connect(servers[1].path)
        assert 12 - 8 <= robot.link.frames <= 12
        assert robot.tick(due=60.0).tier is not Tier.NONE
        robot.close()
    finally:
        for server in servers:
            server.stop()


def test_an_old_owner_is_not_believed(fleet):
    robot = Robot(8, fleet[0].path)
    robot.tick()
    robot.close()
    with pytest.raises(Unavailable, match='is owned by another server'):
        open_link(fleet[0].path, '/robot', None, robot.session, robot.generation + 10, 5.0)


@pytest.mark.parametrize('name', ['a/b', '..', 'x' * 70])
def test_a_name_that_is_none_is_refused(fleet, name):
    with pytest.raises(Unavailable, match='is no name of a session'):
        open_link(fleet[0].path, '/robot', None, name, 0, 5.0)
