"""Networks of the world model, as pure functions of tensors; nothing here knows of ROS, sessions or deadlines."""
