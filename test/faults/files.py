"""Bits that flip at rest: in weights, in what is made of them once a machine, in a recording."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sensor_msgs.msg import Image

from faults.disk import CHUNK, flip, recording
from faults.matrix import DEGRADED, RECOVERED, REFUSED, Seen, case
from faults.seen import drives_while
from faults.systems import MODEL, ONE_ROBOT, Running
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.bringup.process import activation_command
from worldmodel_ros.paths import cache_folder
from worldmodel_ros.engine.loading import WEIGHTS
from worldmodel_ros.nodes.common.qos import STATUS
from worldmodel_ros.paths import config_directory, find_executable

SHIPPED = 'tiny'
LOADED = 30.0     # s, to start a node beside one that drives, and to read the files
EXPORTED = 180.0  # s, to export the graphs again, with what a robot that drives leaves of two cores
CHUNK_BYTES = 256 * 1024


@contextmanager
def another_model(running: Running, folder: Path, **variables: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Have a second model node in a namespace of its own, and what activates it, with a low priority; yields the latter and the
    log of both."""
    log = running.directory / 'log' / f'another_{time.monotonic_ns()}.log'
    environment = {**running.environment, **variables}
    command = [sys.executable, str(find_executable('worldmodel_ros', MODEL)), '--ros-args', '-r', '__ns:=/another',
               '--params-file', str(config_directory() / 'world_model_node.yaml'), '-p', f"model:='{folder}'",
               '-p', 'realtime_priority:=0']
    with log.open('ab') as out:
        node, client = (subprocess.Popen(['nice', '-n', '19', *each], env=environment, stdout=out, stderr=out)
                        for each in (command, activation_command(f'/another/{MODEL}', EXPORTED)))
    try:
        yield client, log
    finally:
        for process in (client, node):
            process.send_signal(signal.SIGINT)
        for process in (client, node):
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _refuses(running: Running, folder: Path, complaint: str) -> Seen:
    rig = running.rig
    rig.drive()
    start = time.monotonic()
    with another_model(running, folder) as (client, log):
        drives_while(rig, lambda: client.poll() is None, LOADED)
        code, took = client.poll(), time.monotonic() - start
    said = complaint in log.read_text(errors='replace')
    return Seen(REFUSED if code == 1 and said else f'exit code {code}, {complaint!r} {"said" if said else "not said"}', took)


def _copy(running: Running) -> Path:
    target = running.directory / f'model_{time.monotonic_ns()}'
    shutil.copytree(WEIGHTS / SHIPPED, target)
    return target


@case(ONE_ROBOT, REFUSED, 'to the refusal', LOADED)
def weights_bit_flip(running: Running) -> Seen:
    """A bit of a model's weights is flipped; a second model node loads them while the robot drives"""
    folder = _copy(running)
    flip(folder / 'weights-01.safetensors', 0.5)
    return _refuses(running, folder, 'weights-01.safetensors is damaged')


@case(ONE_ROBOT, REFUSED, 'to the refusal', LOADED)
def weights_missing(running: Running) -> Seen:
    """One of a model's two files is not there"""
    folder = _copy(running)
    (folder / 'weights-02.safetensors').unlink()
    return _refuses(running, folder, 'weights-02.safetensors is missing')


@case(ONE_ROBOT, REFUSED, 'to the refusal', LOADED)
def description_cut_short(running: Running) -> Seen:
    """The description of a model lacks its end"""
    folder = _copy(running)
    text = (folder / 'model.json').read_text()
    (folder / 'model.json').write_text(text[:len(text) // 2])
    return _refuses(running, folder, 'model.json does not describe a model')


@case(ONE_ROBOT, RECOVERED, 'to an active node', EXPORTED)
def graph_cache_bit_flip(running: Running) -> Seen:
    """A bit of a graph that was exported for this machine is flipped; a second model node starts with it"""
    rig = running.rig
    cache = running.directory / 'cache'
    for folder in cache_folder().glob(f'{SHIPPED}-int8-*'):
        shutil.copytree(folder, cache / folder.name)
    for file in cache.glob('*/block.onnx'):
        flip(file, 0.5)
    damaged = {file: file.read_bytes() for file in cache.glob('*/block.onnx')}
    assert damaged, f'no exported graphs in {cache_folder()}'
    rig.drive()
    start = time.monotonic()
    with another_model(running, Path(SHIPPED), WORLDMODEL_CACHE=str(cache)) as (client, log):
        drives_while(rig, lambda: client.poll() is None, EXPORTED)
        code, took = client.poll(), time.monotonic() - start
    said = 'is damaged: the graphs are exported again' in log.read_text(errors='replace')
    mended = any(file.read_bytes() != before for file, before in damaged.items())
    return Seen(RECOVERED if code == 0 and said and mended else f'exit code {code}, said: {said}, mended: {mended}', took)


@case(ONE_ROBOT, f'{DEGRADED}the sound part of the bag', 'to its end', LOADED)
def bag_bit_flip(running: Running) -> Seen:
    """A bit in the middle of a recording is flipped; it is played while the robot drives"""
    rig = running.rig
    rig.drive()
    folder = running.directory / f'bag_{time.monotonic_ns()}'
    with recording(running, folder) as recorder:
        rig.watch(2.5 * CHUNK)
        assert recorder.end() == 0
    file, = folder.glob('*.mcap')
    before = _images(folder)
    flip(file, 0.5)
    after = _images(folder)
    heard = []
    subscription = rig.observer.node.create_subscription(Image, '/replay/camera/image_raw', heard.append, STATUS)
    start = time.monotonic()
    log = running.directory / 'log' / 'bag_player.log'
    try:
        with log.open('ab') as out:
            player = subprocess.Popen(
                [sys.executable, str(find_executable('worldmodel_ros', 'bag_player')), '--ros-args', '-r', '__ns:=/replay',
                 '-p', f"bag:='{folder}'", '-p', 'wait_s:=5.0', '-p', 'rate:=1.0'],
                env=running.environment, stdout=out, stderr=out)
        drives_while(rig, lambda: player.poll() is None, LOADED)
        code, took = player.poll(), time.monotonic() - start
    finally:
        player.kill()
        rig.observer.forget(subscription)
    assert code == 0, f'the player ended with {code}'
    # What lies outside the chunk of the flipped bit is played.
    chunk = CHUNK_BYTES / (file.stat().st_size / max(1, before))
    outcome = f'{DEGRADED}the sound part of the bag' if after < before else 'all of the bag'
    lost = max(0, round(before - 2 * chunk - after)) + max(0, after - len(heard) - 2)
    return Seen(outcome, took, lost)


def _images(folder: Path) -> int:
    with open_bag(folder) as bag:
        return sum(1 for _ in bag.messages(['/camera/image_raw']))


