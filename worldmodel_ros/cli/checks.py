"""The checks of ``worldmodel doctor``; each checks one thing and gives the remedy if it fails."""
from __future__ import annotations

import enum
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from worldmodel_ros import dds_security

EXECUTABLES = ('sim_robot', 'world_model_node', 'command_gate')
MODULES = ('numpy', 'torch', 'safetensors', 'onnxruntime', 'cv2', 'mujoco', 'matplotlib', 'PIL', 'yaml',
           'rclpy')
SHARED_MEMORY_NEEDED = 256 * 2 ** 20    # several participants with a segment of 32 MiB each [bytes]
CHILD_TIMEOUT = 60.0                    # [s]
_INSTALL = 'pip install ., or colcon build and source the workspace'

_ROS = """
import time, rclpy
from std_msgs.msg import String
rclpy.init()
node = rclpy.create_node('doctor')
got = []
node.create_subscription(String, 'doctor', got.append, 1)
publisher = node.create_publisher(String, 'doctor', 1)
end = time.monotonic() + 10.0
while not got and time.monotonic() < end:
    publisher.publish(String(data='hello'))
    rclpy.spin_once(node, timeout_sec=0.1)
print(rclpy.get_rmw_implementation_identifier() if got else '')
rclpy.shutdown()
"""
_SECURITY = """
import rclpy
from worldmodel_ros import dds_security
rclpy.get_rmw_implementation_identifier()
library = dds_security.loaded_library()
print('other' if library is None else f'{dds_security.has_security(library)} {library}')
"""
_SIMULATOR = """
import time
from worldmodel_ros.sim.world import World
world = World(0)
world.render()
start = time.monotonic()
picture = world.render()
print(f'{(time.monotonic() - start) * 1e3:.1f}' if picture.std() > 5 else '')
"""


class Level(enum.IntEnum):
    """Severity of a finding."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    level: Level
    text: str
    remedy: str = ''


def environment(logs: str) -> dict[str, str]:
    """Return the environment that the nodes will have on this machine; ROS logs go to the folder ``logs``."""
    from worldmodel_ros.bringup.description import load
    from worldmodel_ros.bringup.environment import free_domain_id, node_environment
    return node_environment(load().environment, free_domain_id(), logs, this_machine_only=True)


def python(_: dict[str, str]) -> Finding:
    """Check the interpreter."""
    version = '.'.join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return Finding(Level.OK, f'Python {version} in {sys.prefix}')
    return Finding(Level.FAIL, f'Python {version}: the ROS 2 wheels are for 3.10 to 3.12',
                   'make setup PYTHON=python3.12')


def packages(_: dict[str, str]) -> Finding:
    """Check that all Python packages are installed."""
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        return Finding(Level.FAIL, f'Python packages are missing: {", ".join(missing)}',
                       'make setup, or pip install .')
    return Finding(Level.OK, f'all Python packages are installed (torch {metadata.version("torch")})')


def interfaces(_: dict[str, str]) -> Finding:
    """Check the generated ROS messages and the executables."""
    from worldmodel_ros.paths import NotInstalledError, find_executable
    if find_spec('worldmodel_ros.msg') is None:
        return Finding(Level.FAIL, 'worldmodel_ros.msg has not been generated', _INSTALL)
    try:
        for name in EXECUTABLES:
            find_executable('worldmodel_ros', name)
    except NotInstalledError as error:
        return Finding(Level.FAIL, str(error), _INSTALL)
    return Finding(Level.OK, 'messages and executables of worldmodel_ros are installed')


def weights(_: dict[str, str]) -> Finding:
    """Check the shipped models."""
    from worldmodel_ros.engine.loading import WEIGHTS
    models = sorted(path.parent for path in WEIGHTS.glob('*/model.json'))
    if not models:
        return Finding(Level.FAIL, f'no model in {WEIGHTS}',
                       'check out the weights, or train a model with "worldmodel train"')
    sizes = [sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()) for folder in models]
    named = (f'{model.name} ({size / 2 ** 20:.1f} MiB)' for model, size in zip(models, sizes))
    return Finding(Level.OK, 'models: ' + ', '.join(named))


def ros(surroundings: dict[str, str]) -> Finding:
    """Check that a message goes over DDS."""
    # Without security: the enclaves are for the nodes, and there is none for this one.
    code, output = _child(_ROS, {**surroundings, 'ROS_SECURITY_ENABLE': 'false'})
    if code == 0 and output:
        return Finding(Level.OK, f'ROS 2 messages are delivered ({output})')
    if code == 0:
        return Finding(Level.FAIL, 'no ROS 2 message was delivered within 10 s',
                       'check ROS_AUTOMATIC_DISCOVERY_RANGE, ROS_STATIC_PEERS and the firewall')
    return Finding(Level.FAIL, f'rclpy does not start: {output}',
                   'make setup, or source the setup.bash of your distribution')


def security(surroundings: dict[str, str]) -> Finding:
    """Check whether DDS security is available, and whether nodes are configured to use it."""
    code, output = _child(_SECURITY, surroundings)
    if code:
        return Finding(Level.FAIL, f'rclpy does not start: {output}',
                       'make setup, or source the setup.bash of your distribution')
    there, _, library = output.partition(' ')
    if dds_security.is_asked_for(surroundings):
        path = Path(library) if library else None
        refused = [reason for name in (*EXECUTABLES, 'operator')  # which activates the world model
                   if (reason := dds_security.refusal(['--enclave', f'/{name}'], surroundings, path))]
        if refused:
            return Finding(Level.FAIL, f'the nodes refuse to start: {refused[0]}', 'docs/security.md')
        return Finding(Level.OK, 'DDS security is enabled, and available for all nodes')
    if there == 'other':
        return Finding(Level.OK, 'nodes do not use DDS security (ROS_SECURITY_ENABLE); whether this middleware, which is not '
                                 'Fast DDS, supports it is unknown')
    if there == 'True':
        return Finding(Level.OK, f'{library} has DDS security; nodes do not use it (ROS_SECURITY_ENABLE)')
    return Finding(Level.OK, f'{library} has no DDS security: anyone on the nodes\' network can listen to them and '
                             'command them. Fast DDS from a ROS 2 distribution has it (docs/security.md)')


def simulator(surroundings: dict[str, str]) -> Finding:
    """Check that the simulator renders an image."""
    backend = surroundings.get('MUJOCO_GL', 'osmesa')
    code, output = _child(_SIMULATOR, surroundings)
    if code == 0 and output:
        return Finding(Level.OK, f'the simulator renders an image in {output} ms (MUJOCO_GL={backend})')
    problem = output or 'the image is empty'
    return Finding(Level.FAIL, f'the simulator cannot render (MUJOCO_GL={backend}): {problem}',
                   'apt-get install libosmesa6, and MUJOCO_GL=osmesa or unset')


def large_images(surroundings: dict[str, str]) -> Finding:
    """Check for the Fast DDS profile, without which larger images get lost."""
    path = surroundings.get('FASTRTPS_DEFAULT_PROFILES_FILE', '')
    if path and Path(path).is_file():
        return Finding(Level.OK, f'Fast DDS profile {path}')
    problem = f'is {path}, which is not a file' if path else 'is not set'
    return Finding(Level.WARN, f'FASTRTPS_DEFAULT_PROFILES_FILE {problem}: images above 512 KB will be lost',
                   'set it to the path of config/fastdds_large_images.xml, for the camera driver too')


def shared_memory(_: dict[str, str]) -> Finding:
    """Check that there is room for Fast DDS's shared-memory segments."""
    directory = Path('/dev/shm')
    if not directory.is_dir():
        return Finding(Level.WARN, 'no /dev/shm: messages go over UDP, which is slower',
                       'mount a tmpfs there')
    free = shutil.disk_usage(directory).free
    text = f'/dev/shm has {free / 2 ** 20:.0f} MiB free'
    if free < SHARED_MEMORY_NEEDED:
        return Finding(Level.WARN, text + ': not enough for the shared-memory segments of all nodes',
                       'docker run --shm-size=1g, or remove /dev/shm/fastrtps_* while no node runs')
    return Finding(Level.OK, text)


def cores(_: dict[str, str]) -> Finding:
    """Check the number of processor cores."""
    count = len(os.sched_getaffinity(0))
    if count < 2:
        return Finding(Level.WARN, f'{count} core: simulator and model will compete for it',
                       'use two cores or more')
    return Finding(Level.OK, f'{count} cores')


def real_time(_: dict[str, str]) -> Finding:
    """Check for permission to use real-time scheduling."""
    needed, limit = _highest_priority(), resource.getrlimit(resource.RLIMIT_RTPRIO)[0]
    if os.geteuid() == 0 or limit == resource.RLIM_INFINITY or limit >= needed:
        return Finding(Level.OK, 'real-time priorities are permitted (parameter realtime_priority)')
    return Finding(
        Level.WARN, f'real-time priorities up to {needed} are not permitted: on a busy machine, more commands will be late and '
                    'rejected',
        f'add "@realtime - rtprio {needed}" to /etc/security/limits.d/realtime.conf, and your user to the group "realtime"')


def camera(image_topic: str, model: str) -> Finding:
    """Compare a running camera with the one that a model was trained with."""
    from worldmodel_ros.engine.loading import model_folder
    from worldmodel_ros.model.checkpoint_description import ModelError, read_description
    try:
        preset = read_description(model_folder(model)).preset
    except ModelError as error:
        return Finding(Level.FAIL, str(error), 'give the name of a shipped model, or the folder of a trained one, with --model')
    from rclpy.exceptions import InvalidTopicNameException
    from rclpy.validate_topic_name import validate_topic_name

    from worldmodel_ros.nodes.world_model.camera import look
    try:
        validate_topic_name(image_topic)
    except InvalidTopicNameException as error:
        return Finding(Level.FAIL, f'{image_topic!r} is no topic: {str(error).splitlines()[0]}',
                       'give the topic of the images with --camera; "ros2 topic list" shows those that exist')
    looked = look(image_topic, preset)
    text = f'camera {image_topic}: {looked.correction}'
    if looked.refused:
        return Finding(Level.FAIL, text)
    if not looked.heard:
        return Finding(Level.WARN, f'{text} (listened to {looked.info_topic})', 'calibrate the camera (camera_calibration), '
                       'and have its driver publish camera_info')
    if looked.mount is None:
        return Finding(Level.OK, f'{text}; where it stands is not known',
                       'set camera_height_m and camera_pitch_deg, or publish tf')
    text += f'; mounted {looked.mount.height:.2f} m high, pitched {looked.mount.pitch:.1f} degrees down'
    return Finding(Level.WARN, f'{text}: {looked.differences}') if looked.differences else Finding(Level.OK, text)


def _highest_priority() -> int:
    """Return the highest real-time priority that a node requests by its shipped parameter files."""
    import yaml

    from worldmodel_ros.bringup.description import load
    files = [yaml.safe_load(path.read_text()) for node in load().nodes for path in node.parameter_files]
    return max(node['ros__parameters'].get('realtime_priority', 0) for file in files for node in file.values())


def _child(program: str, surroundings: dict[str, str]) -> tuple[int, str]:
    """Return exit code and last line of a program, run in a separate process because what it loads may crash."""
    try:
        done = subprocess.run([sys.executable, '-c', program], env=surroundings, capture_output=True,
                              text=True, timeout=CHILD_TIMEOUT)
    except subprocess.TimeoutExpired:
        return 1, f'it did not finish within {CHILD_TIMEOUT:.0f} s'
    output = done.stdout if done.returncode == 0 else done.stderr or f'exit code {done.returncode}'
    lines = output.strip().splitlines()
    return done.returncode, lines[-1] if lines else ''


QUICK: tuple[Callable[[dict[str, str]], Finding], ...] = (
    python, packages, interfaces, weights, large_images, shared_memory, cores, real_time)
ALL = (*QUICK, ros, security, simulator)
