"""
Evaluation in simulated rooms that no training has seen: prediction, what-if questions, long rollouts, closed loop.

Every number comes from freshly simulated seeds, outside those that training may use.
"""
