"""
What a model is worth in simulated rooms that no training has seen: prediction, questions, long rollouts, driving.

Every number comes from seeds that are simulated afresh, outside those that training may use.
"""
