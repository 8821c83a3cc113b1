"""What the command line, the launch files and the supervisor agree on; it imports nothing, so that a --help is quick."""

# At its first start on a machine a model is exported or compiled, which can take minutes. A process that ends meanwhile
# is noticed at once, and so is one that refuses: this is for one that hangs.
ACTIVATION_TIMEOUT = 1800.0  # s
