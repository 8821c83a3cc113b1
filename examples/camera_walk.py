"""A walk through an imagined world: an image and camera poses in, an MP4 out.

It runs in the environment of this project (make setup):

    .venv/bin/python examples/camera_walk.py --image room.png --out walk.mp4
"""
import argparse
import math

import numpy as np
from PIL import Image
from websockets.sync.client import connect

from worldmodel_ros.serving.gateway.msgpack import decode, encode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('--url', default='ws://127.0.0.1:8000')
parser.add_argument('--token', default='none')
parser.add_argument('--image', required=True)
parser.add_argument('--chunks', type=int, default=10)
parser.add_argument('--out', default='walk.mp4')
options = parser.parse_args()


def base(k):
    """Return the robot's pose after k steps: a circle of 0.6 m at 0.3 m/s."""
    a = 0.05 * k
    return np.array([[math.cos(a), -math.sin(a), 0, 0.6 * math.sin(a)], [math.sin(a), math.cos(a), 0, 0.6 - 0.6 * math.cos(a)],
                     [0, 0, 1, 0], [0, 0, 0, 1]])


with connect(options.url + '/v1/realtime/world/camera', max_size=None, ping_interval=None,
             additional_headers={'Authorization': f'Bearer {options.token}'}) as connection, open(options.out, 'wb') as film:
    about = decode(connection.recv())
    count, optical = about['latent_frames_per_chunk'], np.array(about['camera_in_base'])
    steps = 1 + options.chunks * count  # the first pose is the image's
    request = {'prompt': '', 'session_id': 'walk', 'image': np.asarray(Image.open(options.image).convert('RGB')),
               'camera': {'poses': np.array([base(k) @ optical for k in range(steps)]),
                          'intrinsics': np.float32([32, 32, 32, 32])},  # fx, fy, cx, cy of your image
               'extensions': {'frames': 'mp4', 'timings': True},
               'extra_body': {'frames_per_chunk': 64, 'fps': about['fps']}}
    connection.send(encode(request))
    while True:
        reply = decode(connection.recv())
        if reply['type'] == 'error':
            raise SystemExit(reply['message'])
        film.write(reply['video'])  # each part is a complete video; players show them one after the other
        if reply['index'] + 1 == reply['total']:
            break
print(f'{steps} frames in {reply["timings"]["total_ms"] / 1e3:.1f} s: {options.out}')
