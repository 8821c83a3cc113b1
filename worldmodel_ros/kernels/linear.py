"""Linear layers: in FP8, with rows of activations and rows of weights in e4m3, each row with its own scale; and with GELU."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import rotate_qk
from .rows import Rounded, row_kernels

# Depth over columns from which on the Triton product is faster on Hopper, with FULL rows or more, or few
# (benchmarks/fp8.py; benchmarks/results/fp8_few_rows_h200.json).
DEEP, FULL = 4, 1024
GELU_ROWS = 512  # rows from which the product computes GELU: cuBLASLt has fewer such kernels, and GELU of few rows is quick


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, in_product: bool) -> Tensor:
    """Return GELU, by tanh, of x W^T + bias, for x (M, K) and W (N, K). ``in_product``: of many rows, by the product's kernel,
    which cuBLASLt has on Hopper; it rounds once, and has no gradient."""
    if in_product and len(x) >= GELU_ROWS:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return F.gelu(F.linear(x, weight, bias), approximate='tanh')


def fp8_linear(x: Rounded, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None,
               dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """Return x W^T + bias in ``dtype`` (M, N), for e4m3 rows (M, K) of x and W (N, K), with scales (M, 1) and (1, N), float32;
    written to ``out``, if given.

    GPUs that multiply FP8 (compute capability 8.9 and up) use torch's library, which needs K and N to be multiples of 16,
    bfloat16 for bias and ``dtype``, and on Hopper accumulates with 14 bits: about what rounding to bfloat16 costs. There a deep
    product (the MLP's second) is faster by ``linear_hopper``: 3 to 6 % for many rows, 16 to 21 % for 128 or 256. Elsewhere
    the definition is used, which shows the accuracy, not the speed.
    """
    values, scale = x
    if values.is_cuda and dtype is torch.bfloat16 and torch.cuda.get_device_capability(values.device) >= (8, 9):
        if values.shape[1] >= DEEP * len(weight) and out is None:
            from . import linear_hopper
            fast = len(values) >= FULL or 0 < len(values) <= linear_hopper.FEW_ROWS
            if fast and linear_hopper.supports(values):
                return linear_hopper.fp8_linear_hopper(x, weight, weight_scale, bias)
        return torch._scaled_mm(values, weight.t(), scale_a=scale, scale_b=weight_scale, bias=bias, out_dtype=dtype,
                                use_fast_accum=True, **({} if out is None else {'out': out}))
    product = fp8_linear_reference(x, weight, weight_scale, bias)
    return product.to(dtype) if out is None else out.copy_(product)


def fp8_linear_gelu(x: Rounded, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, static: Tensor,
                    dtype: torch.dtype = torch.bfloat16) -> Rounded:
    """``fp8_linear``, then ``rows.gelu_rows`` by the given scales; on Hopper in one kernel, ``linear_hopper``."""
    if x[0].is_cuda and dtype is torch.bfloat16:
        from . import linear_hopper
        if linear_hopper.supports(x[0]):
            return linear_hopper.fp8_linear_gelu_hopper(x, weight, weight_scale, bias, static)
    product = fp8_linear(x, weight, weight_scale, bias, dtype)
    return row_kernels(product).gelu_rows(product, static=static)


def fp8_linear_rotate(x: Rounded, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, rotary: Tensor,
                      q_weight: Tensor, k_weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return x W^T + bias as queries, keys and values (M, 3, H, D), the first two normalised and rotated as by
    ``qk_norm.rotate_qk``, for rotary (2, M, D / 2); on Hopper in one kernel, ``linear_hopper``, for heads of 128."""
    dim = 2 * rotary.shape[2]
    if rotary.is_cuda:
        from . import linear_hopper
        tile = linear_hopper.DEFAULT.n
        fits = 2 * dim == tile and len(weight) % (3 * tile) == 0
        if fits and dtype is torch.bfloat16 and linear_hopper.supports(rotary):
            return linear_hopper.fp8_linear_rotate_hopper(x, weight, weight_scale, bias, rotary, q_weight, k_weight)
        qkv = fp8_linear(x, weight, weight_scale, bias, dtype)
    else:
        qkv = fp8_linear_reference(x, weight, weight_scale, bias)
    qkv = qkv.view(len(qkv), 3, -1, dim)
    rotate_qk(qkv, rotary, q_weight, k_weight)
    return qkv.to(dtype)


def fp8_linear_reference(x: Rounded, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, float32."""
    values, scale = x
    product = values.float() @ weight.float().t() * scale * weight_scale
    return product if bias is None else product + bias.float()
