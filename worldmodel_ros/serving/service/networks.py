"""The names of a model's units in the scheduler, and the routes of ticks and branches."""
from __future__ import annotations

from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.serving.scheduler import Tier, Unit
from worldmodel_ros.serving.scheduler.work import Route


class Networks:
    """``name`` is the prefix of the units' names: tiny/observe, tiny/denoise and so on."""

    def __init__(self, engine: Engine, name: str):
        self.engine, self.name = engine, name

    def unit(self, part: str) -> Unit:
        """Return the unit ``part``: observe (encode, commit of one frame, policy), policy (of a question), commit (of an
        imagined chunk), decode or snapshot."""
        return Unit(f'{self.name}/{part}')

    def denoise(self, steps: int) -> Route:
        """Return the denoising steps of a chunk; the last one also reads the outcomes."""
        return tuple(Unit(f'{self.name}/denoise', step, steps) for step in range(steps))

    def tick(self, steps: int) -> Route:
        """Return the route of a tick: from a frame to a plan with its imagined future."""
        return self.unit('observe'), *self.denoise(steps)

    def branch(self, frames: int, steps: int, imagined: int = 0, keep: bool = False) -> Route:
        """Return the route of ``Session.branching`` for so many frames after ``imagined`` ones; ``keep``: to be continued."""
        spec, route = self.engine.spec, []
        for start in range(0, frames, spec.chunk_frames):
            sinks = imagined + start >= spec.sinks_from
            commits = (start > 0) + sinks * (spec.sink_frames // spec.chunk_frames)
            route += [*(self.unit('commit'),) * commits, *self.denoise(steps), self.unit('decode')]
        return (*route, self.unit('commit')) if keep else tuple(route)


def routes(models: list[Networks]) -> dict[Tier, Route]:
    """Return the routes of the tiers that one model can serve, or a best and a smaller one."""
    tiers = {Tier.TWO_STEP: models[0].tick(2), Tier.ONE_STEP: models[0].tick(1)}
    if len(models) > 1:
        tiers[Tier.SMALLER] = models[-1].tick(1)
    return tiers
