"""What the policy learns: the expert's next commands for every goal, or a search's, after the actions in progress."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from worldmodel_ros.model.action_head import FlowPolicy, RegressionPolicy
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.train.data.episodes import SAME_ACTION, Episodes

FREE_SHARE = 0.5  # of the frames at which no action is in progress, as for a tick that is in time
FLOW_SCALE = 4.0  # makes small errors weigh as much as in the regression's loss


@dataclass
class PolicyDraw:
    """Random draws of the policy's loss at C frames of B clips: noise (B, C, goals, K, A), its level (B, C, goals) and
    delay (B, C), how many actions of the chunk are in progress."""

    noise: Tensor
    level: Tensor
    delay: Tensor


def draw_policy(preset: Preset, batch: int, frames: int, device: torch.device, generator: torch.Generator
                ) -> PolicyDraw:
    """Draw for clips of ``frames`` frames, the last of which have no whole chunk after them."""
    k, goals = preset.chunk_frames, len(preset.goals)
    count = frames - k
    noise = torch.randn(batch, count, goals, k, preset.actions, device=device, generator=generator)
    level = torch.rand(batch, count, goals, device=device, generator=generator)
    delay = torch.randint(1, k, (batch, count), device=device, generator=generator)
    free = torch.rand(batch, count, device=device, generator=generator) < FREE_SHARE
    return PolicyDraw(noise, level, torch.where(free, 0, delay))


def command_targets(expert: Tensor, actions: Tensor, delay: Tensor, preset: Preset) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chunks to imitate, after the first ``delay`` executed actions of each.

    expert (B, F, goals, A), labels; actions (B, F, A), the one that led to each frame; delay (B, F - K). Returns the
    executed actions that would be the prefix (B, F - K, K, A), targets (B, F - K, goals, K, A) and a mask
    (B, F - K, goals, K) of the actions that are to be learned. Action j of the chunk at frame f is the expert's label
    at frame f + j. Labels depend on what was executed, so from the delay on they belong to one plan for as long as the
    robot did what the expert would have done.
    """
    k, count = preset.chunk_frames, delay.shape[1]
    span = torch.tensor([high - low for low, high in zip(preset.action_low, preset.action_high)], device=expert.device)
    targets = torch.stack([expert[:, j:j + count] for j in range(k)], 3)
    prefix = torch.stack([actions[:, 1 + j:1 + j + count] for j in range(k)], 2)
    followed = ((prefix[:, :, None] - targets).abs() < SAME_ACTION * span).all(-1)
    under_way = torch.arange(k, device=delay.device) < delay[..., None, None]
    before = torch.cat([torch.ones_like(followed[..., :1]), (followed | under_way)[..., :-1]], -1)
    return prefix, targets, before.cumprod(-1).bool() & ~under_way


def check_labels(episodes: Episodes, search: bool) -> None:
    """Raise ValueError for ``search`` in labelled episodes without its labels."""
    if search and episodes.labelled and episodes.search is None:
        raise ValueError('search needs the labels of a search, which these episodes lack: simulate them again, or set '
                         'it to false')


def unseen(episodes: Episodes, clip: tuple[Tensor, Tensor], preset: Preset) -> Tensor:
    """Return which goals neither a frame nor the window before it shows, bool (B, F, goals), for clips of (B, 1) episodes and
    (B, F) frames."""
    window = preset.window_frames + 1
    visible = F.pad(episodes.visible[clip].float().transpose(1, 2), (window - 1, 0))
    return F.max_pool1d(visible, window, 1).transpose(1, 2) == 0.0


def policy_labels(episodes: Episodes, clip: tuple[Tensor, Tensor], preset: Preset, search: bool) -> Tensor:
    """Return the commands (B, F, goals, A) to learn on clips: the expert's, or with ``search`` those of a search for
    ``unseen`` goals, where nothing that the policy sees reveals what the expert knows."""
    expert = episodes.expert[clip]
    if not search:
        return expert
    return torch.where(unseen(episodes, clip, preset)[..., None], episodes.search[clip][:, :, None], expert)


def imitation_loss(head: FlowPolicy | RegressionPolicy, features: Tensor, expert: Tensor, actions: Tensor,
                   observed: Tensor, drawn: PolicyDraw) -> Tensor:
    """Return the policy's loss at the frames of clips, from their features (B, F, P, D), where ``observed`` (B, F)."""
    preset, count = head.preset, drawn.delay.shape[1]
    flow = isinstance(head, FlowPolicy)
    delay = drawn.delay if flow else torch.zeros_like(drawn.delay)  # a regression has no use for what is in progress
    prefix, targets, mask = command_targets(expert, actions, delay, preset)
    mask = mask & observed[:, :count, None, None]
    features, targets = features[:, :count].flatten(0, 1), head.normalised(targets).flatten(0, 1)
    if flow:
        given = torch.arange(preset.chunk_frames, device=delay.device) < delay.flatten()[:, None, None]
        level = torch.where(given, 1.0, drawn.level.flatten(0, 1)[..., None])
        clean = torch.where(given[..., None], head.normalised(prefix).flatten(0, 1)[:, None], targets)
        noisy = (1 - level[..., None]) * drawn.noise.flatten(0, 1) + level[..., None] * clean
        plan = head.predict(head.context(head.look(features)), noisy, level).float()
        # A flow needs the mean of what may follow, so no robust error; the ramp weight is that of the images.
        error = FLOW_SCALE * (0.9 * level + 0.1) * (plan - targets).square().mean(-1)
    else:
        error = F.smooth_l1_loss(head.predict(features).float(), targets, reduction='none', beta=0.1).mean(-1)
    return (error.unflatten(0, delay.shape) * mask).sum() / mask.sum().clamp_min(1)
