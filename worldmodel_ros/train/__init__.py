"""
From episodes to weights: ``data``, the losses of each stage (``objectives``), their runs (``run``), and ``finetune``.

What a trained model is worth is judged in ``evaluate``.
"""
