"""Lengths of a denoising step, as the network is told them."""

# Rows of the step-size embedding. FLOW is the instantaneous velocity (teacher, and clean frames); the others are the
# step lengths that the few-step student was trained for (shortcut models, Frans et al. 2024).
FLOW, HALF, WHOLE = 0, 1, 2
