"""One engine for the robots of a machine: the server's process, and the front end in each robot's."""
