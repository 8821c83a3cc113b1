"""A robot without openpi-client that survives a lost network: the session continues, and no step is done twice.

It runs in the environment of this project (make setup):

    .venv/bin/python examples/reconnecting_robot.py            # stop and start the gateway meanwhile
"""
import argparse
import time

import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from worldmodel_ros.serving.gateway.msgpack import decode, encode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('--url', default='ws://127.0.0.1:8000')
parser.add_argument('--token', default='none')
parser.add_argument('--steps', type=int, default=50)
options = parser.parse_args()

step, executed = 0, []
while step < options.steps:
    try:
        with connect(options.url, max_size=None, open_timeout=2.0,
                     additional_headers={'Authorization': f'Bearer {options.token}'}) as connection:
            about = decode(connection.recv(2.0))
            while step < options.steps:
                connection.send(encode({
                    'observation/image': np.zeros((*about['image_size'], 3), np.uint8), 'prompt': 'red',
                    'session_id': 'robot-7', 'step_id': step, 'deadline_ms': 80.0,
                    'executed_actions': np.array(executed, np.float32).reshape(-1, 2)}))
                reply = connection.recv(2.0)
                if isinstance(reply, str):
                    print(f'step {step}: {reply}')
                else:
                    reply = decode(reply)
                    timing = reply['server_timing']
                    print(f'step {step}, episode {reply["episode"]}: {reply["actions"][0]}, {timing["tier"]}, '
                          f'{timing["total_ms"]:.1f} ms')
                    executed = [reply['actions'][0]]
                step += 1
                time.sleep(about['step_period'])
    except (OSError, TimeoutError, WebSocketException) as error:
        # The same step is sent again: if it was already done, its reply was kept.
        print(f'step {step}: {error}: drive with your own plan, or stop; trying again')
        time.sleep(0.2)
