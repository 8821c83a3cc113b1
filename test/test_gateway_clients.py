"""The real client of openpi, unmodified, and the flow of a camera client, in an environment made by tools/openpi_env.sh."""
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import trustme
from camera_paths import commands, path
from fake_service import PLAN, FakeService
from gateway_rig import gateway
from test_gateway_security import write

from worldmodel_ros.serving.gateway.accounts import Account, Accounts, digest
from worldmodel_ros.serving.gateway.contract import Contract
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


# What the example client of vllm-omni's pull request 3701 does on the wire, with the codec and the library that it uses: a
# connection for each call, the image with the first one alone, parts until ``total``, errors as maps.
CAMERA_PROGRAM = r'''
import json, sys
import numpy as np
from openpi_client import msgpack_numpy
from websockets.sync.client import connect
url, token, folder = sys.argv[1:4]
poses = np.load(folder + '/poses.npy')
intrinsics = np.load(folder + '/intrinsics.npy')
out = {'configurations': [], 'parts': [], 'dtypes': []}
video, first = [], 0

def call(request):
    headers = {'Authorization': 'Bearer ' + token}
    with connect(url + '/v1/realtime/world/camera', max_size=None, ping_interval=None, ping_timeout=None,
                 additional_headers=headers) as socket:
        out['configurations'].append(sorted(msgpack_numpy.unpackb(socket.recv())))
        socket.send(msgpack_numpy.packb(request))
        parts, total = [], None
        while total is None or len(parts) < total:
            message = socket.recv()
            if isinstance(message, str):
                return message
            message = msgpack_numpy.unpackb(message)
            if message.get('type') == 'error':
                return message['message']
            if message.get('type') != 'frame':
                continue
            total = message['total']
            parts.append(message['video'])
        out['parts'].append([len(part) for part in parts])
        return np.concatenate(parts, axis=0)

for index in range(3):
    count = 24
    request = {'prompt': 'Walk', 'session_id': 'film', 'extra_body': {
        'height': 480, 'width': 832, 'num_frames': count, 'fps': 16, 'session_id': 'film', 'frames_per_chunk': 4, 'seed': 42},
        'camera': {'poses': poses[first:first + count], 'intrinsics': intrinsics[first:first + count]}}
    if index == 0:
        request['image'] = np.zeros((480, 832, 3), np.uint8)
    clip = call(request)
    out['dtypes'].append(str(clip.dtype))
    video.extend(clip[4:] if index else clip)
    first += count
out['video'] = np.shape(video)
out['reset'] = call({'endpoint': 'reset', 'session_id': 'film'})
out['after reset'] = call({'prompt': '', 'session_id': 'film', 'camera': {'poses': poses[:4], 'intrinsics': intrinsics[:4]}})
out['no camera'] = call({'prompt': '', 'image': np.zeros((64, 64, 3), np.uint8), 'session_id': 'film', 'extra_body': {}})
print(json.dumps(out))
'''


def run(program, running, *arguments, folder):
    command = [ENVIRONMENT / 'bin' / 'python', '-W', 'ignore', '-c', program, running.url(''), TOKEN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120.0,
                          env={'SSL_CERT_FILE': str(folder / 'ca.pem')})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def doors(folder, secured):
    """What a gateway is started with: accounts, and TLS by an authority of the test."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / 'ca.pem')
    tls = server_context(*write(authority.issue_cert('127.0.0.1'), folder, 'host'), None) if secured else None
    return {'accounts': Accounts((Account('client', digest(TOKEN), openings=0.0),)), 'tls': tls}


@pytest.mark.parametrize('secured', [False, True])
def test_the_flow_of_a_camera_client_works(tmp_path, secured):
    poses = path(commands(71))
    np.save(tmp_path / 'poses.npy', poses)
    np.save(tmp_path / 'intrinsics.npy', np.tile(np.float32([416, 416, 416, 240]), (len(poses), 1)))
    with gateway(tmp_path, FakeService(sessions=20), **doors(tmp_path, secured)) as running:
        out = run(CAMERA_PROGRAM, running, tmp_path, folder=tmp_path)
    assert len(out['configurations']) == 6
    assert {'patch_size', 'vae_stride', 'latent_frames_per_chunk', 'max_area'} <= set(out['configurations'][0])
    assert out['parts'] == [[4] * 6] * 3 and out['dtypes'] == ['float32'] * 3 and out['video'] == [64, 64, 64, 3]
    assert out['reset'] == 'reset successful' and 'send an image' in out['after reset']
    assert 'camera must be a map' in out['no camera']


# A LeKiwi of LeRobot: its observation by the names of a LeRobot data set, over openpi's client.
LEROBOT = r'''
import json, sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
policy = WebsocketClientPolicy(host=sys.argv[1], api_key=sys.argv[2])
state = np.float32([0, 0, 0, 0, 0, 0, 0.2, 0.0, -0.3])  # six joints, then x, y, theta of the base
reply = policy.infer({'observation.images.front': np.full((480, 640, 3), 9, np.uint8), 'observation.state': state,
                      'task': 'drive to the blue ball'})
print(json.dumps({'actions': np.shape(reply['actions'])}))
'''


def test_observations_by_the_names_of_lerobot_are_understood_by_a_contract(tmp_path):
    text = (Path(__file__).resolve().parents[1] / 'docs' / 'gateway.md').read_text()
    (tmp_path / 'lerobot.yaml').write_text(re.search(r'```yaml\n(# LeRobot.*?)```', text, re.DOTALL)[1])
    service, contract = FakeService(), Contract.read(tmp_path / 'lerobot.yaml')
    with gateway(tmp_path, service, contract=contract, **doors(tmp_path, False)) as running:
        assert run(LEROBOT, running, folder=tmp_path) == {'actions': [4, 2]}
    tick, = service.ticks
    assert (tick.image == 9).all() and tick.goal == 'blue' and np.allclose(tick.executed, [0.2, -0.3])


@pytest.mark.parametrize('secured', [False, True])
def test_the_unmodified_client_works(tmp_path, secured):
    service = FakeService(sessions=20)
    with gateway(tmp_path, service, **doors(tmp_path, secured)) as running:
        out = run(PROGRAM, running, folder=tmp_path)
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
