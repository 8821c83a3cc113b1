"""Each robot's share of the device, on virtual time: who claims the earliest deadlines does not starve the others."""
import pytest
from virtual_device import BRANCH, MS, ROUTES, VirtualDevice, branch, table, tick

from worldmodel_ros.serving.scheduler import Request, Scheduler, Settings, Tier
from worldmodel_ros.serving.scheduler.shares import ACTIVE, LONGEST, Shares

ONE_MODEL = {tier: ROUTES[tier] for tier in (Tier.TWO_STEP, Tier.ONE_STEP)}  # 21 and 14 ms
CPU = {'big_observe': {1: 7.0}, 'big_denoise': {1: 7.0}, 'big_decode': {1: 7.0}}


class Expecting(VirtualDevice):
    """Tells the scheduler when each session's next tick is expected, as the service does."""

    def __init__(self, periods, settings=None):
        super().__init__(Scheduler(table(**CPU), settings=settings))
        self.periods = periods

    def submit(self, request):
        admission = super().submit(request)
        if request.session in self.periods:
            self.scheduler.expect(request.session, request.arrival + self.periods[request.session])
        return admission


def ticks(session, period, budget, phase=0.0, seconds=5.0):
    return [tick(session, number, phase + number * period, budget, ONE_MODEL)
            for number in range(1, int(seconds / period))]


def served(device, session):
    own = [name for name in device.admissions if name[0] == session]
    return sum(name in device.completions and device.completions[name].met for name in own) / len(own)


def play(device, *streams):
    return device.play(sorted((request for stream in streams for request in stream), key=lambda each: each.arrival))


def test_who_always_claims_the_earliest_deadline_does_not_starve_the_others():
    device = Expecting({'greedy': 0.02, 'honest': 0.1})
    play(device, ticks('greedy', 0.02, 16 * MS), ticks('honest', 0.1, 20 * MS, phase=7 * MS))
    assert served(device, 'honest') > 0.85
    assert served(device, 'greedy') > 0.6  # what others leave is not wasted
    refused = [each.reason for name, each in device.admissions.items() if name[0] == 'greedy' and not each.admitted]
    assert any('from the next tick of a robot that has had less' in reason and 'used its share of the device for the '
               'next' in reason for reason in refused), refused[:3]


def test_an_image_that_is_late_costs_its_robot_no_claim():
    honest, at = [], 0.107
    for number in range(1, 400):  # one tick in five comes 150 ms late, and the next ones after it
        honest.append(tick('honest', number, at, 20 * MS, ONE_MODEL))
        at += 0.1 + (0.15 if number % 5 == 0 else 0.0) + (number * 7 % 9 - 4) * MS
    device = Expecting({'greedy': 0.02, 'honest': 0.1})
    play(device, ticks('greedy', 0.02, 16 * MS, seconds=at), honest)
    late = [('honest', number + 2) for number in range(5, 395, 5)]  # the second one after the gap is expected again
    assert sum(device.admissions[name].admitted for name in late) / len(late) > 0.86  # 0.83 without the claim


def test_nothing_that_was_admitted_is_taken_back():
    device = Expecting({'greedy': 0.01, 'honest': 0.1, 'other': 0.1})
    play(device, ticks('greedy', 0.01, 16 * MS), ticks('honest', 0.1, 30 * MS, phase=7 * MS),
         ticks('other', 0.1, 30 * MS, phase=37 * MS))
    assert all(each.met for each in device.completions.values() if each.done)
    assert served(device, 'honest') == served(device, 'other') == 1.0


def test_sessions_of_one_account_have_one_share():
    def stream(session, account, period, phase, budget):
        return [Request((session, n), session, n, request.kind, request.arrival, request.deadline, ONE_MODEL, account)
                for n, request in enumerate(ticks(session, period, budget, phase), 1)]

    names = [f'greedy{k}' for k in range(4)]
    device = Expecting({'honest': 0.1, **dict.fromkeys(names, 0.08)})
    play(device, *(stream(name, 'greedy', 0.08, 0.02 * k, 16 * MS) for k, name in enumerate(names)),
         stream('honest', 'honest', 0.1, 7 * MS, 20 * MS))
    assert served(device, 'honest') > 0.85


def test_a_session_that_begins_anew_at_each_tick_keeps_what_it_owes():
    device = Expecting({'greedy': 0.02, 'honest': 0.1})
    submit = device.submit

    def anew(request):
        if request.session == 'greedy':
            device.scheduler.close('greedy', device.now)
            device._collect()
        return submit(request)

    device.submit = anew
    play(device, ticks('greedy', 0.02, 16 * MS), ticks('honest', 0.1, 20 * MS, phase=7 * MS))
    assert served(device, 'honest') > 0.85


def test_a_robot_alone_may_use_all_of_the_device():
    device = play(Expecting({'greedy': 0.021}), ticks('greedy', 0.021, 30 * MS))
    assert served(device, 'greedy') == 1.0


def test_deadlines_that_no_device_could_meet_hold_nobody_up():
    device = Expecting({'greedy': 0.02, 'hasty': 0.1, 'other': 0.1})
    play(device, ticks('greedy', 0.02, 30 * MS), ticks('hasty', 0.1, 5 * MS, phase=7 * MS))
    assert served(device, 'hasty') == 0.0 and served(device, 'greedy') > 0.95


def test_questions_with_the_earliest_deadlines_leave_room_for_another_robots():
    """Branches of 21 ms each; 'first' asks for far more than there is time for, always with the nearer deadline."""
    def branches(account, count, budget):
        return [Request((account, k), account, 0, each.kind, each.arrival, each.deadline, each.routes)
                for k, each in enumerate(branch(f'{k}', budget=budget) for k in range(count))]

    device = Expecting({})
    device.play([*branches('first', 200, 2.0), *branches('second', 40, 2.1)], until=2.0)
    done = {account: sum(each.met for name, each in device.completions.items() if name[0] == account)
            for account in ('first', 'second')}
    # There is time for 95. When the first one's came, nobody else had asked for anything.
    assert done['second'] >= 28 and done['first'] > 40, done


def test_a_cancelled_branch_gives_back_no_more_than_it_was_charged():
    def of(account, name, budget=10.0, routes=None):
        each = branch(name, budget=budget, routes=routes)
        return Request(name, account, 0, each.kind, each.arrival, each.deadline, each.routes)

    device = VirtualDevice(Scheduler(table()))
    for k in range(100):  # 1.2 s
        device.submit(of('greedy', f'{k}'))
    device.submit(of('greedy', 'endless', routes={Tier.TWO_STEP: BRANCH[Tier.TWO_STEP] * 10_000}))
    device.scheduler.cancel('endless', device.now)
    device.submit(of('greedy', 'next'))
    device.submit(of('other', 'later', budget=10.5))
    done = list(device.play([]).completions)
    assert done.index('later') < done.index('next')


def test_a_budget_is_charged_filled_and_forgiven():
    shares = Shares(0.0, 0.5)
    assert shares.postponement('a', 0.0) == shares.postponement('b', 0.0) == 0.0
    shares.charge('a', 0.1, 0.0)
    assert shares.postponement('a', 0.0) == pytest.approx(0.2)  # each of two has half of the device
    assert shares.postponement('b', 0.1) == 0.0
    assert shares.postponement('a', 0.1) == pytest.approx(0.1)
    assert shares.charge('a', 100.0, 0.1) == pytest.approx(0.5 * LONGEST - 0.05)  # no more than is postponed at most
    assert shares.postponement('a', 0.1) == pytest.approx(LONGEST)
    assert shares.postponement('a', 0.1 + LONGEST / 2 + ACTIVE) == 0.0  # b has asked for nothing since
    for k in range(1000):
        shares.postponement(k, 10.0 + 2 * k)
    assert len(shares._accounts) < 100


def test_a_configured_share_is_no_more_than_that_and_no_more_than_an_equal_part():
    shares = Shares(0.25, 0.5)
    shares.postponement('a', 0.0)
    shares.charge('a', 0.1, 0.0)
    assert shares.postponement('a', 0.0) == pytest.approx(0.4)
    for account in 'bcdefgh':
        shares.postponement(account, 0.0)
    assert shares.postponement('a', 0.0) == pytest.approx(0.8)
    with pytest.raises(ValueError, match='share 0 to 1'):
        Settings(share=1.5)
