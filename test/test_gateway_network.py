"""A client over a bad network: two network namespaces and a link that loses, delays, doubles and spoils packets."""
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trustme
import yaml
from fake_service import FakeService, serving, wait_for
from faults.network import cannot_divide, two_networks
from gateway_rig import TIMEOUT
from test_gateway_security import write

from worldmodel_ros.serving.gateway.accounts import digest
from worldmodel_ros.serving.service.quotas import TokenBuckets

REASON = cannot_divide()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
ROBOT = Path(__file__).resolve().parents[1] / 'examples' / 'reconnecting_robot.py'
ADDRESS, TOKEN, STEPS = '10.201.77.2', 'a token of the test', 60
BAD = {'loss': 0.05, 'duplicate': 0.02, 'corrupt': 0.01, 'delay': 0.02, 'jitter': 0.005}


def files(folder):
    """Of the gateway: certificate, key, accounts; and of the client, the authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / 'ca.pem')
    (folder / 'accounts.yaml').write_text(yaml.safe_dump({'accounts': [{'name': 'arm', 'sha256': digest(TOKEN)}]}))
    return write(authority.issue_cert(ADDRESS), folder, 'host')


def inside(namespace, *command, **options):
    return subprocess.Popen(['ip', 'netns', 'exec', namespace, sys.executable, *map(str, command)], text=True, **options)


def test_a_session_goes_on_over_a_bad_network_and_through_a_cut_and_no_step_is_done_twice(tmp_path):
    certificate, key = files(tmp_path)
    service, started = FakeService(), []
    with two_networks() as (names, link), serving(tmp_path / 'engine.sock', service) as server:
        server.server._hellos = TokenBuckets(0.0, 1.0)

        def does(**faults):
            link.stdin.write(json.dumps(faults) + '\n')
            link.stdin.flush()
        try:
            started.append(inside(
                names[1], '-m', 'worldmodel_ros.cli', 'gateway', '--host', ADDRESS, '--port', 8000, '--socket', server.path,
                '--accounts', tmp_path / 'accounts.yaml', '--certificate', certificate, '--key', key, stderr=subprocess.PIPE))
            assert any('is the gateway at wss' in line for line in started[0].stderr)
            environment = {'SSL_CERT_FILE': str(tmp_path / 'ca.pem'), 'PYTHONPATH': ':'.join(sys.path), 'PYTHONUNBUFFERED': '1'}
            started.append(inside(names[0], ROBOT, '--url', f'wss://{ADDRESS}:8000', '--token', TOKEN, '--steps', STEPS,
                                  stdout=subprocess.PIPE, env=environment))
            wait_for(lambda: len(service.ticks) >= 10, TIMEOUT)
            does(**BAD)
            wait_for(lambda: len(service.ticks) >= 25, 2 * TIMEOUT)
            does(loss=1.0)
            time.sleep(4.0)  # longer than the client waits for a reply
            does(**BAD)
            wait_for(lambda: len(service.ticks) >= 40, 3 * TIMEOUT)
            does()
            said, _ = started[1].communicate(timeout=2 * TIMEOUT)
        finally:
            for process in started:
                process.kill()
                process.communicate()
    lines = [line for line in said.splitlines() if ', episode ' in line]
    assert [line.partition(':')[0] for line in lines] == [f'step {step}, episode 1' for step in range(STEPS)], said
    assert 'trying again' in said, 'the cut was not noticed'
    assert [tick.sequence for tick in service.ticks] == list(range(1, STEPS + 1))
