"""
One model and its sessions: loading, memory, sampling, rollouts, what-if questions and measured times; no deadlines.

Deadlines of one robot belong to ``control``, those of many to ``serving``. Heavy imports happen in ``load``.
"""
from __future__ import annotations

from .loading import load

__all__ = ['load']
