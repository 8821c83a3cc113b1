"""
Runs a scene forecast's network for robots, frame by frame, with PyTorch, or with ONNX Runtime on a CPU.

The network is in ``model.scene_forecast``; ``control`` makes decisions from its forecasts.
"""
