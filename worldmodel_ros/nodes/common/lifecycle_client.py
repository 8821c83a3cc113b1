"""Brings a lifecycle node to a state, as a lifecycle manager would."""

import argparse
import signal
import sys
import time
from types import FrameType

from worldmodel_ros.exit_codes import exit_when_interrupted

ZERO_WHEN_INTERRUPTED = '--zero-when-interrupted'


def _interrupted_code() -> int:
    # From sys.argv: an interrupt may come before the arguments are parsed.
    return 0 if ZERO_WHEN_INTERRUPTED in sys.argv else 128 + signal.SIGINT


if __name__ == '__main__':
    exit_when_interrupted(_interrupted_code())  # the imports below take long

import rclpy
from lifecycle_msgs.msg import Transition, TransitionEvent
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.client import Client
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future

GOALS = ('unconfigured', 'inactive', 'active', 'finalized')  # labels of the primary states

# goal -> current state -> next transition
_NEXT = {
    'active': {'unconfigured': Transition.TRANSITION_CONFIGURE, 'inactive': Transition.TRANSITION_ACTIVATE},
    'inactive': {'unconfigured': Transition.TRANSITION_CONFIGURE, 'active': Transition.TRANSITION_DEACTIVATE},
    'unconfigured': {'inactive': Transition.TRANSITION_CLEANUP, 'active': Transition.TRANSITION_DEACTIVATE},
    'finalized': {'unconfigured': Transition.TRANSITION_UNCONFIGURED_SHUTDOWN,
                  'inactive': Transition.TRANSITION_INACTIVE_SHUTDOWN,
                  'active': Transition.TRANSITION_ACTIVE_SHUTDOWN}}

_QUERY_TIMEOUT = 2.0    # s
_CHANGE_TIMEOUT = 15.0  # s, after which the state is queried instead
_PAUSE = 0.1            # s, between two queries
_LOOK = 0.5             # s, between two checks that the context is valid
_LATE_ANSWER = 0.5      # s, for a response that is overtaken by that of a later state query
_IGNORED = 120.0        # s, after which a node that has neither answered nor begun a transition is given up
_PROGRESS = 30.0        # s, between two reports that a node is still waited for


class LifecycleError(RuntimeError):
    """A node could not be brought to the wanted state."""


class LifecycleClient:
    """
    The lifecycle services of one node, for a caller that does not spin itself.

    No request is trusted to arrive: a server that has just started may not have discovered its client yet, and then the
    response is lost. So every call has a timeout, after which the state decides what to do next. A node may be silent during
    a transition, but announces it by a transition event; one that announces nothing has not received the request.
    """

    def __init__(self, node: Node, target: str) -> None:
        self._target = target
        self._context = node.context
        self._events = 0        # transition events so far
        self._changing = False  # the last event announced the start of a transition
        # Before the clients: DDS announces endpoints in this order, so a node that has answered knows the subscription too.
        node.create_subscription(TransitionEvent, f'{target}/transition_event', self._on_event, 10)
        self._executor = SingleThreadedExecutor(context=node.context)
        self._executor.add_node(node)
        self._get_state = node.create_client(GetState, f'{target}/get_state')
        self._change_state = node.create_client(ChangeState, f'{target}/change_state')

    def state(self, timeout: float = _QUERY_TIMEOUT) -> str | None:
        """Return the label of the node's state; None if it does not answer within ``timeout`` seconds."""
        response = self._call(self._get_state, GetState.Request(), timeout)
        return response.current_state.label if response is not None else None

    def bring_to(self, goal: str, timeout: float) -> None:
        """
        Make the transitions from the current state to ``goal``, one of GOALS.

        :raises LifecycleError: if a transition fails, none leads there, ``timeout`` seconds have passed, the node ignores
            requests for two minutes, or the node's context is shut down meanwhile.
        """
        began = told = time.monotonic()
        state = None
        step: tuple[str, Future] | None = None  # state from which a transition was requested, and the pending response
        ignored: float | None = None  # since when requests have been ignored
        events = self._events
        while (left := began + timeout - time.monotonic()) > 0:
            if not self._context.ok():
                raise LifecycleError(f'shut down before {self._target} was {goal}')
            answer = self.state(min(_QUERY_TIMEOUT, left))
            state = answer or state
            if state == goal:
                return
            # Silence may mean that the last transition is still in progress, and a second request for it would raise in an
            # rclpy node: never act on a remembered state.
            if answer in GOALS:
                if step is not None:
                    self._conclude(*step, goal, _LATE_ANSWER)
                ignored = ignored or time.monotonic()
                step = self._begin(answer, goal, left)
                if step is not None:
                    self._conclude(*step, goal, min(_CHANGE_TIMEOUT, left))
            else:
                time.sleep(_PAUSE)
            if self._events != events or self._changing or (step is not None and step[1].done()):
                events, ignored = self._events, None
            elif ignored is not None and time.monotonic() - ignored > _IGNORED:
                raise LifecycleError(f'{self._target} was asked to become {goal} and has taken no notice for {_IGNORED:.0f} s '
                                     f'(last known state: {state}): its requests are lost, or it hangs; restart it')
            if time.monotonic() - told >= _PROGRESS:
                told = time.monotonic()
                print(f'{self._target} is not {goal} yet after {told - began:.0f} s (last known state: '
                      f'{state or "none"}); waiting for up to {timeout:.0f} s', file=sys.stderr, flush=True)
        raise LifecycleError(f"{self._target} is {state or 'silent'} after {timeout:.0f} s and was to be "
                             f'{goal}: see its log, or allow more time')

    def _on_event(self, event: TransitionEvent) -> None:
        self._events += 1
        self._changing = event.goal_state.label not in GOALS

    def _begin(self, state: str, goal: str, timeout: float) -> tuple[str, Future] | None:
        """Request the next transition from ``state``; return None if the service is not there."""
        transition = _NEXT[goal].get(state)
        if transition is None:
            raise LifecycleError(
                f'{self._target} is {state}, from where no transition leads to {goal}: restart it')
        if not self._change_state.wait_for_service(min(_CHANGE_TIMEOUT, timeout)):
            return None
        request = ChangeState.Request()
        request.transition.id = transition
        return state, self._change_state.call_async(request)

    def _conclude(self, state: str, future: Future, goal: str, timeout: float) -> None:
        """Wait for the response to a transition request, which may be lost; raise LifecycleError if the transition failed."""
        self._wait(future, timeout)
        # Another manager may have made the same transition in between, which is no error.
        if future.done() and not future.result().success and self.state() in (state, None):
            raise LifecycleError(f'{self._target} refused or failed the transition from {state} towards '
                                 f'{goal}: its log says why')

    def _wait(self, future: Future, timeout: float) -> None:
        """Wait for a response or for shutdown of the context, which is polled because a wait may miss the wake-up."""
        end = time.monotonic() + timeout
        while not future.done() and self._context.ok() and (left := end - time.monotonic()) > 0.0:
            self._executor.spin_until_future_complete(future, min(_LOOK, left))

    def _call(self, client: Client, request: object, timeout: float) -> object | None:
        deadline = time.monotonic() + timeout
        if not client.wait_for_service(timeout):
            return None
        future = client.call_async(request)
        self._wait(future, deadline - time.monotonic())
        if not future.done():
            client.remove_pending_request(future)
            return None
        return future.result()


def main(args: list[str] | None = None) -> int:
    """
    Run the command line; return 0 when the node is in the wanted state, else 1.

    After SIGINT it returns 130, or 0 with ``--zero-when-interrupted``.
    """
    parser = argparse.ArgumentParser(prog='lifecycle_client', description=__doc__)
    parser.add_argument('node', help='full name, such as /robot1/world_model_node')
    parser.add_argument('goal', choices=GOALS)
    parser.add_argument('--timeout', type=float, default=60.0, help='seconds (default: %(default)s)')
    parser.add_argument('--enclave', help='of DDS security (default: /)')
    parser.add_argument(ZERO_WHEN_INTERRUPTED, action='store_true',
                        help='end with 0 after SIGINT, not 130: for launch, which takes any other code for a crash')
    options = parser.parse_args(args)
    target = '/' + options.node.lstrip('/')
    started = interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    # rclpy's own handler shuts the context down, which ends every wait at once. An exception could come anywhere, and rclpy
    # does not clean up after one during its initialisation.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, interrupt)
    try:
        rclpy.init(args=['--ros-args', '--enclave', options.enclave] if options.enclave else [],
                   signal_handler_options=SignalHandlerOptions.SIGINT)
        # In the node's namespace, as all of a robot's policy for DDS security is.
        client = LifecycleClient(
            Node('lifecycle_client', namespace=target.rpartition('/')[0], start_parameter_services=False,
                 enable_rosout=False), target)
        started = True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        client.bring_to(options.goal, options.timeout)
        return 0
    except Exception as error:
        # rclpy's thread may shut the context down, and a wait raise for that, before Python calls the handler above.
        if interrupted or (started and not rclpy.ok()):
            return _interrupted_code()
        if not isinstance(error, LifecycleError):
            raise
        print(error, file=sys.stderr)
        return 1
    finally:
        rclpy.try_shutdown()
        # A terminal and a launcher both send SIGINT; the second may come while the interpreter shuts down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == '__main__':
    sys.exit(main())
