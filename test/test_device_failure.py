"""A GPU that is lost to a process: it ends with a code of its own and is started again; out of memory does not end it."""
import os
import subprocess
import sys
import time

import pytest
import rclpy
import torch
from fake_service import wait_for_socket
from rcl_interfaces.srv import SetParametersAtomically
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from small_model import SMALL, small_checkpoint

from worldmodel_ros.bringup.description import NodeDescription
from worldmodel_ros.bringup.supervisor import Supervisor
from worldmodel_ros.engine.device_failure import RankFailure, is_lost
from worldmodel_ros.exit_codes import DEVICE_LOST
from worldmodel_ros.serving.client.link import Unavailable, open_link
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.connection import ConnectionLost

LOST = 'CUDA error: an illegal memory access was encountered'
TIMEOUT = 120.0  # s, for a model to load on a busy machine


class AcceleratorError(RuntimeError):
    """As torch.AcceleratorError, which cannot be made by hand."""

    def __init__(self, text, code):
        super().__init__(text)
        self.error_code = code


def caused_by(error, outer):
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize('error', [
    RuntimeError(LOST), RuntimeError('CUDA error: device-side assert triggered\nCUDA kernel errors might be ...'),
    RuntimeError('CUDA error: unspecified launch failure'), AcceleratorError('CUDA error: anything', 710),
    caused_by(AcceleratorError('CUDA error: anything', 700), ValueError('it could not be decoded')),
    caused_by(RuntimeError(LOST), RankFailure('a pass failed'))], ids=repr)
def test_an_error_after_which_every_call_fails_is_known(error):
    assert is_lost(error)


@pytest.mark.parametrize('error', [
    torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB'),
    AcceleratorError('CUDA error: out of memory', 2),
    RuntimeError('CUDA error: invalid argument'),
    RuntimeError('shape mismatch'), ValueError(LOST), RankFailure(f'rank 1 of the model failed: {LOST}')], ids=repr)
def test_an_error_of_one_call_is_not_taken_for_that(error):
    assert not is_lost(error)


@pytest.fixture
def settings():
    """Set parameters of a node, by its service."""
    context = rclpy.Context()
    rclpy.init(args=[], context=context)
    node = Node('setting', context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)

    def set_parameters(name, **values):
        client = node.create_client(SetParametersAtomically, f'{name}/set_parameters_atomically')
        assert client.wait_for_service(TIMEOUT)
        future = client.call_async(SetParametersAtomically.Request(
            parameters=[Parameter(key, value=value).to_parameter_msg() for key, value in values.items()]))
        executor.spin_until_future_complete(future, 20.0)
        node.destroy_client(client)
        return future.result().result

    yield set_parameters
    executor.shutdown()
    node.destroy_node()
    rclpy.try_shutdown(context=context)


def system(directory, **parameters):
    nodes = [NodeDescription('sim_robot', 'worldmodel_ros', 'sim_robot'),
             NodeDescription('world_model_node', 'worldmodel_ros', 'world_model_node', lifecycle=True, respawn=True,
                             respawn_delay=0.2, parameters=parameters)]
    supervisor = Supervisor({}, directory, int(os.environ['ROS_DOMAIN_ID']))
    supervisor.add(nodes)
    return supervisor


def test_a_node_whose_gpu_is_lost_ends_and_comes_back_and_one_that_is_out_of_memory_goes_on(tmp_path, settings):
    with system(tmp_path, allow_faults=True) as supervisor:
        supervisor.start()
        supervisor.wait_ready(TIMEOUT)
        node = supervisor.processes['/world_model_node']
        assert settings('/world_model_node', fault_cuda_error='out of memory').successful
        deadline = time.monotonic() + TIMEOUT
        while 'CUDA error: out of memory' not in node.log_file.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.0)  # ten more of them
        assert node.exit_codes == []
        assert settings('/world_model_node', fault_cuda_error='an illegal memory access was encountered').successful
        while not node.exit_codes:
            assert time.monotonic() < deadline, node.log_file.read_text()
            time.sleep(0.05)
        assert node.exit_codes == [DEVICE_LOST]
        log = node.log_file.read_text()
        assert LOST in log and f'it ends with exit code {DEVICE_LOST}, to be started again' in log
        time.sleep(0.5)
        node.wait_ready(TIMEOUT)  # of the next run, which has no fault
        assert node.exit_codes == [DEVICE_LOST]


def test_without_allow_faults_nobody_on_the_network_can_break_a_node(tmp_path, settings):
    with system(tmp_path) as supervisor:
        supervisor.start()
        supervisor.wait_ready(TIMEOUT)
        for node, name, reason in (('/world_model_node', 'fault_raise', 'undeclared'),
                                   ('/sim_robot', 'camera_stop', 'undeclared'),
                                   ('/world_model_node', 'allow_faults', 'read-only')):
            result = settings(node, **{name: True})
            assert not result.successful and reason in result.reason, result


def test_a_fault_that_is_given_where_none_is_allowed_is_refused_at_the_start():
    done = subprocess.run([sys.executable, '-c', 'import sys; from worldmodel_ros.nodes.world_model.node import main; '
                           'sys.exit(main())', '--ros-args', '-p', 'fault_nan:=true'], capture_output=True, text=True,
                          timeout=TIMEOUT)
    assert done.returncode == 2
    assert 'fault_nan is given, and faults are not allowed' in done.stderr and 'allow_faults:=true' in done.stderr


@pytest.mark.parametrize('error, code', [(LOST, DEVICE_LOST), ('CUDA error: out of memory', 0)])
def test_a_server_whose_gpu_is_lost_ends_and_one_that_is_out_of_memory_goes_on(tmp_path, error, code):
    path = tmp_path / 'engine.sock'
    program = f"""if True:
        import sys
        from worldmodel_ros.engine.backends.torch import TorchBackend
        from worldmodel_ros.serving.server.server import Server
        run, serve, frames = TorchBackend.run, Server.run, []

        def breaking(self, network, batch):
            if network == 'encode' and frames:
                frames.append(network)
                if len(frames) == 4:  # the third one that is served
                    raise RuntimeError({error!r})
            return run(self, network, batch)

        def run_server(self, **until):
            frames.append('begun')  # the calibration is over
            serve(self, **until)

        TorchBackend.run, Server.run = breaking, run_server
        from worldmodel_ros.cli.serve import main
        sys.exit(main())
    """
    arguments = ('--model', str(small_checkpoint(tmp_path)), '--backend', 'torch', '--realtime-priority', '0',
                 '--socket', str(path))
    with subprocess.Popen([sys.executable, '-c', program, *arguments], stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_for_socket(server, path, TIMEOUT)
            kinds = drive(open_link(path, '/robot', SMALL))
            if code:
                assert server.wait(20.0) == code
                assert f'{error}\nthe device is lost to this process' in server.stderr.read()
                assert kinds[-1] in (None, messages.Failed) and messages.Planned in kinds
            else:
                assert server.poll() is None and kinds.count(messages.Failed) == 1 and kinds[-1] is messages.Planned
        finally:
            server.terminate()
    if code == 0:
        assert server.returncode == 0


def drive(link):
    """Send ten ticks; return the kinds of their answers, None for the end of the connection."""
    kinds = []
    try:
        for number in range(1, 11):
            link.slots.write(0, number, torch.zeros(*SMALL.image_size, 3, dtype=torch.uint8).numpy())
            link.connection.send(messages.Tick(number, 0, number, 1, 'red', time.monotonic() + 5.0, True,
                                               torch.zeros(2).numpy()))
            while not kinds or len(kinds) < number:
                message, descriptor = link.connection.receive(20.0)
                if descriptor is not None:
                    pictures.take(descriptor)
                if not isinstance(message, messages.Imagined):
                    kinds.append(type(message))
    except (ConnectionLost, Unavailable):
        kinds.append(None)
    link.connection.close()
    return kinds
