"""
How a model's networks are run: PyTorch on a CPU or a GPU, or ONNX Runtime, and what they need to run without waiting.

Sessions, memory and sampling belong to ``engine``, networks to ``model``; what several GPUs do together to
``engine.distributed``.
"""

BACKENDS = ('auto', 'torch', 'torch-bf16', 'torch-compiled', 'torch-fp8', 'torch-fp4', 'onnx', 'onnx-int8')
PARALLEL_BACKENDS = ('torch', 'torch-bf16', 'torch-fp8')  # that run on several GPUs
PARALLEL_KINDS = ('sequence', 'sequence-fp8', 'tensor')  # -fp8: what the processes exchange is rounded to e4m3
