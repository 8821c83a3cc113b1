"""ROS 2 adapters. The only part of the package that imports rclpy."""
