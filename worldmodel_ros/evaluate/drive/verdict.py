"""The result of an evaluation in words: one sentence to read first, and what to do about it."""
from __future__ import annotations

from dataclasses import dataclass

from worldmodel_ros.control.ladder import Tier
from .evaluation import Evaluation

# Below this, the autoencoder alone loses more of the camera's images than the model's predictions do in distribution: 36 dB in
# the simulator's rooms, against some 27 dB of the predictions.
FAMILIAR_DB = 28.0
DEADLINE_SHARE = 0.95  # of the ticks by the best tier

_TIERS = {Tier.TWO_STEP: 'the two-step model', Tier.ONE_STEP: 'the one-step model', Tier.PLAN_ONLY: 'a plan alone',
          Tier.LAST_PLAN: 'the last plan', Tier.STOP: 'a stop', Tier.NONE: 'nothing'}

GOOD, FAIR, BAD = 'good', 'fair', 'bad'


@dataclass(frozen=True)
class Verdict:
    """``level``: good, fair or bad. ``sentence``: the result. ``remarks``: what else matters, and what to do."""

    level: str
    sentence: str
    remarks: tuple[str, ...]

    def to_dict(self) -> dict:
        return {'level': self.level, 'sentence': self.sentence, 'remarks': list(self.remarks)}


def judge(evaluation: Evaluation) -> Verdict:
    """Judge the numbers of one evaluation by what a robot would need."""
    level, sentence, remarks = _prediction(evaluation)
    for bad, text in (_policy(evaluation), _deadline(evaluation), _health(evaluation)):
        if text:
            remarks.append(text)
        if bad and level == GOOD:
            level = FAIR
    return Verdict(level, sentence, tuple(remarks))


def _prediction(evaluation: Evaluation) -> tuple[str, str, list[str]]:
    numbers = evaluation.numbers
    if not numbers['pace']['ticks']:
        return BAD, 'This bag has no image that the model can use.', []
    if not evaluation.has_actions:
        return FAIR, 'Predictions cannot be judged without the executed actions.', [
            'Record the commands together with the camera, or name their topic in the --config file.']
    gain = numbers['prediction']['moving']['gain_db']
    if gain['mean'] is None:
        return FAIR, 'The robot hardly moves in this recording: no prediction could beat repeating the last frame.', []
    return _gain(gain, numbers['prediction']['moving']['gain_ssim'], numbers['reconstruction_db']['mean'])


def _gain(psnr: dict, ssim: dict, known: float) -> tuple[str, str, list[str]]:
    """By the gain over copying the last image, in both measures: a grey blur has a good PSNR and a bad SSIM."""
    by = f'{_signed(psnr, 1, " dB")} in PSNR, {_signed(ssim, 2)} in SSIM'
    advice = ['Do not let the model drive here before it is fine-tuned on recordings like this one: `worldmodel finetune`.']
    strange = [f'Even the autoencoder alone reconstructs this camera\'s images with only {known:.1f} dB (familiar places: '
               f'{FAMILIAR_DB:.0f} dB or more): the place or the camera is unlike the training data.']
    better = _low(psnr) > 0.0 and _low(ssim) > 0.0
    worse = _high(psnr) < 0.0 or (_high(ssim) < 0.0 and _low(psnr) <= 0.0)
    result = 'better than' if better else 'worse than' if worse else 'no better than'
    if known < FAMILIAR_DB:
        sentence = f'Out of distribution: predictions are {result} repeating the last frame ({by}).'
        return FAIR if better else BAD, sentence, strange + advice
    sentence = f'Predictions on this recording are {result} repeating the last frame ({by}).'
    return GOOD if better else BAD if worse else FAIR, sentence, [] if better else advice


def _deadline(evaluation: Evaluation) -> tuple[bool, str]:
    deadline = evaluation.deadline
    if deadline is None or not deadline.ticks:
        return False, ''
    budget, share = f'{deadline.budget.deadline * 1e3:.0f} ms', deadline.share(Tier.TWO_STEP)
    where = deadline.times.machine.get('cpu') or 'the measured machine'
    tiers = ', '.join(f'{_percent(deadline.share(tier))} by {words}'
                      for tier, words in _TIERS.items() if deadline.tiers[tier])
    if deadline.tiers[Tier.STOP] or deadline.tiers[Tier.NONE]:
        return True, f'The deadline of {budget} would not always have been met; of the ticks, {tiers} (on {where}).'
    return share < DEADLINE_SHARE, f'The deadline of {budget} would have been met; of the ticks, {tiers} (on {where}).'


def _health(evaluation: Evaluation) -> tuple[bool, str]:
    serious = [finding for finding in evaluation.findings if finding.severity != 'info']
    if not serious:
        return False, ''
    problems = 'one problem' if len(serious) == 1 else f'{len(serious)} problems'
    return True, f'The recording itself has {problems}: see Data health.'


def _policy(evaluation: Evaluation) -> tuple[bool, str]:
    policy = evaluation.numbers['policy']
    if not policy['windows']:
        return False, ''
    plans = policy.get('known_goal') or policy['goals'][policy['best_goal']]
    constant = policy.get('known_goal', policy)['mean']  # over the same windows
    if plans['relative_rmse'] < constant['relative_rmse']:
        return False, ''
    return True, ('The planned commands are no closer to the recorded ones than a constant command: the model would not '
                  'drive as this robot was driven.')


def _low(interval: dict) -> float:
    return interval['mean'] if interval['low'] is None else interval['low']


def _high(interval: dict) -> float:
    return interval['mean'] if interval['high'] is None else interval['high']


def _signed(interval: dict, digits: int, unit: str = '') -> str:
    """A mean with its interval."""
    def show(value: float) -> str:
        return f'{value:+.{digits}f}'.replace('-', '\u2212')
    if interval['low'] is None:
        return f'{show(interval["mean"])}{unit}'
    return f'{show(interval["mean"])}{unit} [{show(interval["low"])}, {show(interval["high"])}]'


def _percent(share: float) -> str:
    """Never rounded up to all, nor down to none."""
    if share in (0.0, 1.0):
        return 'all' if share else 'none'
    return f'{min(99.9, max(0.1, share * 100)):.1f} %'
