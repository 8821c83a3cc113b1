"""``worldmodel sim``: render an episode of the simulator, without ROS and without the model."""
from __future__ import annotations

import argparse
from pathlib import Path

from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel sim                              an expert drives to the red object; out/sim/episode.gif
  worldmodel sim --seed 3 --goal blue,yellow  another room, two goals
  worldmodel sim --top                        with the view from above
  worldmodel sim --format png                 single images instead of an animation
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'sim', help='render an episode of the simulator, driven by the expert',
        description='Renders a simulated episode, driven by the expert from the true state.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seed', type=arguments.seed, default=0, help='seed of the room (default: 0)')
    parser.add_argument('--goal', type=arguments.goals, default=['red'], metavar='COLOUR,...',
                        help='goals, in turn (default: red)')
    parser.add_argument('--seconds', type=arguments.positive, default=12.0,
                        help='simulated time [s] (default: 12)')
    parser.add_argument('--size', type=int, default=192,
                        help='side length of the images [pixels] (default: 192; the model uses 64)')
    parser.add_argument('--top', action='store_true', help='show the view from above next to the camera image')
    parser.add_argument('--format', choices=('gif', 'png'), default='gif',
                        help='animation or single images (default: gif)')
    parser.add_argument('--out', type=Path, default=Path('out/sim'),
                        help='folder to write to (default: out/sim)')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import sys
    try:
        from worldmodel_ros.demo.episode import PERIOD, expert_episode
        size = (chosen.size, chosen.size)
        frames, attempts = expert_episode(chosen.seed, chosen.goal, chosen.seconds, size, chosen.top)
    except (ImportError, ValueError) as error:
        print(f'worldmodel sim: {error}', file=sys.stderr)
        return 1
    from PIL import Image
    chosen.out.mkdir(parents=True, exist_ok=True)
    pages = [Image.fromarray(frame) for frame in frames]
    if chosen.format == 'gif':
        path = chosen.out / 'episode.gif'
        pages[0].save(path, save_all=True, append_images=pages[1:], duration=round(PERIOD * 1000), loop=0)
    else:
        path = chosen.out / 'frame_*.png'
        for number, page in enumerate(pages):
            page.save(chosen.out / f'frame_{number:04d}.png')
    for attempt in attempts:
        took = f'reached after {attempt.reached - attempt.given:.1f} s' if attempt.reached is not None else \
            f'not reached, closest distance {attempt.closest:.2f} m'
        print(f'{attempt.goal}: {took}')
    print(f'{len(pages)} images in {path}')
    return 0
