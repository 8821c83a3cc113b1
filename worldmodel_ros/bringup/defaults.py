"""Defaults shared by the command line, the launch files and the supervisor; imports nothing, so that --help is fast."""

# At its first start on a machine a model is exported or compiled, which can take minutes. A process that ends or refuses its
# configuration is noticed at once: this limit is for one that hangs.
ACTIVATION_TIMEOUT = 1800.0  # s
