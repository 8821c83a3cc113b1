"""Who is computed when, and what is promised at arrival: a state machine on the time that is passed in."""
from .scheduler import Scheduler
from .settings import EDF, EDF_LADDER, FIFO, Policy, Settings
from .step_table import StepTable
from .work import Admission, Batch, Completion, Entry, Kind, Outcome, Request, Route, Tier, Unit

__all__ = ['Admission', 'Batch', 'Completion', 'EDF', 'EDF_LADDER', 'Entry', 'FIFO', 'Kind', 'Outcome', 'Policy',
           'Request', 'Route', 'Scheduler', 'Settings', 'StepTable', 'Tier', 'Unit']
