"""
Decides which batch runs next and what is promised on arrival: earliest deadline first, with admission and tiers.

A state machine on the time passed in; it imports no networks and starts no threads.
"""
from .scheduler import Scheduler
from .settings import EDF, EDF_LADDER, FIFO, Policy, Settings
from .step_table import StepTable
from .work import Admission, Batch, Completion, Entry, Kind, Outcome, Request, Route, Tier, Unit

__all__ = [
           'EDF',
           'EDF_LADDER',
           'FIFO',
           'Admission',
           'Batch',
           'Completion',
           'Entry',
           'Kind',
           'Outcome',
           'Policy',
           'Request',
           'Route',
           'Scheduler',
           'Settings',
           'StepTable',
           'Tier',
           'Unit',
]
