"""Whether a scene forecast trained on longer clips knows better what it does not see, and crosses more streets because of it.

    python benchmarks/longer_memory.py --out out/memory --train 480 --seeds 3280000:3280200 --json longer_memory.json

In one call: the errors of the shipped weights by how long a shuttle was not seen, training that continues from them, with
episodes in which the robot looks away, the errors after it, the paired rooms of both with one round of candidates, and the AUC
of contact of both. Whatever a time limit cuts off is absent from the result.
"""
import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from result_file import ROOT, provenance, write_result

from worldmodel_ros.engine.forecast.loading import forecast_folder
from worldmodel_ros.evaluate.control.summary import mcnemar
from worldmodel_ros.evaluate.quality.seeds import parse_seeds

SHIPPED = 'tiny'
CLIP = 72       # frames: 7.2 s, where the shipped weights had 4
FIRST = 300000  # seed of the episodes; the shipped weights were trained on lower ones
JUDGING = 192   # episodes that errors are measured on


def call(*arguments: str, seconds: float) -> str | None:
    """Return the standard output of a Python program; None if it timed out, or failed, which it reports itself."""
    begun = time.monotonic()
    try:
        done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, timeout=seconds, text=True, cwd=ROOT,
                              env={**os.environ, 'PYTHONPATH': str(ROOT)}, check=False)
    except subprocess.TimeoutExpired:
        print(f'{arguments}: cut off after {seconds:g} s', file=sys.stderr)
        return None
    print(f'{arguments}: {time.monotonic() - begun:.0f} s, exit code {done.returncode}', file=sys.stderr)
    return done.stdout if done.returncode == 0 else None


def train(out: Path, seconds: float, simulate: float, episodes: int, chosen: argparse.Namespace) -> dict | None:
    """Continue training from the shipped weights for ``seconds``; return what the training reports, including its errors."""
    told = call('-m', 'worldmodel_ros.train.scene.run', '--resume', str(forecast_folder(SHIPPED)), '--out', str(out),
                '--seconds', str(seconds), '--simulate', str(simulate), '--episodes', str(episodes), '--first-seed', str(FIRST),
                '--begin', str(min(episodes, chosen.begin) if seconds else chosen.judging), '--clip', str(CLIP),
                '--judged', str(chosen.judged), '--batch', str(chosen.batch), '--rate', str(chosen.rate),
                '--workers', str(chosen.workers),
                seconds=seconds + simulate + chosen.slack)
    return json.loads(told.splitlines()[-1]) if told else None


def crossed(out: Path, forecasts: dict[str, str], chosen: argparse.Namespace) -> dict:
    """Return success by task of each forecast, in rooms that both have driven."""
    rooms: dict[str, dict[tuple[str, int], bool]] = {name: {} for name in forecasts}
    for name, folder in forecasts.items():
        file = out / f'{name}.jsonl'
        call('-m', 'worldmodel_ros.cli', 'evaluate', 'control', '--seeds', f'{chosen.seeds.start}:{chosen.seeds.stop}',
             '--tasks', *chosen.tasks, '--controllers', 'one_step', '--forecast', folder, '--workers', str(chosen.workers),
             '--episodes', str(file), '--json', str(out / f'{name}.json'), seconds=chosen.drive)
        for row in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
            rooms[name][row['task'], row['seed']] = row['episode']['success']
    found = {}
    for task in chosen.tasks:
        both = [key for key in rooms['shipped'] if key in rooms['longer'] and key[0] == task]
        won = sum(rooms['longer'][key] and not rooms['shipped'][key] for key in both)
        lost = sum(rooms['shipped'][key] and not rooms['longer'][key] for key in both)
        found[task] = {'n': len(both), **{name: round(sum(rooms[name][key] for key in both) / max(1, len(both)), 4)
                                          for name in forecasts}, 'won': won, 'lost': lost, 'p': mcnemar(won, lost)}
    return found


def contacts(out: Path, forecasts: dict[str, str], chosen: argparse.Namespace) -> dict:
    """Return AUC of contact by forecast, as in predicted_contacts.json."""
    found = {}
    for name, folder in forecasts.items():
        file = out / f'{name}_contacts.json'
        call('benchmarks/predicted_contacts.py', '--seeds', f'{chosen.seeds.start}:{chosen.seeds.start + chosen.contact_rooms}',
             '--tasks', 'street', '--forecast', folder, '--json', str(file), seconds=chosen.contacts)
        if file.exists():
            found[name] = json.loads(file.read_text())['tasks']
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for weights and episodes')
    parser.add_argument('--train', type=float, default=480.0, help='s of training')
    parser.add_argument('--simulate', type=float, default=460.0, help='s for which episodes are simulated meanwhile')
    parser.add_argument('--episodes', type=int, default=20_000, help='that are kept, of 1.4 MB each on the device')
    parser.add_argument('--begin', type=int, default=1_000, help='episodes with which the training begins')
    parser.add_argument('--judging', type=int, default=JUDGING, help='episodes that the shipped weights are judged on')
    parser.add_argument('--judged', type=int, default=1024, help='clips that errors are taken on')
    parser.add_argument('--batch', type=int, default=72, help='clips a step')
    parser.add_argument('--rate', type=float, default=3e-4)
    parser.add_argument('--seeds', type=parse_seeds, default=range(3280000, 3280200), help='rooms to drive in')
    parser.add_argument('--tasks', nargs='+', default=['street', 'intercept'])
    parser.add_argument('--drive', type=float, default=90.0, help='s for the rooms of each forecast')
    parser.add_argument('--contacts', type=float, default=60.0, help='s for the contacts of each forecast')
    parser.add_argument('--contact-rooms', type=int, default=10)
    parser.add_argument('--slack', type=float, default=90.0, help='s more than training, for loading and judging')
    parser.add_argument('--workers', type=int, default=os.cpu_count())
    parser.add_argument('--json', type=Path, help='file for the result')
    chosen = parser.parse_args()
    chosen.out = chosen.out.resolve()
    chosen.out.mkdir(parents=True, exist_ok=True)
    result = {**provenance(), 'clip': CLIP}

    def keep(name: str, value: object) -> None:
        result[name] = value
        write_result(result, chosen.json)
    keep('shipped', train(chosen.out / 'judged', 0.0, chosen.slack, max(256, 2 * chosen.judging), chosen))
    keep('longer', train(chosen.out / 'longer', chosen.train, chosen.simulate, chosen.episodes, chosen))
    forecasts = {'shipped': SHIPPED, 'longer': str(chosen.out / 'longer')}
    keep('rooms', {'seeds': f'{chosen.seeds.start}:{chosen.seeds.stop}', 'tasks': crossed(chosen.out, forecasts, chosen)})
    keep('auc_of_contact', contacts(chosen.out, forecasts, chosen))
    print(json.dumps(result, indent=1))


if __name__ == '__main__':
    main()
