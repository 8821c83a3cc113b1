"""
The report of an evaluation: one HTML page that needs nothing but itself, no network and no scripts.

The numbers come from ``evaluate.drive``.
"""
from __future__ import annotations

from .page import render

__all__ = ['render']
