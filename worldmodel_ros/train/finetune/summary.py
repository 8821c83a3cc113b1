"""The result of a fine-tuning for a terminal."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def in_words(result: Mapping[str, Any]) -> str:
    """Return a table of ``fine_tune``'s metrics, before and after, and a verdict."""
    before, after = result['before'], result['after']
    seconds = sum(part['end_s'] - part['start_s'] for part in result['split']['held_out'])
    return '\n'.join([
        f'held out: {seconds:.1f} s, judged at {after["moments"]} moments (two-step model, while moving)',
        'ahead    PSNR [dB]: copied  before  after    SSIM: copied  before  after',
        *_rows(before['prediction']['two_step'], after['prediction']['two_step']),
        f'autoencoder alone: {before["autoencoder_db"]:.1f} dB before, {after["autoencoder_db"]:.1f} after',
        *_what_if(before['what_if'], after['what_if']), _verdict(after['prediction']['two_step'])])


def _rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for horizon, row in after.items():
        values = [(source[name]['mean'], digits) for digits, names in (
            (1, ('copy_psnr_db', 'psnr_db')), (2, ('copy_ssim', 'ssim')))
            for source, name in ((row, names[0]), (before[horizon], names[1]), (row, names[1]))]
        cells = ['   -' if value is None else f'{value:.{digits}f}' for value, digits in values]
        yield (f'{horizon:>4} s {cells[0]:>20} {cells[1]:>7} {cells[2]:>6} {cells[3]:>15} {cells[4]:>7} {cells[5]:>6}')


def _what_if(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    if after['moments']:
        shares = [100.0 * source['true_is_nearer'] for source in (before, after)]
        yield (f'what if: the true actions lead nearer to what came than actions that are {after["other_actions"]} in '
               f'{shares[0]:.0f} % of {after["moments"]} moments before, {shares[1]:.0f} % after '
               '(50 %: its actions do not count)')


def _verdict(after: Mapping[str, Any]) -> str:
    judged = {horizon: row for horizon, row in after.items() if row['gain_db']['mean'] is not None}
    if not judged:
        return 'The robot does not move in what was held out: nothing can be said. Hold out a drive in which it does.'
    worse = [horizon for horizon, row in judged.items() if row['gain_db']['mean'] <= 0.0]
    if worse:
        return (f'At {", ".join(worse)} s it is still no better than the last frame repeated: record more of the '
                'place, check the mapping of the actions, or give it more --minutes.')
    blurred = [horizon for horizon, row in judged.items() if row['gain_ssim']['mean'] <= 0.0]
    unsure = [horizon for horizon, row in judged.items() if not (row['gain_db']['low'] or 0.0) > 0.0]
    return 'In PSNR better than the last frame repeated at every horizon' + (
        f'; at {", ".join(unsure)} s what is held out is too short to tell that from chance' if unsure else
        ', by the whole 95 % interval') + (
        f'; but blurred: no better in SSIM at {", ".join(blurred)} s.' if blurred else ', and in SSIM too.')
