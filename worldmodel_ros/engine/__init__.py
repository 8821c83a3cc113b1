"""The loop around the model: sessions, sampling, step times, the deadline ladder. Heavy imports happen in `load`."""
from __future__ import annotations

from .loading import load

__all__ = ['load']
