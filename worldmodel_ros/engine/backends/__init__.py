"""
Back ends that run a model's networks without blocking: PyTorch on a CPU or a GPU, or ONNX Runtime.

Sessions, memory and sampling belong to ``engine``, networks to ``model``, parallelism over several GPUs to
``engine.distributed``.
"""

BACKENDS = ('auto', 'torch', 'torch-bf16', 'torch-compiled', 'torch-fp8', 'torch-fp4', 'onnx', 'onnx-int8')
PARALLEL_BACKENDS = ('torch', 'torch-bf16', 'torch-fp8')  # that run on several GPUs
PARALLEL_KINDS = ('sequence', 'sequence-fp8', 'tensor')  # -fp8: the processes exchange values rounded to e4m3
