"""The server's socket: it takes the place of a dead server's, and of nothing else; on its way out it removes its own."""
import errno
import os
import socket
import subprocess
import sys

import pytest

from worldmodel_ros.serving.transport.address import AddressError, ListeningSocket, connect


def dead_socket(path):
    """Leave a socket's file behind, as a server does that was killed."""
    subprocess.run([sys.executable, '-c', 'import os, sys; from pathlib import Path; '
                    'from worldmodel_ros.serving.transport.address import ListeningSocket; '
                    's = ListeningSocket(Path(sys.argv[1])); s.listen(); os._exit(9)', str(path)], check=False)
    assert path.is_socket()


def make_link(path):
    path.with_name('precious').write_text('weights')
    path.symlink_to('precious')


@pytest.mark.parametrize('make, words', [
    (lambda path: path.write_text('weights'), 'is a file'), (lambda path: path.mkdir(), 'is a folder'),
    (make_link, 'is a symbolic link'), (lambda path: path.symlink_to('nowhere'), 'is a symbolic link'),
    (os.mkfifo, 'is no socket')])
def test_what_is_no_socket_is_refused_with_words_and_left_as_it_is(tmp_path, make, words):
    path = tmp_path / 'engine.sock'
    make(path)
    before = os.lstat(path)
    with pytest.raises(AddressError, match=f'engine.sock {words}, and is left as it is: give another --socket'):
        ListeningSocket(path)
    assert os.lstat(path).st_ino == before.st_ino and not path.with_name('engine.sock.lock').exists()


@pytest.mark.parametrize('kind', [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_a_socket_with_a_listener_is_refused_and_goes_on(tmp_path, kind):
    path = tmp_path / 'docker.sock'
    with socket.socket(socket.AF_UNIX, kind) as other, socket.socket(socket.AF_UNIX, kind) as client:
        other.bind(str(path))
        if kind != socket.SOCK_DGRAM:
            other.listen(1)
        with pytest.raises(AddressError, match='another process listens at .*docker.sock: stop it'):
            ListeningSocket(path)
        client.connect(str(path))


@pytest.mark.parametrize('kind, is_left', [
    (socket.SOCK_STREAM, True), (socket.SOCK_SEQPACKET, True), (socket.SOCK_DGRAM, True), (socket.SOCK_STREAM, False),
    (socket.SOCK_SEQPACKET, False)])  # left by a program that has ended, or of one that will listen later
def test_a_socket_of_another_program_is_refused_also_where_nobody_listens(tmp_path, kind, is_left):
    path = tmp_path / 'docker.sock'
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        if is_left:
            other.close()
        before = os.lstat(path)
        with pytest.raises(AddressError, match='docker.sock was made by no server of this package, and is left as it is'):
            ListeningSocket(path)
        assert os.lstat(path).st_ino == before.st_ino
    path.unlink()
    listening = ListeningSocket(path)  # nor one that comes while the models load
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        with pytest.raises(AddressError, match='was made by no server|another process listens'):
            listening.listen()
        assert path.exists()
    listening.close()
    assert path.exists()


def test_a_socket_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / 'engine.sock'
    dead_socket(path)
    owner = os.getuid()
    monkeypatch.setattr(os, 'getuid', lambda: owner + 1)
    monkeypatch.setattr('worldmodel_ros.serving.transport.address._private_folder', lambda folder: None)
    with pytest.raises(AddressError, match=f'is of user {owner}, and is left as it is'):
        ListeningSocket(path)
    assert path.exists()


def test_a_dead_servers_socket_is_replaced(tmp_path):
    path = tmp_path / 'engine.sock'
    dead_socket(path)
    listening = ListeningSocket(path)
    listening.listen()
    connect(path, 1.0).close()
    listening.close()
    assert not path.exists()


def test_a_process_that_may_open_no_more_files_is_told_so(tmp_path, monkeypatch):
    def refused(*arguments):
        raise OSError(errno.EMFILE, 'Too many open files')
    monkeypatch.setattr('worldmodel_ros.serving.transport.address.socket.socket', refused)
    with pytest.raises(AddressError, match='engine.sock can be made: Too many open files'):
        connect(tmp_path / 'engine.sock', 1.0)


def test_what_comes_to_the_path_while_the_models_load_is_refused_too(tmp_path):
    path = tmp_path / 'engine.sock'
    listening = ListeningSocket(path)
    path.write_text('weights')
    with pytest.raises(AddressError, match='is a file'):
        listening.listen()
    listening.close()
    assert path.read_text() == 'weights'


def test_what_replaced_its_socket_is_left_by_a_server_that_ends(tmp_path):
    path = tmp_path / 'engine.sock'
    listening = ListeningSocket(path)
    listening.listen()
    path.unlink()
    path.write_text('weights')
    listening.close()
    assert path.read_text() == 'weights'


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / 'engine.sock.lock').symlink_to('elsewhere')
    with pytest.raises(AddressError, match='engine.sock.lock cannot be opened'):
        ListeningSocket(tmp_path / 'engine.sock')
    assert not (tmp_path / 'elsewhere').exists()


def test_worldmodel_serve_says_so_and_ends_with_one(tmp_path):
    path = tmp_path / 'model.safetensors'
    path.write_text('weights')
    done = subprocess.run([sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--socket', str(path)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and 'is a file, and is left as it is' in done.stderr, done.stderr
    assert path.read_text() == 'weights'
