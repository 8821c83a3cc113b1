"""
Plays a recorded drive into the graph, at its own rate or as fast as it is followed.

Reading the recording belongs to ``bags``.
"""
