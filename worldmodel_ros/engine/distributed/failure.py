"""What is raised while the processes of a model are not complete."""
from __future__ import annotations


class RankFailure(RuntimeError):
    """A process of a model has died, or has not answered in time. The others are started anew meanwhile; sessions
    keep what they are shown, and look ahead again once all are back."""
