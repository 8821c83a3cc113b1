"""Computes the numbers of one report from records: means over what was judged, with intervals over rooms."""
from __future__ import annotations

from collections import Counter

import numpy as np

from worldmodel_ros.evaluate.drive.bootstrap import mean_interval
from .horizons import HORIZONS
from .ranking import HORIZON as RANKING_HORIZON

WITHIN_DEG = 5.0
MISSED_DEG = 90.0  # the error that stands for an object that is not in the image at all: the whole field of view
# What is compared at each horizon: gain in dB of the first over the second, on the same moments.
_PAIRS = {'two_step_over_copy_last': ('two_step', 'copy_last'), 'one_step_over_copy_last': ('one_step', 'copy_last'),
          'two_step_over_teacher': ('two_step', 'teacher'), 'one_step_over_teacher': ('one_step', 'teacher'),
          'two_step_over_truncated': ('two_step', 'truncated'),
          'deployed_over_two_step': ('deployed_two_step', 'two_step'),
          'one_step_over_truncated': ('one_step', 'truncated_one_step')}


def horizons(records: list[dict]) -> dict:
    """Return numbers by horizon and way to predict: see ``_way``; ``gains_db``: paired differences with intervals."""
    found = {}
    for horizon in HORIZONS:
        rows = [r for r in records if r['horizon'] == horizon and r['moving']]
        ways = {way: [r for r in rows if r['way'] == way] for way in dict.fromkeys(r['way'] for r in rows)}
        found[f'{horizon:.1f}'] = {way: _way(of_way) for way, of_way in ways.items()} | {
            'gains_db': {name: _gain(ways[a], ways[b]) for name, (a, b) in _PAIRS.items() if a in ways and b in ways}}
    return found


def by_driver(records: list[dict]) -> dict:
    """Return the two-step numbers of episodes by the expert, and of the others."""
    parts = {'expert': [r for r in records if r['driver'] == 'expert'],
             'others': [r for r in records if r['driver'] != 'expert']}
    return {name: {horizon: {way: values[way] for way in ('copy_last', 'two_step', 'simulator') if way in values}
                   for horizon, values in horizons(rows).items()} for name, rows in parts.items() if rows}


def _way(rows: list[dict]) -> dict:
    """Means over the moments. ``bearing_...`` are of the goal in the expert's episodes, where it is visible in the true
    image; ``all_objects``: the same of every object, in every episode."""
    rooms = _rooms(rows)
    goals = _bearings([(r['seed'], *r['objects'][r['goal']]) for r in rows if r['goal'] is not None])
    found = {'psnr_db': _mean(rows, 'psnr_db'), 'psnr_interval': _interval(rows, 'psnr_db'),
             'ssim': _mean(rows, 'ssim', 4),
             'sharpness_of_true': _median(np.array([r['sharpness'] for r in rows])),
             'moments': len(rows), 'rooms': len(set(rooms)), **goals,
             'all_objects': _bearings([(r['seed'], *o) for r in rows for o in r['objects']])}
    if rows[0]['position_error_m'] is not None:
        found |= {name: _median(np.array([r[name] for r in rows])) for name in ('position_error_m', 'yaw_error_deg')}
    return found


def _bearings(objects: list[tuple]) -> dict:
    """Of objects (seed, visible at the start, error in deg, estimated over true distance): ``bearing_deg`` is the median
    error, MISSED_DEG for one that is not found; ``..._in_view``: of those that were visible at the start too."""
    errors = np.array([MISSED_DEG if o[2] is None else o[2] for o in objects])
    in_view = np.array([o[1] for o in objects], bool)
    ratios = np.array([o[3] for o in objects if o[3]])
    interval = mean_interval((errors < WITHIN_DEG).astype(float), _labels([o[0] for o in objects]))
    return {'bearing_deg': _median(errors), 'bearing_within_5_deg': _share(errors < WITHIN_DEG),
            'bearing_within_5_deg_interval': _bounds(interval),
            'bearing_within_5_deg_in_view': _share(errors[in_view] < WITHIN_DEG), 'found': _share(errors < MISSED_DEG),
            'cases': len(objects), 'cases_in_view': int(in_view.sum()),
            'distance_ratio': _median(ratios), 'distance_error': _median(np.abs(ratios - 1.0))}


def what_if(records: list[dict]) -> dict:
    """Return ``what_if_ranking`` of two steps, and details of how branches are told apart; ``contact``, ``free``: of branches
    on which something is hit, and of the others."""
    details = {}
    for way in dict.fromkeys(r['way'] for r in records):
        rows = [r for r in records if r['way'] == way]
        hits = np.array([r['nearest'] == r['branch'] for r in rows], float)
        wrong = Counter(f'{r["branch"]} taken for {r["nearest"]}' for r in rows if r['nearest'] != r['branch'])
        details[way] = {'share': _share(hits), 'interval': _bounds(mean_interval(hits, _labels(_rooms(rows)))),
                        'branches': len(rows), 'chance': 0.2, 'mistakes': dict(wrong.most_common()),
                        'action_sensitivity': round(float(np.mean([r['sensitivity'] for r in rows])), 3)}
        for name, of in (('contact', True), ('free', False)):
            chosen = hits[[r['contact'] == of for r in rows]]
            details[way][name] = {'share': _share(chosen), 'branches': len(chosen)}
    share = details['two_step']['share'] if details else None
    return {'what_if_ranking': {f'{RANKING_HORIZON:.1f}': share}, 'what_if': details}


def drift(records: list[dict]) -> dict:
    """Return ratios of the end to the beginning, over all long rollouts; 1 is no drift. ``true``: of the true episodes.

    ``colour_ratio``: of the six means and standard deviations of the channels, the one that changed most.
    ``..._of_true``: the long rollouts' over the true episodes', at the beginning and at the end.
    """
    if not records:
        return {}
    imagined, true = ([r[name] for r in records] for name in ('imagined', 'true'))
    found = {**_ratios(imagined), 'true': _ratios(true)}
    for name in ('sharpness', 'response', 'fork'):
        found[f'{name}_of_true'] = {end: _ratio(_total(imagined, end, name), _total(true, end, name))
                                    for end in ('first', 'last')}
    return found | {'dreams': len(records), 'seconds': records[0]['seconds'], 'seeds': [r['seed'] for r in records],
                    'each': [{'seed': r['seed'], **_ratios([r['imagined']])} for r in records]}


def _ratios(ends: list[dict]) -> dict:
    colours = np.mean([[e['last']['colours'], e['first']['colours']] for e in ends], 0)
    changes = colours[0] / np.maximum(colours[1], 1e-6)
    return {'sharpness_ratio': _ratio(_total(ends, 'last', 'sharpness'), _total(ends, 'first', 'sharpness')),
            'colour_ratio': round(float(changes[np.abs(np.log(np.maximum(changes, 1e-6))).argmax()]), 3),
            'action_response_ratio': _ratio(_total(ends, 'last', 'response'), _total(ends, 'first', 'response')),
            'fork_difference_ratio': _ratio(_total(ends, 'last', 'fork'), _total(ends, 'first', 'fork')),
            'histogram_distance': round(float(np.mean([e['histogram_distance'] for e in ends])), 3)}


def _total(ends: list[dict], end: str, name: str) -> float:
    return float(sum(e[end][name] for e in ends))


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 3) if abs(b) > 1e-9 else None


def closed_loop(records: list[dict]) -> dict:
    """Return by driver: ``success``, the share that reached the goal in time; ``seconds``, the median of those;
    ``collisions``, steps with a contact per episode; ``jump_...``: see closed_loop.Episode."""
    found = {}
    for name in dict.fromkeys(r['driver'] for r in records):
        rows = [r for r in records if r['driver'] == name]
        jumps = [r['jumps'] for r in rows if r['jumps']]
        found[name] = {
            'success': _share(np.array([r['reached'] for r in rows])), 'episodes': len(rows),
            'collisions': round(float(np.mean([r['contacts'] for r in rows])), 3),
            'episodes_with_collision': sum(r['contacts'] > 0 for r in rows),
            'seconds': _median(np.array([r['seconds'] for r in rows if r['reached']]), 2)}
        if jumps:
            v, w = np.mean(jumps, 0)
            found[name] |= {'jump_m_s': round(float(v), 4), 'jump_rad_s': round(float(w), 4)}
    return found


def _gain(a: list[dict], b: list[dict]) -> dict:
    differences = [x['psnr_db'] - y['psnr_db'] for x, y in zip(a, b, strict=True)]
    return mean_interval(np.array(differences), _labels(_rooms(a))).to_dict()


def _rooms(rows: list[dict]) -> list[int]:
    return [r['seed'] for r in rows]


def _labels(rooms: list[int]) -> np.ndarray:
    """Moments of one room share what is easy or hard about it, so they are drawn together."""
    return np.unique(rooms, return_inverse=True)[1]


def _interval(rows: list[dict], name: str) -> list[float | None]:
    return _bounds(mean_interval(np.array([r[name] for r in rows]), _labels(_rooms(rows))))


def _bounds(interval) -> list[float | None]:
    return [None if bound is None else round(bound, 3) for bound in (interval.low, interval.high)]


def _mean(rows: list[dict], name: str, digits: int = 2) -> float:
    return round(float(np.mean([r[name] for r in rows])), digits)


def _median(values: np.ndarray, digits: int = 3) -> float | None:
    return round(float(np.median(values)), digits) if len(values) else None


def _share(hits: np.ndarray) -> float | None:
    return round(float(np.mean(hits)), 4) if len(hits) else None
