"""A robot with the unmodified openpi client: one observation a period, its actions one after the other.

    pip install openpi-client typing_extensions
    worldmodel serve & worldmodel gateway &
    python examples/openpi_robot.py                  # --url wss://host:8000 --token TOKEN from another machine
"""
import argparse
import time

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('--url', default='ws://127.0.0.1:8000')
parser.add_argument('--token', default='none')
parser.add_argument('--steps', type=int, default=50)
options = parser.parse_args()

policy = WebsocketClientPolicy(host=options.url, api_key=options.token)
about = policy.get_server_metadata()
print(f'{about["model"]}: {", ".join(about["action_names"])}, every {about["step_period"]} s')
broker = ActionChunkBroker(policy, action_horizon=about['action_horizon'])  # asks again when a chunk is used up
for step in range(options.steps):
    image = np.zeros((*about['image_size'], 3), np.uint8)  # your camera's image, of any size
    try:
        action = broker.infer({'observation/image': image, 'prompt': 'drive to the red ball'})['actions']
    except RuntimeError as refusal:  # no time, no goal, no engine: the connection stays
        print(refusal)
        continue
    print(step, *(f'{name}={value:.3f}' for name, value in zip(about['action_names'], action)))  # send it to your base
    time.sleep(about['step_period'])
