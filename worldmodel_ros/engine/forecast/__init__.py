"""
How a scene forecast's network is run for robots, frame by frame: PyTorch, or ONNX Runtime on a CPU.

The network is ``model.scene_forecast``, what is decided on its forecasts ``control``.
"""
