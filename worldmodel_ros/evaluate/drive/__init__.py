"""
A model on one recording: predictions of every window, what-if branches, deadlines in virtual time, and a verdict.

Reading bags belongs to ``bags``, the page to ``evaluate.report``.
"""
