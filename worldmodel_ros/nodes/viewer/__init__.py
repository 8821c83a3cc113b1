"""
Shows a running system in Rerun: a node that only listens.

Drawing is in ``evaluate.view``, which also draws bags.
"""
