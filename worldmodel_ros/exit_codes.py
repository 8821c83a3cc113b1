"""Exit codes by which a process of this package tells who started it whether to start it again."""

# What it was started with is refused: started again in the same way, it would end in the same way. Also the code with
# which argparse refuses an option.
BAD_CONFIGURATION = 2
