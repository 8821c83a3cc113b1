"""
The simulated robot as a node: camera, odometry, ground truth and the faults it can be made to have.

Physics and images belong to ``sim``.
"""
