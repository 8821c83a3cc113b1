"""
The report of an evaluation: one self-contained HTML page, without network access or scripts.

The numbers come from ``evaluate.drive``.
"""
from __future__ import annotations

from .page import render

__all__ = ['render']
