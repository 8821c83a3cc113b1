"""The supervisor, on real processes: start, kill, respawn, restart, lifecycle, exit codes."""
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from worldmodel_ros.bringup import process
from worldmodel_ros.bringup.description import NodeDescription
from worldmodel_ros.bringup.environment import DOMAIN_IDS, free_domain_id, network, node_environment
from worldmodel_ros.bringup.shared_memory import owned_segments, remove_segments
from worldmodel_ros.bringup.supervisor import Supervisor
from worldmodel_ros.paths import NotInstalledError, find_executable

PACKAGE = 'small_package'
TIMEOUT = 30.0  # s; a process needs one, the rest is for a busy machine

PLAIN = """
    import sys
    from rclpy.node import Node
    from worldmodel_ros.nodes.common.spin import run

    def build():
        node = Node('plain')
        node.declare_parameter('greeting', 'none')
        print('greeting', node.get_parameter('greeting').value, 'from', node.get_fully_qualified_name())
        return node

    sys.exit(run(build))
"""
MANAGED = """
    import sys
    from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
    from worldmodel_ros.nodes.common.spin import run

    class Managed(LifecycleNode):
        def on_configure(self, state):
            self.get_logger().info('configuring')
            return TransitionCallbackReturn.SUCCESS

    sys.exit(run(lambda: Managed('managed')))
"""
DEAF = """
    import signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print('deaf', flush=True)
    time.sleep(600)
"""
SLOW = """
    import signal, time
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    print('slow', flush=True)
    signal.sigwait([signal.SIGINT])
    time.sleep(1.0)
    print('done at', time.monotonic())
"""
REFUSING = """
    import sys
    from worldmodel_ros.exit_codes import BAD_CONFIGURATION
    print('no such model', flush=True)
    sys.exit(BAD_CONFIGURATION)
"""
CRASHING = """
    import sys
    print('the reason of the crash')
    sys.exit(3)
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """Install the small package in a prefix of its own, searched before the one with ROS."""
    directory = tmp_path / 'prefix' / 'lib' / PACKAGE
    directory.mkdir(parents=True)
    for name, code in (('plain', PLAIN), ('managed', MANAGED), ('deaf', DEAF), ('slow', SLOW), ('crashing', CRASHING),
                       ('refusing', REFUSING), ('failing', MANAGED.replace('SUCCESS', 'FAILURE'))):
        (directory / name).write_text(textwrap.dedent(code))
    inherited = os.environ.get('AMENT_PREFIX_PATH') or sys.prefix
    monkeypatch.setenv('AMENT_PREFIX_PATH', f"{tmp_path / 'prefix'}{os.pathsep}{inherited}")


@pytest.fixture
def supervisor(tmp_path):
    with Supervisor({}, tmp_path / 'log', grace=10.0) as supervisor:
        yield supervisor


def node(executable, **options):
    return NodeDescription(executable, PACKAGE, executable, **options)


def wait_for(condition, timeout=TIMEOUT):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, 'timed out'
        time.sleep(0.02)


def logged(process, text):
    return lambda: process.log_file.is_file() and text in process.log_file.read_text()


def test_nodes_run_with_their_names_and_parameters_and_end_with_code_0(supervisor):
    supervisor.add([node('plain', parameters={'greeting': 'hello'})], namespace='robot1')
    supervisor.add([node('plain')], namespace='robot2')
    supervisor.start()
    one, two = supervisor.processes['/robot1/plain'], supervisor.processes['/robot2/plain']
    wait_for(logged(one, 'greeting hello from /robot1/plain'))
    wait_for(logged(two, 'greeting none from /robot2/plain'))
    supervisor.stop()
    assert one.exit_codes == two.exit_codes == [0]
    assert one.pid is None and two.pid is None


def test_a_shared_process_runs_once_for_all_robots_with_its_parameters_as_options(supervisor, tmp_path):
    (tmp_path / 'prefix' / 'lib' / PACKAGE / 'engine').write_text('import sys, time\nprint(sys.argv[1:], flush=True)\n'
                                                                  'time.sleep(600)\n')
    nodes = [node('engine', shared=True, parameters={'socket': 'auto'}), node('deaf')]
    for robot in ('robot1', 'robot2'):
        supervisor.add(nodes, robot)
    assert list(supervisor.processes) == ['/engine', '/robot1/deaf', '/robot2/deaf']
    supervisor.processes['/engine'].start()
    wait_for(logged(supervisor.processes['/engine'], "['--socket=auto']"))


def test_a_killed_node_comes_back_where_it_is_to_and_its_segments_are_removed(supervisor):
    supervisor.add([node('plain', respawn=True, respawn_delay=0.1)])
    supervisor.start()
    process = supervisor.processes['/plain']
    wait_for(logged(process, 'greeting'))
    wait_for(lambda: owned_segments(process.pid))
    first, segments = process.pid, owned_segments(process.pid)
    supervisor.kill('/plain')
    assert not any(lock.exists() for lock in segments)
    assert not any(lock.with_name(lock.name.removesuffix('_el')).exists() for lock in segments)
    wait_for(lambda: process.pid not in (None, first))
    assert process.exit_codes == [-signal.SIGKILL]


def test_a_node_comes_back_though_its_log_folder_is_gone_and_the_system_has_no_process_left_at_first(
        supervisor, monkeypatch, caplog):
    supervisor.add([node('deaf', respawn=True)])
    supervisor.start()
    deaf = supervisor.processes['/deaf']
    wait_for(logged(deaf, 'deaf'))
    failing = [BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')] * 2
    popen = process.subprocess.Popen

    def start(*arguments, **options):
        if failing:
            raise failing.pop()
        return popen(*arguments, **options)
    monkeypatch.setattr(process.subprocess, 'Popen', start)
    monkeypatch.setattr(process, '_AGAIN', 0.1)
    shutil.rmtree(deaf.log_file.parent)
    supervisor.kill('/deaf')
    wait_for(logged(deaf, 'deaf'))
    wait_for(lambda: deaf.pid and not supervisor.failures())
    assert caplog.text.count('/deaf cannot be started: [Errno 11]') == 2
    supervisor.kill('/deaf')


def test_a_node_that_the_system_cannot_start_is_reported(supervisor, monkeypatch):
    def start(*arguments, **options):
        raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')
    supervisor.add([node('plain')])
    monkeypatch.setattr(process.subprocess, 'Popen', start)
    supervisor.start()
    with pytest.raises(RuntimeError, match='/plain: cannot be started: .*Resource temporarily unavailable'):
        supervisor.wait_ready(TIMEOUT)


def test_a_node_that_is_not_to_respawn_stays_away(supervisor):
    supervisor.add([node('crashing')])
    supervisor.start()
    process = supervisor.processes['/crashing']
    wait_for(lambda: process.exit_codes)
    with pytest.raises(RuntimeError, match='(?s)/crashing: ended with exit code 3.*the reason of the crash'):
        wait_for(lambda: supervisor.wait_ready(0.1))
    assert process.exit_codes == [3]


def test_a_process_that_refuses_its_configuration_is_reported_and_not_started_again(supervisor, caplog):
    supervisor.add([node('refusing', respawn=True), node('crashing', respawn=True, respawn_delay=0.1)])
    supervisor.start()
    refusing, crashing = supervisor.processes.values()
    wait_for(lambda: len(crashing.exit_codes) >= 3 and refusing.failure)
    assert refusing.exit_codes == [2]
    assert supervisor.failures() == {'/refusing': 'refuses its configuration'}
    text, = (record.getMessage() for record in caplog.records if '/refusing' in record.getMessage())
    assert 'not started again' in text and 'no such model' in text


def test_waiting_for_a_node_that_takes_long_is_told_of(supervisor, monkeypatch):
    monkeypatch.setattr(process, '_PROGRESS_PERIOD', 0.05)
    supervisor.add([node('managed', lifecycle=True)])
    supervisor.start()
    told = []
    supervisor.wait_ready(TIMEOUT, told.append)
    assert '/managed is not active yet after' in told[0] and 'managed.log' in told[0]


def test_a_lifecycle_node_has_the_time_to_become_active_that_it_is_given(tmp_path):
    with Supervisor({}, tmp_path / 'log', activation_timeout=0.5) as supervisor:
        supervisor.add([node('deaf', lifecycle=True)])
        supervisor.start()
        with pytest.raises(RuntimeError, match='(?s)could not be brought to active.*silent after 0 s'):
            supervisor.wait_ready(TIMEOUT)
        supervisor.kill('/deaf')


def test_restart_ends_a_node_in_good_order_and_starts_it_again(supervisor):
    supervisor.add([node('plain')])
    supervisor.start()
    process = supervisor.processes['/plain']
    wait_for(logged(process, 'greeting'))
    first = process.pid
    supervisor.restart('plain')
    assert process.pid not in (None, first)
    assert process.exit_codes == [0]


def test_a_lifecycle_node_is_active_after_start_and_after_a_crash(supervisor):
    supervisor.add([node('managed', lifecycle=True, respawn=True)])
    supervisor.start()
    supervisor.wait_ready(TIMEOUT)
    process = supervisor.processes['/managed']
    assert process.log_file.read_text().count('configuring') == 1
    supervisor.kill('/managed')
    wait_for(lambda: process.exit_codes)
    supervisor.wait_ready(TIMEOUT)
    assert process.log_file.read_text().count('configuring') == 2


def test_a_lifecycle_node_that_fails_to_configure_is_reported_with_its_log(supervisor):
    supervisor.add([node('failing', lifecycle=True)])
    supervisor.start()
    with pytest.raises(RuntimeError, match='(?s)/failing: could not be brought to active.*refused or failed'):
        supervisor.wait_ready(TIMEOUT)


def test_a_node_without_a_handler_is_interrupted_though_a_shell_in_the_background_ignores_it(supervisor, tmp_path):
    (tmp_path / 'prefix' / 'lib' / PACKAGE / 'plain').write_text('import time\nprint("up", flush=True)\ntime.sleep(600)\n')
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        supervisor.add([node('plain')])
        supervisor.start()
        process = supervisor.processes['/plain']
        wait_for(logged(process, 'up'))
        supervisor.stop()
        assert process.exit_codes == [-signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_node_that_is_being_spawned_at_ctrl_c_is_interrupted(supervisor, monkeypatch):
    popen, spawning, go_on = process.subprocess.Popen, threading.Event(), threading.Event()

    def start(*arguments, **options):
        spawning.set()
        assert go_on.wait(TIMEOUT)
        return popen(*arguments, **options)
    supervisor.add([node('plain')])
    plain = supervisor.processes['/plain']
    process.signal_prefix('--default-signal=INT')  # is kept: from here on only the node is started
    monkeypatch.setattr(process.subprocess, 'Popen', start)
    ctrl_c = threading.Timer(0.0, lambda: spawning.wait() and os.kill(os.getpid(), signal.SIGINT))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        supervisor.start()
    began = time.monotonic()
    stopping = threading.Thread(target=supervisor.stop)
    stopping.start()
    wait_for(plain._stopping.is_set)
    go_on.set()
    stopping.join()
    assert plain.exit_codes in ([0], [-signal.SIGINT]) and time.monotonic() - began < 10.0  # the grace time of ``supervisor``


def test_a_node_that_ignores_the_interrupt_is_killed_after_the_grace_time(tmp_path):
    with Supervisor({}, tmp_path / 'log', grace=0.2) as supervisor:
        supervisor.add([node('deaf')])
        supervisor.start()
        process = supervisor.processes['/deaf']
        wait_for(logged(process, 'deaf'))
    assert process.exit_codes == [-signal.SIGKILL]


def test_a_node_with_a_grace_time_of_its_own_has_it_and_the_others_do_not_wait_for_it(tmp_path):
    with Supervisor({}, tmp_path / 'log', grace=0.2) as supervisor:
        supervisor.add([node('deaf'), node('slow', grace=TIMEOUT)])
        supervisor.start()
        deaf, slow = supervisor.processes.values()
        wait_for(logged(deaf, 'deaf'))
        wait_for(logged(slow, 'slow'))
        stopping = threading.Thread(target=supervisor.stop)
        stopping.start()
        wait_for(lambda: deaf.exit_codes)
        ended = time.monotonic()
        stopping.join()
    assert slow.exit_codes == [0] and deaf.exit_codes == [-signal.SIGKILL]
    assert ended < float(slow.log_file.read_text().split()[-1])


def test_nodes_end_with_a_supervisor_that_is_killed(tmp_path):
    code = f"""if True:
        import sys, time
        from worldmodel_ros.bringup.description import NodeDescription
        from worldmodel_ros.bringup.supervisor import Supervisor
        supervisor = Supervisor({{}}, {str(tmp_path / 'log')!r})
        supervisor.add([NodeDescription('plain', {PACKAGE!r}, 'plain')])
        supervisor.start()
        print(supervisor.processes['/plain'].pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) as supervisor:
        pid = int(supervisor.stdout.readline())
        wait_for(lambda: (tmp_path / 'log' / 'plain.log').is_file()
                 and 'greeting' in (tmp_path / 'log' / 'plain.log').read_text())
        supervisor.kill()
    wait_for(lambda: not os.path.exists(f'/proc/{pid}'))


def test_names_and_executables_that_do_not_exist_are_refused(supervisor):
    supervisor.add([node('plain')])
    with pytest.raises(ValueError, match='/plain is there already'):
        supervisor.add([node('plain')])
    with pytest.raises(ValueError, match="no node '/plane' here: there are /plain"):
        supervisor.kill('/plane')
    with pytest.raises(NotInstalledError, match="executable 'none' of package .* is in none of .*install"):
        supervisor.add([node('none')])


def test_the_package_s_own_executables_are_installed():
    for name in ('sim_robot', 'command_gate', 'world_model_node'):
        assert os.access(find_executable('worldmodel_ros', name), os.X_OK)


def test_the_environment_completes_but_never_overrules_the_user_s(monkeypatch):
    monkeypatch.setenv('ROS_HOME', '/users/own')
    monkeypatch.delenv('ROS_LOG_DIR')
    monkeypatch.setenv('ROS_DOMAIN_ID', '7')
    monkeypatch.delenv('AMENT_PREFIX_PATH')
    monkeypatch.delenv('ROS_AUTOMATIC_DISCOVERY_RANGE', raising=False)
    environment = node_environment({'PROFILES': 'ours.xml'}, 42, '/ours', this_machine_only=True)
    assert environment['ROS_HOME'] == '/users/own' and 'ROS_LOG_DIR' not in environment
    assert environment['ROS_DOMAIN_ID'] == '42'
    assert environment['AMENT_PREFIX_PATH'] == sys.prefix
    assert environment['ROS_AUTOMATIC_DISCOVERY_RANGE'] == 'LOCALHOST'
    assert environment['PROFILES'] == 'ours.xml'


def test_logs_are_kept_here_and_saved_sessions_where_they_are_without_a_supervisor(monkeypatch):
    monkeypatch.delenv('ROS_HOME')
    monkeypatch.delenv('ROS_LOG_DIR')
    environment = node_environment({}, 42, '/ours', this_machine_only=True)
    assert environment['ROS_LOG_DIR'] == '/ours' and 'ROS_HOME' not in environment


def test_a_real_robot_stays_in_the_network_that_the_user_has_chosen(monkeypatch):
    name = 'ROS_AUTOMATIC_DISCOVERY_RANGE'
    for own in (None, 'SYSTEM_DEFAULT'):
        monkeypatch.delenv(name, raising=False)
        if own:
            monkeypatch.setenv(name, own)
        environment = node_environment({}, 42, '/ours', this_machine_only=False)
        assert environment.get(name) == own
        assert network(environment) == f'ROS_DOMAIN_ID=42, {name}={own or "SUBNET, as ROS does by default"}'
    assert node_environment({}, 42, '/ours', this_machine_only=True)[name] == 'SYSTEM_DEFAULT'


def test_a_domain_where_somebody_listens_is_not_free(supervisor):
    supervisor.add([node('plain')])
    supervisor.start()
    wait_for(logged(supervisor.processes['/plain'], 'greeting'))
    found = {free_domain_id() for _ in range(3 * len(DOMAIN_IDS))}
    assert supervisor.domain_id not in found
    assert found <= set(DOMAIN_IDS) and len(found) > len(DOMAIN_IDS) / 2


def test_segments_in_use_are_left_alone(supervisor):
    supervisor.add([node('plain')])
    supervisor.start()
    process = supervisor.processes['/plain']
    wait_for(lambda: process.pid and owned_segments(process.pid))
    segments = owned_segments(process.pid)
    assert remove_segments(segments) == 0
    assert all(lock.exists() for lock in segments)
