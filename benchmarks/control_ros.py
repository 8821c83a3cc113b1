"""The rungs over real ROS topics, in real time: paired rooms, in short pieces that take turns.

    python benchmarks/control_ros.py --task intercept --seeds A:B --pieces pieces.jsonl --most 2 --json control_ros.json

The robot, the model and the gate are processes of their own. A piece is ``--rooms`` rooms of one rung; pieces that are in
``--pieces`` are not driven again, so the benchmark can be interrupted while the machine is busy.
"""
import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from result_file import product_ms, provenance, write_result

from worldmodel_ros.cli.evaluate_control_ros import judged, listen, summary
from worldmodel_ros.evaluate.control.episode import Episode
from worldmodel_ros.evaluate.control.summary import DEFINITIONS, p_values, table
from worldmodel_ros.evaluate.quality.seeds import parse_seeds
from worldmodel_ros.nodes.judging.listener import Heard

RUNGS = {'head': '0', 'one_step': '1', 'two_step': '2'}  # rounds of candidates
PROCESSES = ('world_model_node', 'engine_server', 'sim_robot', 'command_gate')
PACKAGES = ('mujoco', 'numpy', 'onnxruntime')


def cpu_seconds(name: str) -> float:
    """Return the CPU time so far of the descendants of this process whose command line contains ``name``."""
    found, parents = {}, {}
    for entry in Path('/proc').glob('[0-9]*'):
        try:
            fields = (entry / 'stat').read_text().rpartition(')')[2].split()
            parents[int(entry.name)] = int(fields[1])
            if name in (entry / 'cmdline').read_text():
                found[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')
        except OSError:
            pass  # it has ended
    def is_mine(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_mine(parents[pid]))
    return sum(seconds for pid, seconds in found.items() if is_mine(pid))


def drive(task: str, rung: str, seeds: range, extra: dict[str, str], log: Path) -> dict:
    """Drive a piece; return what was recorded, as JSON values."""
    bringup = {'model': 'tiny', 'forecast': 'tiny', 'candidate_rounds': RUNGS[rung], **extra}
    before, load, spent = product_ms(), os.getloadavg()[0], []
    # From the end of the first room on, so that loading the models does not count.
    heard = listen(task, seeds, bringup, log, lambda share: spent.append((time.monotonic(), *map(cpu_seconds, PROCESSES))))
    first, *_, last = np.array(spent)
    shares = ((last - first)[1:] / (last - first)[0]).round(4).tolist() if len(spent) > 1 else []
    return {'rung': rung, 'seeds': [seeds.start, seeds.stop], 'product_ms': [round(before, 3), round(product_ms(), 3)],
            'load_before': load, 'cores': dict(zip(PROCESSES, shares, strict=False)),
            'episodes': [asdict(each) for each in judged(heard, len(seeds))],
            'heard': {'tiers': heard.tiers, 'chosen': heard.chosen, 'latencies': heard.latencies, 'vetoed': heard.vetoed,
                      'compared': heard.compared}}


def result(task: str, pieces: list[dict]) -> dict:
    """Return the numbers of all pieces."""
    episodes: dict[tuple[str, str], list[Episode]] = {}
    heard = {rung: Heard() for rung in RUNGS if any(piece['rung'] == rung for piece in pieces)}
    for piece in pieces:
        episodes.setdefault((task, piece['rung']), []).extend(Episode(**each) for each in piece['episodes'])
        of, told = heard[piece['rung']], piece['heard']
        of.tiers += Counter(told['tiers'])
        of.chosen += Counter(told['chosen'])
        of.latencies += told['latencies']
        of.vetoed += told['vetoed']
        of.compared += told['compared']
    return {'definitions': {name: DEFINITIONS[name] for name in ('success', 'contacts', 'seconds', 'n', 'p_values')},
            'product_of_384x384_float32_ms': sorted(ms for piece in pieces for ms in piece['product_ms']),
            'load_before_pieces': sorted(round(piece['load_before'], 2) for piece in pieces),
            'tasks': table(episodes), 'p_values': p_values(episodes),
            'served': {rung: summary(told) for rung, told in heard.items()},
            'cores': {rung: [piece['cores'] for piece in pieces if piece['rung'] == rung and piece.get('cores')]
                      for rung in heard},
            'rooms': {rung: {each.seed: each.success for each in episodes.get((task, rung), [])} for rung in heard}}


def pieces_of(seeds: range, rooms: int, rungs: list[str]) -> Iterator[tuple[str, range]]:
    """Yield each rung and its rooms, alternating the order so that no rung always comes first."""
    for number, start in enumerate(range(seeds.start, seeds.stop, rooms)):
        for rung in rungs[::1 if number % 2 == 0 else -1]:
            yield rung, range(start, min(start + rooms, seeds.stop))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--task', default='intercept')
    parser.add_argument('--seeds', type=parse_seeds, required=True)
    parser.add_argument('--rungs', nargs='+', default=['one_step', 'two_step'], choices=RUNGS)
    parser.add_argument('--rooms', type=int, default=10, help='of a piece')
    parser.add_argument('--most', type=int, default=1000, help='pieces to drive now')
    parser.add_argument('--pieces', type=Path, required=True, help='file of JSON lines, to go on from')
    parser.add_argument('--log', type=Path, default=Path('out/control/log'))
    parser.add_argument('--set', nargs='*', default=[], metavar='NAME:=VALUE', help='more arguments of the bring-up')
    parser.add_argument('--json', type=Path, help='file for the result')
    chosen = parser.parse_args()
    driven = [json.loads(line) for line in chosen.pieces.read_text().splitlines()] if chosen.pieces.exists() else []
    done = {(piece['rung'], piece['seeds'][0]) for piece in driven}
    todo = [(rung, seeds) for rung, seeds in pieces_of(chosen.seeds, chosen.rooms, chosen.rungs)
            if (rung, seeds.start) not in done]
    for rung, seeds in todo[:chosen.most]:
        driven.append(drive(chosen.task, rung, seeds, dict(each.split(':=', 1) for each in chosen.set), chosen.log))
        with chosen.pieces.open('a') as stream:
            stream.write(json.dumps(driven[-1]) + '\n')
    write_result({**provenance(PACKAGES), 'seeds': f'{chosen.seeds.start}:{chosen.seeds.stop}', 'task': chosen.task,
                  'rungs': 'head, one_step, two_step: candidate_rounds 0, 1, 2, with which the ladder decides at each tick',
                  'set': chosen.set,
                  **result(chosen.task, driven)}, chosen.json, show=True)


if __name__ == '__main__':
    main()
