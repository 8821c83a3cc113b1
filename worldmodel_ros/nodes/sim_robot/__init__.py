"""
The simulated robot as a node: camera, odometry, ground truth and fault injection.

Physics and rendering belong to ``sim``.
"""
