"""
Training: ``data``, the losses of each stage (``objectives``), running the stages (``run``), and ``finetune``.

Trained models are judged in ``evaluate``.
"""
