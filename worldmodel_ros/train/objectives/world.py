"""The objectives that train the DiT and the heads, one for each stage; what a loop does with them, see Objective."""
from __future__ import annotations

import copy

from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import ImitationOptions, SelfForcingOptions, StudentOptions, TeacherOptions
from .imitation import ImitationObjective
from .objective import Objective
from .self_forcing import SelfForcingObjective
from .student import StudentObjective
from .teacher import TeacherObjective


def teacher(model: WorldModel, episodes: Episodes, options: TeacherOptions) -> Objective:
    """Flow matching, imitation and outcomes on encoded episodes."""
    return TeacherObjective(model, episodes, options)


def student(model: WorldModel, averaged: WorldModel, teacher: WorldModel, episodes: Episodes,
            options: StudentOptions) -> Objective:
    """Steps of length 1/2 and 1. ``averaged``: the loop's running average of ``model``; ``teacher``: frozen."""
    return StudentObjective(model, averaged, teacher, episodes, options)


def self_forcing(model: WorldModel, averaged: WorldModel, teacher: WorldModel, episodes: Episodes,
                 options: SelfForcingOptions) -> Objective:
    """The same on the student's own roll-outs."""
    return SelfForcingObjective(model, averaged, teacher, episodes, options)


def imitation(model: WorldModel, episodes: Episodes, options: ImitationOptions) -> ImitationObjective:
    """The policy alone, on encoded episodes."""
    return ImitationObjective(model, episodes, options)


def frozen_copy(model: WorldModel) -> WorldModel:
    return copy.deepcopy(model).eval().requires_grad_(False)
