"""Rules that keep a robot safe, as pure functions and state machines. Imports neither ROS nor torch."""
