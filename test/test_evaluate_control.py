"""The evaluation of decisions: judges, forecasts, the planner, the delay of commands, and the report."""
import argparse
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from worldmodel_ros import cli
from worldmodel_ros.control.terms import REACHED, Reach, Touch
from worldmodel_ros.control import reactive_policy as policy
from worldmodel_ros.evaluate.control.controllers import MEANINGS, NAMES, applies, make
from worldmodel_ros.evaluate.control.episode import Episode, drive, rung_seconds
from worldmodel_ros.evaluate.control.forecast import Frozen, Memory, Oracle, Tracker
from worldmodel_ros.evaluate.control.judge import Judge
from worldmodel_ros.control.deliberation import Deliberation
from worldmodel_ros.evaluate.control import run
from worldmodel_ros.evaluate.control.run import Job, Question, complete, driven, evaluate, report
from worldmodel_ros.evaluate.control.summary import mcnemar, p_values, table
from worldmodel_ros.evaluate.control.tasks import RUN_TIME_TASKS, TASKS, expand, to_world
from worldmodel_ros.evaluate.control.views import View
from worldmodel_ros.motion import under_way
from worldmodel_ros.nodes.judging.listener import Heard
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.task_scenes import Variant
from worldmodel_ros.sim.world import World

SEED = 4000000
EVERYTHING = (math.inf, math.inf, True)


@pytest.fixture(scope='module')
def world():
    return World(0)


class Standing:
    """Commands nothing, and keeps what it was told."""

    def __init__(self, command=(0.0, 0.0)):
        self.command, self.told = np.array(command), []

    def decide(self, world, odometry, terms, sent, executed):
        self.told.append((world.time, sent, executed.tolist()))
        return self.command


def begin(world, task, seed=SEED):
    setup = TASKS[task].setup(seed)
    world.load(setup.scene)
    return setup, Judge(setup, world)


def stand_at(world, name, away):
    """Puts the robot ``away`` m from the centre of a thing, towards the middle of the room."""
    x, y = world.position(name)
    angle = math.atan2(-y, -x)
    world.move_robot((x + away * math.cos(angle), y + away * math.sin(angle), angle))


def test_names_of_tasks_are_expanded_and_unknown_ones_refused():
    assert expand(['street', 'runtime', 'street']) == ('street', *RUN_TIME_TASKS)
    with pytest.raises(ValueError, match='fly'):
        expand(['fly'])
    assert set(MEANINGS) == set(NAMES)


def test_every_term_of_every_task_names_things_of_its_scene():
    for task in TASKS.values():
        setup = task.setup(SEED)
        names = {mover.name for mover in setup.scene.movers} | {prop.colour for prop in setup.scene.props}
        targets = {term.target for term in setup.terms() if hasattr(term, 'target')}
        names |= {term.target for term in setup.terms() if getattr(term, 'place', None)}
        assert targets
        assert targets <= names
        assert all(name in names for term in setup.terms() for name in getattr(term, 'but', ()))


def test_recall_gives_another_goal_at_each_arrival(world):
    setup, judge = begin(world, 'recall')
    assert all(a != b for a, b in zip(setup.goals, setup.goals[1:]))
    for arrivals in (1, 2):
        goal = judge.terms[0].target
        stand_at(world, goal, REACHED - 0.02)
        judge.look()
        assert judge.arrivals == arrivals
        assert judge.terms[0].target != goal
    assert judge.succeeded is None


def test_a_touch_succeeds_and_the_wrong_ball_fails(world):
    for name, succeeded in (('second ball', True), ('first ball', False)):
        _, judge = begin(world, 'second_ball')
        stand_at(world, name, 0.25)
        world.step((0.0, 0.0), 0.02)
        judge.look()
        assert judge.succeeded is succeeded, judge.reason


def test_the_street_fails_by_a_contact_and_a_goal_is_reached_without_one(world):
    setup, judge = begin(world, 'street')
    stand_at(world, 'shuttle 1', 0.2)
    world.step((0.0, 0.0), 0.05)
    judge.look()
    assert judge.succeeded is False and 'shuttle' in judge.reason and judge.contacts == 1
    setup, judge = begin(world, 'street')
    stand_at(world, setup.goals[0], REACHED - 0.02)
    judge.look()
    assert judge.succeeded is True


def test_time_ends_an_episode_and_following_needs_the_distance(world):
    episode = drive(TASKS['intercept'].setup(SEED), Standing(), 0.03, world)
    if not episode.success:
        assert (episode.seconds, episode.reason) == (4.0, 'time over')
    assert not drive(TASKS['follow'].setup(SEED), Standing((0.0, 1.5)), 0.03, world).success


@pytest.mark.parametrize('delay, held', [(0.03, [0.03]), (0.028, [0.03]), (0.23, [0.03, 0.1, 0.1])])
def test_a_command_takes_effect_after_its_delay_and_the_world_goes_on_meanwhile(delay, held, world):
    standing = Standing((0.3, 0.0))
    drive(TASKS['intercept'].setup(SEED), standing, delay, world)
    times, sent, executed = zip(*standing.told, strict=True)
    assert np.allclose(np.diff(times), 0.1)
    assert [seconds for seconds, _ in sent[5]] == pytest.approx(held)
    # Acceleration is limited to 0.15 m/s a tick, from one command to the next.
    first = next(i for i, command in enumerate(executed) if command[0] > 0.0)
    assert first == math.ceil(delay / 0.1)
    assert executed[first][0] == pytest.approx(0.15)


def test_the_delay_is_rolled_forward_under_the_commands_that_hold():
    pose, twist = under_way(np.zeros(3), np.array([0.4, 0.0]), [(0.1, np.array([0.4, 0.0])), (0.2, np.array([0.4, 1.0]))])
    assert pose[0] == pytest.approx(0.12, abs=0.005)
    assert pose[2] == pytest.approx(0.2 - 0.03, abs=0.005)
    assert twist == pytest.approx([0.4, 1.0], abs=0.01)


def errors_of(forecast, world, seed, seconds=1.5, ahead=1.0):
    """Metres by which a forecast misses the ball after ``ahead`` s, after standing and looking on for ``seconds``."""
    world.load(TASKS['intercept'].setup(seed).scene)
    odometry = WheelOdometry(world)
    for _ in range(round(seconds / 0.1)):
        forecast.update(world, odometry)
        world.step((0.0, 0.0))
        odometry.update(world)
    forecast.update(world, odometry)
    path = forecast.view(np.array([0.0, ahead])).things['ball'].path
    pose = world.pose
    world.step((0.0, 0.0), ahead)
    if isinstance(forecast, Tracker):  # its frame begins at the start, which the robot never left
        x, y, yaw = pose
        cos, sin = math.cos(yaw), math.sin(yaw)
        path = path @ np.array([[cos, sin], [-sin, cos]]) + (x, y)
    return math.dist(path[1], world.position('ball'))


def test_the_oracle_knows_the_future_and_the_others_less(world):
    seeds = range(SEED, SEED + 6)
    makers = {'oracle': lambda: Oracle(Memory(*EVERYTHING)), 'tracker': lambda: Tracker(Memory(*EVERYTHING)),
              'frozen': lambda: Frozen(Memory(*EVERYTHING))}
    missed = {name: np.median([errors_of(maker(), world, seed) for seed in seeds]) for name, maker in makers.items()}
    assert missed['oracle'] < 0.02
    assert missed['oracle'] < missed['tracker'] < missed['frozen']


def test_what_was_not_seen_is_not_known_and_what_was_is_forgotten(world):
    setup, _ = begin(world, 'intercept')
    memory = Memory(0.3, math.inf)
    x, y, yaw = world.pose
    world.move_robot((x, y, yaw + math.pi))
    memory.look(world)
    assert 'ball' not in memory.known(world.time)
    world.move_robot((x, y, yaw))
    memory.look(world)
    assert 'ball' in memory.known(world.time)
    world.move_robot((x, y, yaw + math.pi))
    for known in (True, True, True, False):
        world.step((0.0, 0.0))
        memory.look(world)
        assert ('ball' in memory.known(world.time)) is known


def test_the_tracker_sees_the_walls_where_they_are(world):
    world.load(TASKS['street'].setup(SEED).scene)
    tracker, odometry = Tracker(Memory(*EVERYTHING)), WheelOdometry(world)
    tracker.update(world, odometry)
    view = tracker.view(np.array([0.0, 0.1]))
    # From the robot, each wall is as far in its direction as in truth, in whichever frame.
    x, y, yaw = world.pose
    truth = sorted([world.scene.width / 2 - x, world.scene.width / 2 + x, world.scene.depth / 2 - y, world.scene.depth / 2 + y])
    assert np.sort(view.walls[:, 2] - view.walls[:, :2] @ view.pose[:2]) == pytest.approx(truth)
    assert np.arctan2(view.walls[0, 1], view.walls[0, 0]) == pytest.approx(math.remainder(-yaw, math.tau))


def test_the_policy_steers_at_its_target_and_round_what_is_in_the_way():
    aim, none = policy.Aim.of((Reach('red'),)), np.zeros((0, 2))
    poses = np.zeros((3, 3))
    ahead, left, there = policy.drive(aim, poses, np.array([(2.0, 0.0), (0.0, 2.0), (0.4, 0.0)]), none, np.zeros(0),
                                      np.zeros((0, 3)))
    assert ahead[0] == pytest.approx(0.5) and ahead[1] == 0.0
    assert left[0] == 0.0 and left[1] > 1.0
    assert there[0] == 0.0
    round_it, = policy.drive(aim, poses[:1], np.array([(2.0, 0.0)]), np.array([(1.0, 0.1)]), np.array([0.15]), np.zeros((0, 3)))
    assert round_it[1] < 0.0 < round_it[0]


def test_the_planner_leads_a_ball_that_crosses(world):
    """A policy turns to where the ball is, the planner to where it will be."""
    from worldmodel_ros.control.terms import Thing
    from worldmodel_ros.control.scene_view import View
    planner = Deliberation()
    times = planner.times(0.03)
    path = np.array([0.9, 0.6]) + times[:, None] * np.array([0.0, -0.4])
    view = View(np.zeros(3), np.zeros(2), {'ball': Thing(path, 0.1, 'magenta', True)}, np.zeros((0, 3)))
    decision = planner.choose((Touch('ball'),), view, [(0.03, np.zeros(2))], np.zeros(2))
    assert decision.scores[decision.name] > decision.scores['policy'] + 0.02
    assert decision.scores[decision.name] > 1.0  # it is touched within the horizon


def test_an_unknown_target_is_looked_for(world):
    from worldmodel_ros.control.scene_view import View
    planner, view = Deliberation(), View(np.zeros(3), np.zeros(2), {}, np.zeros((0, 3)))
    # What it approaches from a stand, within the limits of the base.
    commands = [planner.choose((Reach('red'),), view, [], np.zeros(2)).commands[-1] for _ in range(100)]
    assert commands[0].tolist() == policy.SPIN.tolist()
    assert any(command.tolist() != policy.SPIN.tolist() for command in commands)  # given up after a turn


def test_a_goal_that_a_turn_does_not_show_is_found_elsewhere(world):
    """In this room something hides the goal from the start: turning on the spot never ends, and circles come back."""
    setup = TASKS['rooms'].setup(5000003)
    world.load(setup.scene)
    seen = False
    for _ in range(65):
        seen |= world.visible(setup.goals[0])
        world.step((0.0, 1.0))
    assert not seen
    assert drive(setup, make('oracle'), 0.03, world).success


def test_the_shipped_model_sees_pictures_and_what_was_executed_and_is_told_the_goal(world):
    class Session:
        spec = SimpleNamespace(image_size=(64, 64))
        goals, executed = [], []

        def observe(self, frame, executed):
            assert frame.shape == (64, 64, 3)
            self.executed.append(executed.tolist())

        def plan(self, goal):
            self.goals.append(goal)
            return np.array([(0.2, 0.1), (9.0, 9.0)])

    session = Session()
    shipped = make('b1', SimpleNamespace(open_session=lambda: session))
    setup, judge = begin(world, 'street')
    for executed in ((0.0, 0.0), (0.15, 0.1)):
        command = shipped.decide(world, None, judge.terms, [], np.array(executed))
    assert command.tolist() == [0.2, 0.1]
    assert session.goals == [setup.goals[0]] * 2
    assert session.executed[1] == pytest.approx([0.15, 0.1])


def test_the_oracle_wins_where_the_policy_loses(world):
    """Of a few streets: the planner with the true future gets through more of them than the policy alone."""
    won = {name: sum(drive(TASKS['street'].setup(seed), make(name), 0.03, world).success for seed in range(SEED, SEED + 4))
           for name in ('oracle', 'reactive')}
    assert won['oracle'] > won['reactive']


def test_b1_is_asked_for_goals_alone():
    assert [name for name in TASKS if applies('b1', TASKS[name])] == ['street', 'recall', 'rooms', 'avoid_red', 'pass_behind']
    assert all(applies('oracle', task) for task in TASKS.values())


def test_mcnemar_is_the_binomial_test():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 10) == pytest.approx(2 / 2 ** 10)
    assert mcnemar(600, 600) == 1.0 and 0.0 < mcnemar(700, 500) < 1e-8
    assert mcnemar(8, 2) == mcnemar(2, 8) == pytest.approx(2 * (1 + 10 + 45) / 2 ** 10)


def test_the_table_and_the_pairs():
    def episodes(*successes):
        return [Episode(seed, bool(success), seed, 2.0 + seed, 3, '') for seed, success in enumerate(successes)]
    driven = {('street', 'oracle'): episodes(1, 1, 1, 0), ('street', 'reactive'): episodes(0, 0, 1, 0),
              ('street', 'tracker'): episodes(1, 0, 1, 0), ('recall', 'oracle'): episodes(1, 1, 1, 1)}
    rows = table(driven)
    assert rows['street']['oracle'] == {
        'success': 0.75, 'contacts': 0.75, 'seconds': 3.0, 'goals_per_minute': None, 'n': 4, 'share': 1.0,
        'of_expert': 1.0}
    assert rows['street']['tracker']['share'] == 0.5
    assert rows['street']['tracker']['of_expert'] == pytest.approx(2 / 3, abs=1e-4)
    assert rows['recall']['oracle']['success'] is None
    assert rows['recall']['oracle']['goals_per_minute'] == pytest.approx(12 / (14 / 60), abs=0.01)
    assert p_values(driven) == {'street': {'oracle / reactive': 0.5, 'oracle / tracker': 1.0, 'reactive / tracker': 1.0}}


def test_times_of_the_rungs_are_measured_and_ordered():
    times = rung_seconds()
    assert 0.0 < times['head'] < times['one_step'] < times['two_step'] < 0.05


@pytest.mark.parametrize('wrong, complaint', [
    ({'seeds': range(5, 5)}, 'none'), ({'tasks': ('fly',)}, 'fly'), ({'controllers': ('me',)}, 'me'),
    ({'rungs': ()}, 'no rung'), ({'variants': ('upside down',)}, 'upside down')])
def test_a_question_that_cannot_be_answered_is_refused(wrong, complaint):
    right = {'seeds': range(SEED, SEED + 1), 'tasks': ('rooms',), 'controllers': ('oracle',)}
    Question(**right)
    with pytest.raises(ValueError, match=complaint):
        Question(**right | wrong)


def test_variants_and_further_rungs_are_driven_for_the_tasks_that_have_them():
    question = Question(
        range(SEED, SEED + 1), ('rooms', 'street'), ('reactive', 'b1'), ('two_step', 'head'), ('stops', 'delay'))
    jobs = {(job.variant, job.task) for job in question.jobs()}
    assert ('stops', 'street') in jobs and ('stops', 'rooms') not in jobs and ('head', 'rooms') in jobs
    times = rung_seconds()
    assert question.delay(Job('plain', 'rooms', 'reactive', SEED)) == times['two_step']
    assert question.delay(Job('head', 'rooms', 'reactive', SEED)) == times['head']
    assert question.delay(Job('plain', 'rooms', 'b1', SEED)) == times['b1'] > times['two_step']
    assert question.delay(Job('delay', 'rooms', 'reactive', SEED)) == pytest.approx(times['two_step'] + 0.2)


def test_images_of_walls_have_a_row_for_who_sees_the_same_elsewhere():
    def episode(success, walls_alone, alike):
        return Episode(SEED, success, 0, 5.0, 0, '', walls_alone, alike)
    driven = [episode(True, False, True), episode(False, False, False), episode(False, True, True), episode(False, None, False)]
    row = table({('any_images', 'one_step'): driven})['any_images']['one_step']
    assert row['success'] == 0.25 and row['alike'] == 0.5  # a refused image is not seen
    assert row['walls_alone'] == {'success': 0.0, 'alike': 1.0, 'n': 1}


def test_walls_are_seen_alike_all_along_them_and_from_nowhere_else():
    def goal(shows_thing):
        for seed in range(SEED, SEED + 60):
            setup = TASKS['any_images'].setup(seed)
            world = World()
            world.load(setup.scene)
            view = View(setup, world)
            if view.walls_alone != shows_thing and (shows_thing or len(view._shown) == 1):
                return setup, world, view
        raise AssertionError('no such room')
    setup, world, view = goal(shows_thing=False)
    x, y, yaw = to_world(setup.scene, setup.goals[0])
    wall, = view._shown
    normal, along = ((math.cos(a), math.sin(a)) for a in (wall * math.pi / 2, (wall + 1) * math.pi / 2))

    def seen(away=0.0, aside=0.0, turn=0.0):
        world.move_robot((x + away * normal[0] + aside * along[0], y + away * normal[1] + aside * along[1], yaw + turn))
        return view.is_seen(world)
    assert not view.is_seen(world) and seen() and seen(aside=0.4) | seen(aside=-0.4)
    assert not seen(away=-0.4) and not seen(turn=0.5) and not seen(turn=math.pi)
    setup, world, view = goal(shows_thing=True)
    world.move_robot(to_world(setup.scene, setup.goals[0]))
    assert not view.is_seen(world), 'what shows a thing has one pose'


def test_rows_of_what_was_not_driven_are_absent():
    question = Question(range(SEED, SEED + 1), ('intercept',), ('reactive', 'b1'))
    found = report(question, {Job('plain', 'intercept', 'reactive', SEED): Episode(SEED, True, 0, 1.0, 0, 'done')})
    assert found['tasks'] == {'intercept': {'reactive': {
        'success': 1.0, 'contacts': 0.0, 'seconds': 1.0, 'goals_per_minute': None, 'n': 1}}}


def test_the_command_prints_the_report_and_goes_on_where_it_was(capsys, tmp_path):
    kept = tmp_path / 'episodes.jsonl'
    line = ['evaluate', 'control', '--seeds', '4000000:4000003', '--tasks', 'intercept', '--controllers', 'reactive',
            '--workers', '1']
    assert cli.main([*line, '--episodes', str(kept)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first['tasks']['intercept']['reactive']['n'] == 3
    assert {'machine', 'versions', 'command', 'variants', 'p_values', 'model', 'definitions'} <= set(first)
    assert len(kept.read_text().splitlines()) == 3
    kept.write_text(kept.read_text().replace('"success": false', '"success": true'))  # seen in the result: not driven again
    assert cli.main([*line, '--episodes', str(kept)]) == 0
    assert json.loads(capsys.readouterr().out)['tasks']['intercept']['reactive']['success'] == 1.0
    assert cli.main([*line, '--episodes', str(kept), '--rungs', 'head']) == 1
    assert 'another rung' in capsys.readouterr().err
    assert cli.main([*line, '--episodes', str(kept), '--backend', 'onnx']) == 1
    assert 'or back end' in capsys.readouterr().err
    kept.write_text(kept.read_text().replace(', "backend": "auto"', ''))  # as it was written before
    assert cli.main([*line, '--episodes', str(kept)]) == 0


def test_a_line_that_was_cut_off_is_named(tmp_path):
    question, kept = Question(range(SEED, SEED + 1), ('intercept',), ('reactive',)), tmp_path / 'episodes.jsonl'
    kept.write_text('{"rung": "two_step", "mod')
    with pytest.raises(ValueError, match='episodes.jsonl, line 1, is no episode .*: delete the line'):
        list(driven(question, question.jobs(), kept=kept))


@pytest.mark.parametrize('option', ['--json', '--episodes'])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_driven(option, capsys, tmp_path):
    (tmp_path / 'file').write_text('')
    for place in (tmp_path, tmp_path / 'file' / 'result.json'):
        with pytest.raises(SystemExit):
            cli.main(['evaluate', 'control', '--seeds', '4000000:4000003', '--controllers', 'reactive', option, str(place)])
        assert f'argument {option}: {str(place)!r} cannot be written: ' in capsys.readouterr().err


def test_the_folder_of_a_file_of_episodes_is_made(tmp_path):
    kept = tmp_path / 'new' / 'episodes.jsonl'
    assert cli.main(['evaluate', 'control', '--seeds', '4000000:4000001', '--tasks', 'intercept', '--controllers', 'reactive',
                     '--workers', '1', '--episodes', str(kept), '--json', str(tmp_path / 'also' / 'new' / 'r.json')]) == 0
    assert len(kept.read_text().splitlines()) == 1 and (tmp_path / 'also' / 'new' / 'r.json').is_file()


def test_no_episode_begins_after_the_time_and_those_that_are_being_driven_end(monkeypatch, tmp_path):
    clock = [100.0]

    def drives(question, job):
        clock[0] += 1.0
        return Episode(job.seed, True, 0, 1.0, 0, 'done')
    monkeypatch.setattr(run.time, 'monotonic', lambda: clock[0])
    monkeypatch.setattr(run, '_drive', drives)
    question = Question(range(SEED, SEED + 5), ('intercept',), ('reactive', 'frozen'))
    kept = tmp_path / 'episodes.jsonl'
    assert [job for job, _ in driven(question, question.jobs(), kept=kept, seconds=2.5)] == question.jobs()[:3]
    # It goes on where it was: what is there takes no time, and counts.
    assert [job for job, _ in driven(question, question.jobs(), kept=kept, seconds=1.5)] == question.jobs()[:5]
    assert evaluate(question, kept=kept, seconds=0.0)['tasks']['intercept']['frozen']['n'] == 2


def test_graphs_are_exported_before_several_processes_need_them(monkeypatch):
    loaded = []
    monkeypatch.setattr(run, '_forecast', lambda folder, backend: loaded.append((folder, backend)))
    monkeypatch.setattr(run, 'each', lambda work, jobs, workers: ())
    question = Question(range(SEED, SEED + 1), ('street',), ('oracle', 'b2'), backend='onnx', forecast='tiny')
    assert list(driven(question, question.jobs(), workers=2)) == []
    assert loaded == [('tiny', 'onnx')]
    assert list(driven(question, [job for job in question.jobs() if job.controller == 'oracle'], workers=2)) == []
    assert len(loaded) == 1


def test_a_room_is_complete_when_each_controller_has_driven_it():
    question = Question(range(SEED, SEED + 2), ('intercept', 'street'), ('reactive', 'frozen'), variants=('shifted',))
    done = {job: Episode(job.seed, True, 0, 1.0, 0, 'done') for job in question.jobs()}
    assert complete(question.jobs(), done) == done
    del done[Job('shifted', 'street', 'frozen', SEED)]
    left = complete(question.jobs(), done)
    assert [job for job in question.jobs() if job not in left] == [
        Job('shifted', 'street', 'reactive', SEED), Job('shifted', 'street', 'frozen', SEED)]


def test_the_command_stops_in_time(capsys):
    line = ['evaluate', 'control', '--seeds', '4000000:4000003', '--tasks', 'intercept', '--controllers', 'reactive',
            '--workers', '2', '--seconds', '0']
    assert cli.main(line) == 0
    assert json.loads(capsys.readouterr().out)['tasks'] == {}


@pytest.mark.parametrize('option', [
    ('--seconds', '5'), ('--episodes', 'e.jsonl'), ('--variants', 'stops'), ('--controllers', 'oracle'),
    ('--rungs', 'two_step'), ('--workers', '2')])
def test_what_is_not_done_over_ros_is_refused_there(capsys, monkeypatch, option):
    monkeypatch.setattr('worldmodel_ros.cli.evaluate_control_ros.drive', lambda *_: pytest.fail('it drives'))
    assert cli.main(['evaluate', 'control', '--seeds', '4000000:4000003', '--tasks', 'street', '--ros', *option]) == 1
    assert 'without --ros' in (said := capsys.readouterr().err) and option[0] in said


def test_over_ros_the_latencies_are_given_or_none_where_no_command_arrived():
    from worldmodel_ros.cli.evaluate_control_ros import summary
    none = summary(Heard())
    assert json.loads(json.dumps(none, allow_nan=False))['camera_to_command_ms'] == {
        'p50': None, 'p99': None, 'max': None, 'n': 0}
    some = summary(Heard(latencies=[0.03, 0.01, 0.02]))
    assert some['camera_to_command_ms'] == {'p50': 20.0, 'p99': 29.8, 'max': 30.0, 'n': 3}


def test_seeds_of_training_are_refused(capsys):
    assert cli.main(['evaluate', 'control', '--seeds', '0:5', '--tasks', 'rooms']) == 1
    assert 'training' in capsys.readouterr().err


def test_an_episode_is_the_same_when_it_is_driven_again(world):
    question = Question(range(SEED, SEED + 1), ('second_ball',), ('reactive', 'frozen'), variants=('shifted',))
    assert evaluate(question)['variants'] == evaluate(question)['variants']
    setup = TASKS['second_ball'].setup(SEED, Variant(shifted=True))
    assert drive(setup, make('tracker'), 0.03, world) == drive(setup, make('tracker'), 0.03, World(3))


def test_images_show_a_thing_and_count_by_place_and_yaw(world):
    for seed in range(SEED, SEED + 5):
        setup, judge = begin(world, 'images', seed)
        x, y, yaw = to_world(setup.scene, setup.goals[0])
        world.move_robot((x, y, yaw + 1.0))
        world.step((0.0, 0.0))
        judge.look()
        assert judge.succeeded is None
        world.move_robot((x, y, yaw))
        world.step((0.0, 0.0))
        assert any(world.visible(colour) and abs(world.goal_bearing(colour)) < 0.75 for colour in COLOURS), seed
        judge.look()
        assert judge.succeeded, seed


def test_goals_are_tasks_by_other_names():
    from worldmodel_ros.cli.evaluate_control import _tasks, add_control
    parser = argparse.ArgumentParser()
    add_control(parser)
    def told(*words):
        return _tasks(parser.parse_args(['--seeds', '1:2', *words]))
    assert told('--goals', 'pose', 'image', 'colour') == ('places', 'images', 'rooms')
    assert told('--tasks', 'street', '--goals', 'pose') == ('street', 'places')
    assert 'street' in told() and 'places' not in told()


def test_places_are_free_and_told_in_the_frame_that_the_robot_starts_in(world):
    for seed in range(SEED, SEED + 5):
        setup, judge = begin(world, 'places', seed)
        (x, y), (x0, y0, yaw) = setup.goals[0], world.pose
        there = x0 + math.cos(yaw) * x - math.sin(yaw) * y, y0 + math.sin(yaw) * x + math.cos(yaw) * y
        assert math.hypot(x, y) > 1.0 and all(math.dist(there, world.position(colour)) > 0.4 for colour in COLOURS)
        world.step((0.0, 0.0))
        judge.look()
        assert judge.succeeded is None
        world.move_robot((*there, yaw))
        world.step((0.0, 0.0))
        judge.look()
        assert judge.succeeded, seed
    assert not applies('b1', TASKS['places']) and applies('one_step', TASKS['places'])
