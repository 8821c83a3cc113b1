"""
What is fuzzed, one file a target. ``benchmarks/fuzz.py`` runs them all for minutes; test_fuzz.py each for a moment.

A target's file has ``TARGET``, a harness.Bytes or a harness.States. It is imported in its own process only.
"""
from __future__ import annotations

from importlib import import_module

BYTES = {
    'codec': 'messages between a robot\'s node and the server',
    'gateway': 'messages of clients of the network gateway',
    'shared_memory': 'memory that comes with messages',
    'mcap': 'bags in MCAP files',
    'sqlite': 'bags in SQLite files',
    'session_files': 'files of sessions',
    'checkpoints': 'model.json and weights',
    'images': 'raw images of a camera',
    'pictures': 'JPEG and PNG of a camera',
    'requests': 'what-if requests',
    'commands': 'the topic of executed actions',
    'goals': 'the goal topic',
}
STATES = {
    'gate': 'the command gate and those that publish to it',
    'sessions': 'sessions, their files and their names',
    'connections': 'the server and those that connect to it',
}
TARGETS = {**BYTES, **STATES}


def load(name: str):
    """Return the target of a name, one of TARGETS."""
    return import_module(f'{__name__}.{name}').TARGET
