"""All benchmarks of several GPUs in one command of at most ten minutes, by priority; JSON is written as results come.

    python benchmarks/several_gpus.py --gpus 2 --folder benchmarks/results
    python benchmarks/several_gpus.py --gpus 4 --parts robot worlds ros --folder benchmarks/results

* robot: ``robot_3b`` and ``robot_3b_4k`` on all of them, each with nothing compiled; on one, both at once, with ``robot_3b``
  on two others if there are four (``tick_*.json``).
* worlds: LingBot-World-Fast 14B in FP8 and bf16 (``wan_parallel.py``), passes as a CUDA graph.
* pairs: with four GPUs, the same on two each, both at once; then ``robot_3b`` and ``robot_3b_4k`` on two each.
* ros: ``robot_3b`` over ROS, two steps, camera message in to command out (``ros_tick.py``).
* loss: a rank is killed while a robot drives (``rank_loss.py``), and the model's answers on several (``parallel.py``).
* cold: ``robot_3b`` is started twice more with nothing compiled.

``several_gpus.json`` has each program's command, seconds and exit status, and the scaling. If time is short, the last parts
are left out.
"""
from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from programs import ENVIRONMENT, Program, script
from result_file import provenance, write_result

PARTS = ('robot', 'worlds', 'pairs', 'ros', 'loss', 'cold')
TICK_S = {'robot_3b': 14, 'robot_3b_4k': 8}  # of ticks
ROS_RATE = 15.0  # Hz: ticks of two steps fit between two images


class Programs:
    """Runs programs, each with its limit of seconds, and notes their outcomes."""

    def __init__(self, folder: Path, seconds: float):
        self.folder, self._end, self.done = folder, time.monotonic() + seconds, []

    def left(self) -> float:
        return self._end - time.monotonic()

    def run(self, *programs: Program) -> None:
        """Run programs at the same time, each for at most its limit and the time left."""
        if self.left() < 20.0:
            self.done += [{'program': program.name, 'error': 'not begun: no time was left'} for program in programs]
            return
        for program in programs:
            program.begin(self.folder)
        for program in programs:
            self.done.append(program.end(self.left()))


def ticks(preset: str, gpus: int, folder: Path, name: str = '', cold: bool = False, seen: tuple[int, ...] = (),
          options: tuple[str, ...] = ()) -> Program:
    """Return a program for ticks of a preset, in a folder of their own, since two programs of one GPU write the same file.
    ``seen``: its GPUs, all if none is named."""
    name, seconds = name or f'{preset}_{gpus}', TICK_S[preset]
    return Program(name, 150.0, *script('tick.py', '--gpus', str(gpus), '--presets', preset, '--dtypes', 'fp8', '--steps', '2',
                                        '--limit', str(seconds), '--budget', '140', '--folder', str(folder / name), *options),
                   environment=ENVIRONMENT, cold=cold, gpus=seen)


def worlds(dtype: str, gpus: int, limit: float, options: argparse.Namespace, seen: tuple[int, ...] = ()) -> Program:
    """Return a program for chunks of the 14B; ``seen`` as in ``ticks``."""
    name = f'wan_{dtype}_{gpus}'
    return Program(name, limit + 5.0, *script(
        'wan_parallel.py', '--gpus', str(gpus), '--dtypes', dtype, '--large-chunks', str(options.large_chunks),
        '--seconds', f'{limit - 5.0:.0f}', '--folder', str(options.folder / name), '--graph',
        *(['--tiny'] if options.tiny else [])), environment=ENVIRONMENT, gpus=seen)


def chunk_ms(folder: Path) -> dict | None:
    """Return the first row that ``ticks`` wrote."""
    for file in folder.glob('tick_*.json'):
        for row in json.loads(file.read_text())['rows']:
            return {'chunk_ms': row['chunk_ms'], 'commit_ms': row['commit_ms'], 'ticks': row['ticks'], 'gpu': row['gpu'],
                    'start_up': row['start_up']}
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gpus', type=int, default=2)
    parser.add_argument('--folder', type=Path, required=True)
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=['robot', 'worlds', 'loss', 'cold'])
    parser.add_argument('--seconds', type=float, default=585.0, help='after which all ends')
    parser.add_argument('--large-chunks', type=int, default=50)
    parser.add_argument('--tiny', action='store_true', help='worlds on CPUs: tries the code, measures nothing')
    options = parser.parse_args()
    folder, gpus = options.folder, options.gpus
    folder.mkdir(parents=True, exist_ok=True)
    programs = Programs(folder, options.seconds)
    result = {**provenance(('torch', 'triton', 'diffusers')), 'environment': ENVIRONMENT, 'programs': programs.done,
              'chunks': {}, 'scaling': {}}

    def save() -> None:
        found = {each.name: chunk_ms(each) for each in sorted(folder.iterdir()) if each.is_dir()}
        result['chunks'] = {name: row for name, row in found.items() if row}
        for preset in TICK_S:
            one = result['chunks'].get(f'{preset}_1')
            for count in {2, gpus} if one else ():
                if several := result['chunks'].get(f'{preset}_{count}'):
                    result['scaling'][f'{preset}_{count}'] = round(one['chunk_ms']['p50'] / several['chunk_ms']['p50'], 3)
        write_result(result, folder / 'several_gpus.json')
    for part in options.parts:
        if part == 'robot':
            programs.run(ticks('robot_3b', gpus, folder, cold=True, options=('--periods', '0', '0.1')))
            save()
            programs.run(*(ticks(preset, 1, folder, seen=(at,)) for at, preset in enumerate(TICK_S)),
                         *([ticks('robot_3b', 2, folder, seen=(2, 3))] if gpus >= 4 else []))
            save()
            programs.run(ticks('robot_3b_4k', gpus, folder, cold=True))
        elif part == 'worlds':
            for dtype, limit in (('fp8', 160.0), ('bf16', 190.0)):
                programs.run(worlds(dtype, gpus, min(limit, programs.left()), options))
                save()
        elif part == 'pairs':
            limit = min(190.0, programs.left())
            programs.run(*(worlds(dtype, 2, limit, options, seen) for dtype, seen in (('fp8', (0, 1)), ('bf16', (2, 3)))))
            programs.run(*(ticks(preset, 2, folder, seen=seen) for preset, seen in zip(TICK_S, ((0, 1), (2, 3)))))
        elif part == 'ros':
            programs.run(Program('ros', 140.0, *script(
                'ros_tick.py', '--preset', 'robot_3b', '--backend', 'torch-fp8', '--gpus', str(gpus), '--rate', str(ROS_RATE),
                '--seconds', '40', '--load-shares', '--folder', str(folder / 'ros')), environment=ENVIRONMENT))
        elif part == 'loss':
            programs.run(Program('rank_loss', 110.0, *script('rank_loss.py', '--kills', '2', '--json',
                                                             str(folder / 'rank_loss.json')), environment=ENVIRONMENT))
            save()
            programs.run(Program('parallel', 90.0, *script(
                'parallel.py', '--gpus', str(gpus), '--parallel', 'sequence-fp8', '--json', str(folder / 'parallel.json')),
                environment=ENVIRONMENT))
        else:
            for count in (2, 3):
                programs.run(ticks('robot_3b', gpus, folder, name=f'cold_start_{count}', cold=True, options=('--ticks', '0')))
        save()
    print(json.dumps(result, indent=1))
    return 1 if any(each.get('exit_status') != 0 for each in programs.done) else 0


if __name__ == '__main__':
    raise SystemExit(main())
