"""``worldmodel gateway`` as a process: it starts, is refused, restarts and ends as it says."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from fake_service import FakeService, serving
from gateway_rig import TIMEOUT, infer, robot
from websockets.exceptions import InvalidStatus

from worldmodel_ros.exit_codes import BAD_CONFIGURATION
from worldmodel_ros.serving.gateway.accounts import digest
from worldmodel_ros.serving.service.quotas import TokenBuckets

START = 60.0  # s


def command(*arguments):
    return [sys.executable, '-m', 'worldmodel_ros.cli', 'gateway', *map(str, arguments)]


class Process:
    """A gateway as a process, with what the clients of gateway_rig need of it."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r'is the gateway at (wss?)://[^:]+:(\d+)', line):
                self.scheme, self.port = found[1], int(found[2])
                return
        raise AssertionError(''.join(self.said))

    def url(self, path='/'):
        return f'{self.scheme}://127.0.0.1:{self.port}{path}'

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.process.stderr.read()
        return self.process.wait(TIMEOUT)


def test_it_serves_renews_its_accounts_starts_again_and_ends_in_good_order(tmp_path):
    accounts, audit = tmp_path / 'accounts.yaml', tmp_path / 'audit.jsonl'
    made = subprocess.run(command('--new-token', 'arm'), capture_output=True, text=True, timeout=START)
    token = re.search(r'written down nowhere else: (\S+)', made.stdout)[1]
    entry, = yaml.safe_load(made.stdout)['accounts']
    assert entry == {'name': 'arm', 'sha256': digest(token)} and len(token) > 40
    accounts.write_text(made.stdout.partition('\n')[2])
    assert token not in accounts.read_text()
    arguments = '--socket', tmp_path / 'engine.sock', '--accounts', accounts, '--audit', audit
    with serving(tmp_path / 'engine.sock', FakeService(sessions=8)) as server:
        server.server._hellos = TokenBuckets(0.0, 1.0)
        first = Process('--port', 0, *arguments)
        try:
            with robot(first, token=token) as connection:
                assert infer(connection, session_id='robot', step_id=1)['step_id'] == 1
                with open(f'/proc/{first.process.pid}/maps') as maps:
                    assert not re.search(r'rclpy|libtorch|onnxruntime', maps.read())
            accounts.write_text(json.dumps({'accounts': [{'name': 'arm', 'sha256': digest('another')}]}))
            first.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + TIMEOUT
            with pytest.raises(InvalidStatus):
                while time.monotonic() < end:
                    with robot(first, token=token):
                        time.sleep(0.05)
            accounts.write_text('nonsense')
            first.process.send_signal(signal.SIGHUP)
            with robot(first, token='another'):
                pass  # what cannot be read is not taken
        finally:
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.communicate()
        accounts.write_text(json.dumps({'accounts': [entry]}))
        second = Process('--port', first.port, *arguments)  # at once, at the same port
        with robot(second, token=token) as connection:
            assert infer(connection, session_id='robot', step_id=2)['step_id'] == 2
            assert second.end() == 0
    assert {'connected', 'unauthorized'} <= {json.loads(line)['event'] for line in audit.read_text().splitlines()}


def test_options_come_from_a_file_and_the_command_line_wins(tmp_path):
    file = tmp_path / 'door.yaml'
    file.write_text('host: 127.0.0.1\nport: 1\nlinger: 7\norigins: [https://a.example]\n')
    with serving(tmp_path / 'engine.sock', FakeService()):
        process = Process('--options', file, '--port', 0, '--socket', tmp_path / 'engine.sock')
        with robot(process) as connection:
            assert infer(connection)['valid_steps'] == 4
        assert process.end() == 0


@pytest.mark.parametrize('text, complaint', [
    ('hots: x', "no option 'hots'"), ('port: much', 'must be int'), ('plaintext: 3', 'must be bool'),
    ('3', 'no file of options: it must be a map'),
    ('[', 'no file of options'), ('host: 0.0.0.0', 'without TLS')])
def test_a_file_of_options_that_makes_no_sense_is_refused(tmp_path, text, complaint):
    file = tmp_path / 'door.yaml'
    file.write_text(text)
    done = subprocess.run(command('--options', file), capture_output=True, text=True, timeout=START)
    assert done.returncode == BAD_CONFIGURATION and complaint in done.stderr, done.stderr


@pytest.mark.parametrize('arguments, code, complaint', [
    (('--host', '0.0.0.0'), BAD_CONFIGURATION, 'without TLS'),
    (('--certificate', 'x', '--key', 'y'), BAD_CONFIGURATION, '--certificate x: not there'),
    (('--certificate', '/dev/null', '--key', 'y'), BAD_CONFIGURATION, '--key y: not there'),
    (('--certificate', '/dev/null', '--key', '/dev/null'), BAD_CONFIGURATION, 'cannot be used'),
    (('--accounts', '/dev/null'), BAD_CONFIGURATION, 'no file of accounts: it must be a map with a list, accounts'),
    (('--port', '0', '--audit', '/dev/null/log'), BAD_CONFIGURATION, '/dev/null/log cannot be written (Not a directory)')])
def test_what_is_not_safe_or_cannot_be_used_is_refused(arguments, code, complaint):
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=START)
    assert done.returncode == code and complaint in done.stderr, done.stderr
