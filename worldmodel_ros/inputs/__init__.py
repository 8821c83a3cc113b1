"""
Converts messages to the model's inputs: images, ticks, executed actions. No ROS.

The live node and the bag reader call the same functions, so that the same messages give the same inputs.
"""
