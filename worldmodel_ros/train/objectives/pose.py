"""An auxiliary task on simulated episodes: how far the robot's motion deviates from its commands. Its head is not shipped.

Wheel gains are not quite nominal, and commands take effect late. Over seconds this is the main reason why a predicted
view points elsewhere than the true one. The past deviation can be seen, and that of the next chunk follows from it; so
the features must predict both.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel_ros.model.presets import Preset

SCALE = 20.0  # labels in units of 0.05 m and 0.05 rad: of order one over a window


class PoseHead(nn.Module):
    """Maps features (B, N, P, D) of frames to scaled deviations (B, N, 3): forward, to the left, turn."""

    def __init__(self, preset: Preset):
        super().__init__()
        self.squeeze = nn.Linear(preset.width, 16)
        self.net = nn.Sequential(nn.Linear(16 * preset.tokens, 128), nn.SiLU(), nn.Linear(128, 6))

    def forward(self, features: Tensor, ahead: bool) -> Tensor:
        """With ``ahead``, for imagined frames, from the frame before their chunk; else for committed ones, over the window
        before each."""
        out = self.net(self.squeeze(features).flatten(2)).float()
        return out[..., :3] if ahead else out[..., 3:]


def pose_errors(head: PoseHead, committed: Tensor, noisy: Tensor, poses: Tensor, actions: Tensor, starts: Tensor,
                preset: Preset) -> tuple[Tensor, Tensor]:
    """Return the errors of both deviations: of the committed frames (B, F), zero where less than a window is before them,
    and of the noisy ones (B, N).

    poses (B, F, 3): x, y [m] and yaw [rad] in the world; actions (B, F, 2): the linear and angular velocity commanded
    before each frame; starts (chunks,) of the noisy chunks.
    """
    k, f = preset.chunk_frames, poses.shape[1]
    told = dead_reckoning(actions, preset.step_period)
    frame = torch.arange(f, device=poses.device)
    origin = (starts - 1).repeat_interleave(k)
    index = origin + 1 + torch.arange(k, device=poses.device).repeat(len(starts))
    back = (frame - preset.window_frames + 1).clamp_min(0)

    def error(features: Tensor, origin: Tensor, index: Tensor, ahead: bool) -> Tensor:
        deviation = displacement(poses, origin, index) - displacement(told, origin, index)
        return F.smooth_l1_loss(head(features, ahead), SCALE * deviation, reduction='none', beta=0.5).mean(-1)

    past = error(committed, back, frame, ahead=False)
    return torch.where(frame >= preset.window_frames - 1, past, 0.0), error(noisy, origin, index, ahead=True)


def dead_reckoning(actions: Tensor, period: float) -> Tensor:
    """Return the poses (B, F, 3) of a robot that executes commands (B, F, 2) in m/s and rad/s exactly."""
    yaw = (actions[..., 1] * period).cumsum(1)
    middle, step = yaw - 0.5 * period * actions[..., 1], actions[..., 0] * period
    return torch.stack([(step * middle.cos()).cumsum(1), (step * middle.sin()).cumsum(1), yaw], -1)


def displacement(poses: Tensor, origin: Tensor, index: Tensor) -> Tensor:
    """Return poses (B, N, 3) at frames ``index`` (N,) relative to those at ``origin`` (N,), from poses (B, F, 3)."""
    before, after = poses[:, origin], poses[:, index]
    delta, yaw = after[..., :2] - before[..., :2], before[..., 2]
    turn = torch.remainder(after[..., 2] - yaw + torch.pi, 2 * torch.pi) - torch.pi
    return torch.stack([delta[..., 0] * yaw.cos() + delta[..., 1] * yaw.sin(),
                        delta[..., 1] * yaw.cos() - delta[..., 0] * yaw.sin(), turn], -1)
