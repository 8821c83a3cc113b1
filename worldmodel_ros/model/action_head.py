"""Heads on the DiT's features: the policy's command chunk, and the outcome of a predicted chunk.

Both policies have one signature. The regression returns the mean command; the flow (flow matching in x-prediction, as for the
images) samples one of several plausible chunks, and continues a chunk that is already being executed: training-time action
conditioning for real-time chunking (Black et al. 2025), where the first actions of a chunk are given clean, and each action has
its own noise level.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from .presets import Preset

FLOW_STEPS = 5  # Euler steps of the flow policy, in its small MLP alone


class _Policy(nn.Module):
    """The shared part of both policies: one learned query per goal attends to the frame's tokens. The features already
    contain the frame's action conditioning, so the head knows how fast the robot moves."""

    def __init__(self, preset: Preset):
        super().__init__()
        d = preset.width
        self.preset = preset
        self.goals = nn.Parameter(torch.randn(len(preset.goals), d) * 0.02)
        self.read = nn.MultiheadAttention(d, preset.heads, batch_first=True)
        self.squeeze = _squeeze(preset)
        self.tokens = nn.Linear(preset.tokens * (preset.head_features or d), d)
        low, high = torch.tensor(preset.action_low), torch.tensor(preset.action_high)
        self.register_buffer('centre', (high + low) / 2, persistent=False)
        self.register_buffer('half_range', (high - low) / 2, persistent=False)

    def look(self, features: Tensor) -> Tensor:
        """Return the inputs of each goal's plan, (B, goals, 2 D), from the features (B, P, D) of a frame."""
        read = attended(self.read, self.goals, features) + self.goals
        # Where a thing is in the image matters as much as what it is: the flattened tokens keep positions.
        places = self.tokens(self.squeeze(features).flatten(1))[:, None].expand(-1, len(self.goals), -1)
        return torch.cat([read, places], -1)

    def given(self, delay: Tensor) -> Tensor:
        """Return which actions of a chunk are given by its prefix: delay (B,) to bool (B, 1, K, 1)."""
        return (torch.arange(self.preset.chunk_frames, device=delay.device) < delay[:, None])[:, None, :, None]

    def normalised(self, actions: Tensor) -> Tensor:
        """Map actions in SI units to [-1, 1]."""
        return (actions - self.centre) / self.half_range


class RegressionPolicy(_Policy):
    """Predicts the mean command chunk for every goal."""

    def __init__(self, preset: Preset):
        super().__init__(preset)
        d = preset.width
        self.mlp = nn.Sequential(nn.Linear(2 * d, 2 * d), nn.SiLU(), nn.Linear(2 * d, 2 * d), nn.SiLU(),
                                 nn.Linear(2 * d, preset.chunk_frames * preset.actions))

    def predict(self, features: Tensor) -> Tensor:
        """Map features (B, P, D) to chunks (B, goals, K, A) in (-1, 1)."""
        preset = self.preset
        return torch.tanh(self.mlp(self.look(features))).unflatten(-1, (preset.chunk_frames, preset.actions))

    def forward(self, features: Tensor, noise: Tensor | None = None, prefix: Tensor | None = None,
                delay: Tensor | None = None) -> Tensor:
        """See ``FlowPolicy.forward``; the noise is not used, and the prefix only replaces the actions it covers."""
        plan = self.centre + self.half_range * self.predict(features)
        return plan if prefix is None else torch.where(self.given(delay), prefix[:, None], plan)


class FlowPolicy(_Policy):
    """A command chunk for every goal, denoised from noise in a few Euler steps of a small MLP over the whole chunk.

    Zero noise gives the most typical chunk, which differs least from tick to tick; other noise gives alternatives."""

    def __init__(self, preset: Preset):
        super().__init__(preset)
        d, chunk = preset.width, preset.chunk_frames * preset.actions
        self.context = nn.Sequential(nn.Linear(2 * d, d), nn.SiLU(), nn.Linear(d, d))
        self.enter = nn.Linear(chunk + preset.chunk_frames, d)  # noisy actions, and the level of each
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(d, chunk))

    def predict(self, context: Tensor, noisy: Tensor, level: Tensor) -> Tensor:
        """Predict clean chunks (B, goals, K, A) from noisy ones, normalised; context (B, goals, D), level (B, goals, K), 1
        is clean."""
        x = context + self.enter(torch.cat([noisy.flatten(-2), level], -1))
        return self.out(x + self.mlp(x)).unflatten(-1, noisy.shape[-2:])

    def forward(self, features: Tensor, noise: Tensor | None = None, prefix: Tensor | None = None,
                delay: Tensor | None = None) -> Tensor:
        """Return command chunks in SI units (B, goals, K, A), within the actions' range.

        features (B, P, D) of the newest observed frame; noise (B, goals, K, A), standard normal, zero if not given; prefix
        (B, K, A) in SI units, of which the first delay (B,) actions, int64, are in progress already: the chunks begin with them
        and continue them. Without prefix and delay all actions are free.
        """
        preset, b = self.preset, features.shape[0]
        shape = (b, len(preset.goals), preset.chunk_frames, preset.actions)
        z = features.new_zeros(shape) if noise is None else noise
        if prefix is None:
            prefix = features.new_zeros(b, preset.chunk_frames, preset.actions)
            delay = torch.zeros(b, dtype=torch.int64, device=features.device)
        given = self.given(delay).expand(shape)
        prefix = prefix[:, None].expand(shape)
        clean = self.normalised(prefix)
        context = self.context(self.look(features))
        known = given[..., 0].to(z.dtype)
        for step in range(FLOW_STEPS):
            tau = step / FLOW_STEPS
            z = torch.where(given, clean, z)
            x = self.predict(context, z, torch.maximum(known, torch.full_like(known, tau)))
            z = z + (x - z) * (1.0 / (FLOW_STEPS * (1.0 - tau)))
        plan = self.centre + self.half_range * z.clamp(-1.0, 1.0)
        return torch.where(given, prefix, plan)


def attended(layer: nn.MultiheadAttention, queries: Tensor, x: Tensor) -> Tensor:
    """Return what a few queries (Q, D) read from tokens x (B, P, D), (B, Q, D): ``layer``'s attention, its products in another
    order. A head's key matrix is applied to its queries and its value matrix to what they read, not both to all tokens; a bias
    of keys adds the same to all scores of a query, and so nothing."""
    of_queries, of_keys, of_values = layer.in_proj_weight.unflatten(0, (3, layer.num_heads, -1))  # (heads, D / heads, D) each
    query_bias, _, value_bias = layer.in_proj_bias.unflatten(0, (3, layer.num_heads, 1, -1))
    asked = (queries @ of_queries.transpose(1, 2) + query_bias) @ of_keys  # (heads, Q, D)
    scores = x @ asked.flatten(0, 1).T * layer.head_dim ** -0.5  # (B, P, heads * Q)
    # On a GPU, the softmax over an axis that is not the last has one multiprocessor for all of these.
    weights = scores.mT.softmax(-1) if x.is_cuda else scores.softmax(1).mT
    read = weights @ x
    read = read.unflatten(1, asked.shape[:2]) @ of_values.transpose(1, 2) + value_bias  # (B, heads, Q, D / heads)
    return layer.out_proj(read.transpose(1, 2).flatten(2))


def action_head(preset: Preset) -> RegressionPolicy | FlowPolicy:
    """Return the policy that a preset names."""
    return {'regression': RegressionPolicy, 'flow': FlowPolicy}[preset.policy](preset)


class OutcomeHead(nn.Module):
    """Per frame of a predicted chunk: logit of a contact within its step, and progress (m) towards every goal."""

    def __init__(self, preset: Preset):
        super().__init__()
        d = preset.width
        self.squeeze = _squeeze(preset)
        self.net = nn.Sequential(nn.Linear(preset.tokens * (preset.head_features or d), d), nn.SiLU(),
                                 nn.Linear(d, 1 + len(preset.goals)))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Map features (B, T, P, D) to contact logits (B, T) and progress since the observation (B, T, goals)."""
        *before, last = self.net
        x = self.squeeze(features).flatten(2)
        for layer in before:
            x = layer(x)
        out = few_outputs(last, x)
        return out[..., 0], out[..., 1:]


def few_outputs(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ``layer`` of few rows x (..., K), with few outputs. On a GPU, cuBLAS has one multiprocessor do such a product;
    the sum of products takes all."""
    if not x.is_cuda:
        return layer(x)
    return (x[..., None, :] * layer.weight).sum(-1) + layer.bias


def _squeeze(preset: Preset) -> nn.Module:
    """Reduce the features per token, so that a layer over the flattened tokens does not grow with their product."""
    return nn.Linear(preset.width, preset.head_features) if preset.head_features else nn.Identity()
