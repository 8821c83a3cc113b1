"""The real client of openpi, unmodified, in an environment of its own (tools/openpi_env.sh)."""
import json
import subprocess
from pathlib import Path

import pytest
import trustme
from fake_service import PLAN, FakeService
from gateway_rig import gateway
from test_gateway_security import write

from worldmodel_ros.serving.gateway.accounts import Account, Accounts, digest
from worldmodel_ros.serving.gateway.security import server_context

ENVIRONMENT = Path(__file__).resolve().parents[1] / '.envs' / 'openpi'
pytestmark = pytest.mark.skipif(not (ENVIRONMENT / 'stamp').is_file(),
                                reason='openpi-client is not installed: tools/openpi_env.sh')
TOKEN = 'a token of the test'
PROGRAM = r'''
import json, os, sys, urllib.request
import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy
url, token = sys.argv[1:3]
out = {}
image = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
observation = {'observation/image': image, 'observation/state': np.zeros(8), 'prompt': 'drive to red'}
policy = WebsocketClientPolicy(host=url, api_key=token)
out['metadata'] = policy.get_server_metadata()
reply = policy.infer(observation)
out['actions'], out['dtype'] = reply['actions'].tolist(), str(reply['actions'].dtype)
out['timing'] = sorted(reply['server_timing'])
out['numpy scalar step'] = policy.infer({**observation, 'step_id': np.int64(4)})['step_id']
try:
    policy.infer({'prompt': 'red'})
except RuntimeError as error:
    out['refusal'] = str(error)
policy.reset()
broker = ActionChunkBroker(policy, action_horizon=4)
out['chunk'] = [broker.infer(observation)['actions'].tolist() for _ in range(6)]
broker.reset()
out['after reset'] = broker.infer(observation)['actions'].tolist()
named = WebsocketClientPolicy(host=url + '/v1/realtime/robot/openpi', api_key=token)
out['path'] = named.infer(observation)['valid_steps']
try:
    WebsocketClientPolicy(host=url, api_key='wrong')
except Exception as error:
    out['wrong token'] = type(error).__name__
if url.startswith('wss'):
    del os.environ['SSL_CERT_FILE']
    try:
        WebsocketClientPolicy(host=url, api_key=token)
    except Exception as error:
        out['untrusted'] = type(error).__name__
else:
    host, port = url.removeprefix('ws://').split(':')
    out['host and port'] = WebsocketClientPolicy(host=host, port=int(port), api_key=token).infer(observation)['valid_steps']
    out['healthz'] = urllib.request.urlopen(url.replace('ws', 'http', 1) + '/healthz').read().decode()
print(json.dumps(out))
'''


@pytest.mark.parametrize('secured', [False, True])
def test_the_unmodified_client_works(tmp_path, secured):
    accounts = Accounts((Account('client', digest(TOKEN), openings=0.0),))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / 'ca.pem')
    tls = server_context(*write(authority.issue_cert('127.0.0.1'), tmp_path, 'host'), None) if secured else None
    service = FakeService(sessions=20)
    with gateway(tmp_path, service, accounts=accounts, tls=tls) as running:
        command = [ENVIRONMENT / 'bin' / 'python', '-W', 'ignore', '-c', PROGRAM, running.url(''), TOKEN]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120.0,
                              env={'SSL_CERT_FILE': str(tmp_path / 'ca.pem')})
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out['metadata']['model'] == 'tiny' and out['metadata']['action_names'] == ['linear.x', 'angular.z']
    assert out['actions'] == PLAN.tolist() and out['dtype'] == 'float32' and out['path'] == 4
    assert out['timing'] == ['infer_ms', 'queue_ms', 'slack_ms', 'tier', 'total_ms'] and out['numpy scalar step'] == 4
    assert 'observation/image must be an image' in out['refusal']
    assert out['chunk'] == [*PLAN.tolist(), *PLAN[:2].tolist()] and out['after reset'] == PLAN[0].tolist()
    assert out['wrong token'] == 'InvalidStatus'
    if secured:
        assert out['untrusted'] == 'SSLCertVerificationError'
    else:
        assert out['healthz'] == 'OK\n' and out['host and port'] == 4
    assert (service.ticks[0].image.shape, service.ticks[0].goal) == ((64, 64, 3), 'red')
