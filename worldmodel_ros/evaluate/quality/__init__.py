"""What a model is worth on rooms that nobody trained or tuned on: prediction, questions, long dreams, driving.

Every number comes from seeds that are simulated afresh, outside those that training may use.
"""
