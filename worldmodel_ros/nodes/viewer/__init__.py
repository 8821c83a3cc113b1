"""
Shows what runs in Rerun: a node that only listens.

How messages are drawn is in evaluate.view, which draws those of a bag, too.
"""
