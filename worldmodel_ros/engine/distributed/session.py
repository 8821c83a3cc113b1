"""A session that is restored when the processes that hold its pages have been replaced."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worldmodel_ros.cache.sequence import SequenceCache
from worldmodel_ros.engine.network_calls import Calls
from worldmodel_ros.engine.device_failure import RankFailure
from worldmodel_ros.engine.futures import OwnPlan
from worldmodel_ros.engine.session import Moment, Session
from worldmodel_ros.engine.session_file import Loaded
from .leader import NO_FEATURES

@dataclass(frozen=True, eq=False)
class EpochMoment(Moment):
    """A moment whose pages belong to the processes of one epoch."""

    epoch: int = -1


class RestoringSession(Session):
    """A ``Session`` of a LeadingBackend, which keeps latents and actions of its window.

    While processes are missing, ``observe`` still takes frames, and looking ahead raises RankFailure. With the first frame
    after they have been replaced, the window is committed again; then the session is like one that has seen only the
    window's frames.
    """

    def reset(self) -> None:
        self._recent: list[tuple] = []  # latent and action of each observed frame, oldest first
        self._epoch = self._backend.epoch
        super().reset()

    def restore(self, loaded: Loaded) -> None:
        super().restore(loaded)
        self._recent, self._epoch = [], self._backend.epoch if loaded.epoch is None else loaded.epoch

    def moment(self) -> EpochMoment:
        moment = super().moment()
        return EpochMoment(moment.cache, moment.time, moment.latent, moment.sinks, moment.features, epoch=self._epoch)

    def _branching(self, actions: np.ndarray | OwnPlan, steps: int, moment: Moment | None = None, keep: bool = False
                   ) -> Calls[tuple]:
        epoch = moment.epoch if isinstance(moment, EpochMoment) else self._epoch
        calls, outputs = super()._branching(actions, steps, moment, keep), None
        try:
            while True:
                item = calls.send(outputs)
                self._require_epoch(epoch)
                outputs = yield item
        except StopIteration as end:
            return end.value
        finally:
            calls.close()

    def _commit(self, cache: SequenceCache, latents: np.ndarray, times: np.ndarray, actions: np.ndarray,
                observed: bool = True) -> Calls[Sequence]:
        if not observed:
            features = yield from super()._commit(cache, latents, times, actions, False)
            self._backend.require_complete()
            return features
        recent = [*self._recent, (latents[0], actions[0])][-self.spec.window_frames:]
        try:
            self._backend.require_complete()
            if self._epoch == self._backend.epoch:
                features = yield from super()._commit(cache, latents, times, actions)
            else:
                features = yield from self._restore(recent, int(times[0]))
        except RankFailure:
            features = NO_FEATURES
        self._recent = recent
        return features

    def _restore(self, recent: list[tuple], newest: int) -> Calls[Sequence]:
        """Commit ``recent`` frames up to number ``newest`` to the pages of new processes."""
        epoch, features = self._backend.epoch, NO_FEATURES
        self._cache.clear()
        first = newest + 1 - len(recent)
        whole = -first % self._memory.layout.frames  # a slab is written from its first frame on
        for index in range(whole, len(recent)):  # one by one, as frames that are committed together see each other
            latent, action = recent[index]
            features = yield from super()._commit(self._cache, latent[None], np.array([first + index]), action[None])
        if features is not NO_FEATURES:
            self._epoch = epoch
        return features

    def _require_observation(self) -> None:
        super()._require_observation()
        self._require_epoch(self._epoch)
        if self._features is None:
            raise RankFailure('the newest frame came while processes of the model were missing; the next one brings '
                              'the session back')

    def _require_epoch(self, epoch: int) -> None:
        self._backend.require_complete()
        if epoch != self._backend.epoch:
            raise RankFailure('the processes of the model have been replaced since; the next frame brings the '
                              'session back')
