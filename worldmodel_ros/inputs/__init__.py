"""
How messages become what the model is given: images, ticks, executed actions. Without ROS.

The live node and the reading of bags call the same functions, so that the same messages give the same inputs.
"""
