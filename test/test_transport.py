"""The transport between a robot's node and the engine's server: nothing torn, nothing hostile, nothing left behind."""
import dataclasses
import gc
import os
import resource
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel_ros.serving.transport import codec, memory, messages, pictures
from worldmodel_ros.serving.transport.address import AddressError, ListeningSocket, connect, socket_path
from worldmodel_ros.serving.transport.codec import MAX_MESSAGE, MessageError, VersionMismatch, pack, unpack
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from worldmodel_ros.serving.transport.frames import SLOTS, FrameSlots, make_memory

TICK = messages.Tick(7, 3, 123_456_789, 2 ** 63, 'red', 12.5, True, np.float32([0.4, -1.0]), np.ones((2, 2), np.float32),
                     plan=np.full((4, 2), 0.25, np.float32))
QUESTION = messages.Question(9, 'blue', 1.5, 0, (
    messages.Branch('left', 3, np.float32([[0.3, 1.0]] * 3)), messages.Branch('policy', 8, np.zeros((0, 0)))), 2)
EXAMPLES = [
    messages.Hello('/robot1/world_model_node'), TICK, QUESTION, messages.SessionFile(1, True, 'größe.safetensors'),
    messages.StatusRequest(), messages.Welcome('tiny', 'onnx-int8', '{}', SLOTS), messages.Rejected('full'),
    messages.Planned(7, 1, 1.0, 2.0, '', np.ones((4, 2)), 0.25), messages.Refused(7, 1.0, 'no time'),
    messages.Failed(7, 'NaN'), messages.Imagined(7, 1, np.ones((4, 2)), np.ones(4), np.ones(4), np.ones(8)),
    messages.ImaginedBranch(9, 'left', np.ones((3, 2)), np.ones(3), np.ones(4)), messages.Answered(9, 5, True, ''),
    messages.Done(1, ''), messages.Status('{}'), messages.Goodbye(), messages.Note('{}'), messages.WorldHello('s', 1.0),
    messages.Walk(3, 'e', np.linspace(0, 1, 32).reshape(2, 4, 4), np.ones((2, 4)) / 3, 'n'), messages.Forget(4),
    messages.WorldWelcome(True, 'n', '{}'), messages.Walked(3, 9, 8, 0.1, 0.2, 0.3, True, 'session', 'no world')]
OWN, OTHER = os.getuid(), os.getuid() + 1


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return one == other


@pytest.fixture
def pair():
    """Two connections to each other."""
    ends = [Connection(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield ends
    for end in ends:
        end.close()


def open_files():
    return set(os.listdir('/proc/self/fd'))


# --- messages ---

@pytest.mark.parametrize('message', EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message):
    assert same(unpack(pack(message)), message)


@pytest.mark.parametrize('message', EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_that_is_cut_short_anywhere_is_refused(message):
    data = pack(message)
    for end in range(len(data)):
        with pytest.raises(MessageError, match='truncated'):
            unpack(data[:end])
    with pytest.raises(MessageError, match='1 bytes too many'):
        unpack(data + b'\0')


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(EXAMPLES), st.data())
def test_no_bytes_do_more_than_be_refused(noise, message, data):
    good = pack(message)
    place = data.draw(st.integers(0, len(good)))
    for hostile in (noise, good[:8] + noise, good[:place] + noise + good[place + len(noise):]):
        try:
            unpack(hostile)
        except MessageError:
            pass


def test_sizes_that_lie_are_refused_before_memory_is_taken_for_them():
    header = pack(messages.Failed(1, ''))[:16]
    with pytest.raises(MessageError, match='truncated'):
        unpack(header + struct.pack('<I', 2 ** 32 - 1))  # a text of 4 GB
    planned = pack(messages.Planned(1, 1, 0.0, 0.0, '', np.zeros((1, 1))))[:-16]  # up to the plan
    for shape in ((2 ** 31, 2 ** 31), (2 ** 32 - 1, 2 ** 32 - 1)):  # whose product is zero in 64 bits, or nearly
        with pytest.raises(MessageError, match='truncated'):
            unpack(planned[:-12] + struct.pack('<2I', *shape))
    with pytest.raises(MessageError, match='dimensions'):
        unpack(planned[:-13] + b'\xff')
    # No values at all, and yet a shape that numpy refuses.
    with pytest.raises(MessageError, match='no size can be above'):
        unpack(planned[:-13] + b'\x03' + struct.pack('<3I', 0, 2 ** 32 - 1, 2 ** 32 - 1))


def test_a_field_with_a_default_may_be_left_out():
    left_out = unpack(pack(messages.Tick(7, 3, 5, 1, 'red', 12.5, True, np.zeros(2))))
    assert left_out.prefix.shape == (0, 0) and unpack(pack(messages.Planned(7, 1, 1.0, 2.0, '', np.ones((4, 2))))).queue == 0.0


def test_another_version_is_told_from_nonsense():
    data = bytearray(pack(messages.StatusRequest()))
    data[4] += 1
    with pytest.raises(VersionMismatch, match=f'version {codec.VERSION + 1} of the protocol, this one version'):
        unpack(bytes(data))
    with pytest.raises(MessageError, match='no message of this protocol'):
        unpack(b'GET / HTTP/1.1\r\n')


def test_what_cannot_be_sent_is_refused_with_its_size():
    with pytest.raises(MessageError, match=f'{MAX_MESSAGE} are allowed'):
        pack(messages.Planned(1, 1, 0.0, 0.0, '', np.zeros((MAX_MESSAGE, 1))))
    with pytest.raises(MessageError, match='Tick.slot'):
        pack(dataclasses.replace(TICK, slot=256))


# --- connections ---

def test_a_message_and_a_descriptor_arrive_together(pair):
    one, other = pair
    read, write = os.pipe()
    one.send(TICK, read)
    os.close(read)
    message, descriptor = other.receive(60.0)
    os.write(write, b'through')
    assert same(message, TICK) and os.read(descriptor, 7) == b'through'
    assert not os.get_inheritable(descriptor)
    for each in (write, descriptor):
        os.close(each)
    assert other.receive(0.0) is None


def test_the_end_of_the_other_side_is_seen_at_once(pair):
    one, other = pair
    seen = threading.Event()

    def wait():
        with pytest.raises(ConnectionLost):
            other.receive(60.0)
        seen.set()

    thread = threading.Thread(target=wait)
    thread.start()
    one.shutdown()
    assert seen.wait(30.0)
    thread.join()
    with pytest.raises(ConnectionLost):
        other.send(TICK)


def test_nobody_waits_for_one_who_does_not_read(pair):
    one, _ = pair
    with pytest.raises(ConnectionLost, match='does not read'):
        for _ in range(100_000):
            one.send(TICK)


def test_hostile_packets_are_refused_and_leave_no_descriptor_open():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection, before = Connection(ours), open_files()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE)
    null = os.open('/dev/null', os.O_RDONLY)
    for data, descriptors, refusal in (
            (b'nonsense', [null], 'no message'), (pack(TICK), [null] * 3, 'more than one descriptor'),
            (b'x' * (MAX_MESSAGE + 100), [], 'more than'), (pack(TICK)[:-1], [null], 'truncated')):
        socket.send_fds(theirs, [data], descriptors)
        with pytest.raises(MessageError, match=refusal):
            connection.receive(1.0)
    os.close(null)
    assert open_files() == before
    theirs.close()
    connection.close()


# --- memory ---

def slots(size=(4, 6)):
    """The two sides of one memory: who writes, and who reads."""
    descriptor = make_memory(size)
    return FrameSlots(os.dup(descriptor), size, writable=True), FrameSlots(descriptor, size)


def frame(value, size=(4, 6)):
    return np.full((*size, 3), value, np.uint8)


def test_a_frame_is_read_as_it_was_written():
    writer, reader = slots((5, 7))
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    writer.write(2, 41, picture)
    taken = reader.read(2, 41)
    writer.write(2, 42, frame(0, (5, 7)))
    assert np.array_equal(taken, picture), 'what was taken has changed'


def test_a_torn_or_stale_frame_is_never_used():
    writer, reader = slots()
    writer.write(0, 1, frame(1))
    with pytest.raises(MessageError, match='torn, or stale'):
        reader.read(0, 2)          # announced, and not written
    writer._begun[0][0] = 2        # somebody is writing
    for number in (1, 2):
        with pytest.raises(MessageError, match='torn, or stale'):
            reader.read(0, number)
    with pytest.raises(MessageError, match='no slot'):
        reader.read(SLOTS, 1)


def test_a_frame_that_is_overwritten_while_it_is_read_is_not_used():
    size = (256, 256)
    writer, reader = slots(size)
    over, torn, whole = threading.Event(), 0, 0

    def overwrite():
        number = 0
        while not over.is_set():
            number += 1
            writer.write(0, number, frame(number % 251, size))
            if number % 4 == 0:
                time.sleep(0.0002)  # for some to be read whole

    thread = threading.Thread(target=overwrite)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    end = time.monotonic() + 60
    try:
        # No fixed number of reads: hundreds are refused in a time for which the writer may lie still in mid-frame.
        while (torn < 20 or whole < 100) and time.monotonic() < end:
            number = int(reader._ended[0][0])
            try:
                taken = reader.read(0, number)
            except MessageError:
                torn += 1
            else:
                whole += number > 0  # 0: none has been written yet
                assert number == 0 or (taken == number % 251).all(), 'a torn frame was taken for a whole one'
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
    assert torn >= 20 and whole >= 100, f'{torn} torn and {whole} whole frames read within a minute'


def test_a_frame_of_another_shape_is_refused():
    writer, _ = slots()
    with pytest.raises(ValueError, match=r'the server takes uint8 \(4, 6, 3\)'):
        writer.write(0, 1, frame(0, (6, 4)))


def test_memory_that_could_be_cut_short_is_not_mapped():
    descriptor = os.memfd_create('loose', os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(MessageError, match='not sealed'):
        memory.mapped(descriptor, 4096, writable=False)
    sealed = memory.make('sealed', 4096)
    with pytest.raises(MessageError, match='4096 bytes, and not 8192'):
        memory.mapped(sealed, 8192, writable=False)
    with pytest.raises(OSError):
        os.ftruncate(sealed, 0)
    read, write = os.pipe()
    with pytest.raises(MessageError, match='no shared memory'):
        memory.mapped(read, 4096, writable=False)
    for each in (descriptor, sealed, read, write):
        os.close(each)


def test_pictures_travel_whole_or_not_at_all_and_leave_nothing():
    before = open_files()
    sent = np.random.default_rng(0).integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)
    assert np.array_equal(pictures.take(pictures.put(sent)), sent)
    for shape, size in (((2 ** 31, 2 ** 31, 4), 10), ((0, 2 ** 32 - 1, 2 ** 32 - 1), 0)):
        lying = memory.make('lying', 12 + size)
        os.pwrite(lying, struct.pack('<III', *shape), 0)
        with pytest.raises(MessageError, match='no pictures of the shape'):
            pictures.take(lying)
    short = memory.make('short', 3)
    with pytest.raises(MessageError, match='3 bytes of pictures'):
        pictures.take(short)
    assert open_files() == before


def test_nothing_of_shared_memory_is_left_when_both_sides_are_gone():
    def mapped():
        return Path('/proc/self/maps').read_text().count('memfd:worldmodel')

    gc.collect()  # what other tests have left
    before = open_files(), mapped()
    writer, reader = slots()
    assert mapped() == before[1] + 2
    del writer, reader
    assert (open_files(), mapped()) == before


# --- the socket ---

@pytest.fixture
def address(tmp_path):
    return tmp_path / 'engine.sock'


def test_a_socket_is_this_users_alone(address):
    listening = ListeningSocket(address)
    listening.listen()
    assert stat.S_IMODE(address.stat().st_mode) == 0o600
    connected = connect(address, 1.0)
    accepted, pid = listening.accept()
    assert pid == os.getpid()
    for each in (connected, accepted, listening):
        each.close()
    assert not address.exists()


def test_where_no_more_files_can_be_opened_connections_are_closed_instead_of_being_reported_for_ever(address):
    listening, opened, usual = ListeningSocket(address), [], resource.getrlimit(resource.RLIMIT_NOFILE)
    listening.listen()
    connected = [connect(address, 1.0) for _ in range(2)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_files())) + 4, usual[1]))
    try:
        with pytest.raises(OSError, match='Too many open files'):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        assert [listening.accept() for _ in range(3)] == [None] * 3
        assert [each.recv(1) for each in connected] == [b'', b''] and not select.select([listening], [], [], 0.0)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for file in opened:
            os.close(file)
    with connect(address, 1.0):
        listening.accept()[0].close()
    for each in (*connected, listening):
        each.close()


def test_another_users_process_is_turned_away(address, monkeypatch):
    listening = ListeningSocket(address)
    listening.listen()
    connected = connect(address, 1.0)
    monkeypatch.setattr('os.getuid', lambda: os.geteuid() + 1)
    assert listening.accept() is None
    with pytest.raises(AddressError, match='runs as user'):
        connect(address, 1.0)
    connected.close()
    listening.close()


def test_a_path_has_one_server_at_a_time_and_a_dead_one_leaves_it_free(address):
    code = ('import sys, time; from pathlib import Path; from worldmodel_ros.serving.transport.address import ListeningSocket\n'
            'listening = ListeningSocket(Path(sys.argv[1])); listening.listen(); print("ready", flush=True)\n'
            'time.sleep(60)')
    with subprocess.Popen([sys.executable, '-c', code, address], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == 'ready\n'
        with pytest.raises(AddressError, match='another server has'):
            ListeningSocket(address)
        server.kill()
    assert address.exists()
    with pytest.raises(AddressError, match='no process listens'):
        connect(address, 1.0)
    listening = ListeningSocket(address)
    listening.listen()
    connect(address, 1.0).close()
    listening.close()


def test_where_there_is_no_server_the_reason_is_said(address):
    with pytest.raises(AddressError, match='there is no socket'):
        connect(address, 1.0)


def test_the_default_socket_is_in_the_users_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))
    assert socket_path() == tmp_path / 'worldmodel' / 'engine.sock'
    monkeypatch.delenv('XDG_RUNTIME_DIR')
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    path = socket_path('auto')
    assert path == tmp_path / f'worldmodel-{os.getuid()}' / 'engine.sock'
    ListeningSocket(path).close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(AddressError, match='107 are allowed'):
        socket_path('/' + 'x' * 107)


def test_a_folder_that_is_a_link_is_not_trusted(tmp_path):
    (tmp_path / 'link').symlink_to(tmp_path)
    with pytest.raises(AddressError, match='not a folder of this user'):
        ListeningSocket(tmp_path / 'link' / 'engine.sock')


@pytest.mark.parametrize('owner, mode, refusal', [
    (OWN, 0o700, ''), (OWN, 0o755, ''), (OWN, 0o1777, ''), (0, 0o1777, ''), (0, 0o755, ''),
    (OTHER, 0o700, 'not a folder of this user'), (OTHER, 0o1777, 'not a folder of this user'),
    (OWN, 0o777, 'other users may write'), (OWN, 0o770, 'other users may write'), (0, 0o777, 'other users may write')])
def test_a_folder_in_which_others_could_replace_the_socket_is_not_trusted(monkeypatch, tmp_path, owner, mode, refusal):
    def lstat(path, real=os.lstat):
        return SimpleNamespace(st_uid=owner, st_mode=stat.S_IFDIR | mode) if path == tmp_path else real(path)
    monkeypatch.setattr('os.lstat', lstat)
    with pytest.raises(AddressError, match=refusal) if refusal else nullcontext():
        ListeningSocket(tmp_path / 'engine.sock').close()
