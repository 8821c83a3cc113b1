"""Compiles the Hopper kernels for sm_90a, which needs no GPU, and prints their properties as JSON."""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from worldmodel_ros.kernels import (
    attention_hopper, cross_attention_triton, flat_write_triton, linear_hopper, page_write_triton, rows_triton)
from worldmodel_ros.kernels.pages import Precision

BM, BN, D, PAGE = attention_hopper.BLOCK_M, attention_hopper.BLOCK_N, attention_hopper.HEAD_DIM, 256
NAMES = {gl.bfloat16: 'bf16', gl.float8e4nv: 'fp8e4nv', gl.uint8: 'u8'}


def descriptor(dtype, *block):
    return f'tensordesc<{NAMES[dtype]}{list(block)},{gl.NVMMASharedLayout.get_default_for(list(block), dtype)!r}>'


def signature(quantised, fp4):
    dtype = gl.float8e4nv if quantised else gl.bfloat16
    known = {'q_desc': descriptor(dtype, BM // 2, D), 'k_desc': descriptor(dtype, BN, D),
             'v_desc': descriptor(dtype, *((D, BN) if quantised else (BN, D))), 'o': '*bf16',
             'o_desc': descriptor(gl.bfloat16, BM // 2, D), 'lse': '*fp32', 'scale_log2': 'fp32',
             'o_stride': 'i32', 'items': 'i32', 'q_blocks': 'i32', 'heads': 'i32', 'tile_blocks': 'i32'}
    if fp4:
        known |= {'raw_k_desc': descriptor(gl.uint8, BN, D // 2), 'raw_v_desc': descriptor(gl.uint8, D, BN // 2),
                  'raw_k_exponent_desc': descriptor(gl.uint8, BN * D // 256, 16),
                  'raw_v_exponent_desc': descriptor(gl.uint8, D, PAGE // 16)}
    for name in attention_hopper._attention.arg_names:
        absent = name.isupper() or (name.startswith(('raw', 'fp4')) and not fp4) or ('scale' in name and not quantised)
        known.setdefault(name, 'constexpr' if absent else '*fp32' if 'scale' in name else '*i32')
    return {name: known[name] for name in attention_hopper._attention.arg_names}


def attention(quantised, fp4, add, split=False):
    arguments, names = signature(quantised, fp4), attention_hopper._attention.arg_names
    stages = 2 if not quantised else 3 if fp4 else 5
    pages = {'PAGE': BN, 'FRAMES': 1, 'TILES': 1, 'REPEATS': 3} if split else \
        {'PAGE': PAGE, 'FRAMES': 4, 'TILES': 16, 'REPEATS': 1}
    constants = {'BM': BM, 'BN': BN, 'D': D, 'STAGES': stages, 'QUANTISED': quantised, 'HAS_FP4': fp4, 'ADD': add,
                 **pages}
    aligned = {(i,): [['tt.divisibility', 16]] for i, name in enumerate(names) if arguments[name].startswith('*')}
    source = GluonASTSource(attention_hopper._attention, arguments, {
        (i,): constants.get(name) for i, name in enumerate(names) if arguments[name] == 'constexpr'}, aligned)
    return compiled(source, num_warps=4)


def product(gelu, specialised, rotating, few=False):
    few_rows = linear_hopper.FEW_GELU if gelu else linear_hopper.FEW_ROTATE if rotating else linear_hopper.FEW
    tiles = few_rows if few else linear_hopper.SPECIALISED if specialised else linear_hopper.DEFAULT
    names = linear_hopper._product.arg_names
    absent = [*([] if gelu else ['static']), *([] if rotating else ['rotary', 'q_weight', 'k_weight'])]
    constants = {'PROGRAMS': 132, 'M': tiles.m, 'N': tiles.n, 'K': tiles.k, 'GROUP': linear_hopper.GROUP, 'GELU': gelu,
                 'NATIVE': True, 'SPECIALISED': specialised, **dict.fromkeys(absent)}
    known = {'a': f'tensordesc<fp8e4nv[{tiles.m}, {tiles.k}]>', 'b': f'tensordesc<fp8e4nv[{tiles.n}, {tiles.k}]>',
             'out': f'tensordesc<{"u8" if gelu else "bf16"}[{tiles.m}, {tiles.n // (4 if rotating else 1)}]>',
             'rotary': f'tensordesc<fp32[2, {tiles.m}, {tiles.n // 4}]>', 'static': '*fp32', 'eps': 'fp32',
             **({'a': '*fp8e4nv', 'b': '*fp8e4nv', 'out': '*u8' if gelu else '*bf16'} if specialised else {}),
             **dict.fromkeys(('bias', 'q_weight', 'k_weight'), '*bf16'),
             **dict.fromkeys(('a_scale', 'b_scale'), '*fp32'),
             **dict.fromkeys(('rows', 'columns', 'depth'), 'i32')}
    source = ASTSource(linear_hopper._product, {n: 'constexpr' if n in constants else known[n] for n in names},
                       {(names.index(name),): value for name, value in constants.items()},
                       {(i,): [['tt.divisibility', 16]] for i, name in enumerate(names)
                        if name not in constants and known[name][0] in '*i'})
    return compiled(source, num_warps=tiles.warps, num_stages=tiles.stages)


def page(own_scale, rounded=False):
    """Compile the write of keys and values of a page of 256 tokens of width 128: in FP8, or without a scale; of bfloat16, or of
    e4m3."""
    names, pool = page_write_triton._write.arg_names, '*u8' if own_scale else '*bf16'
    block = PAGE if own_scale else page_write_triton.STREAM // D
    values = page_write_triton.PAGE_VALUES[Precision.FP8] if own_scale else page_write_triton.STREAM_VALUES
    constants = {'PART': 1, 'PIECES': PAGE // block, 'BLOCK': block, 'N': PAGE, 'RUN': PAGE // 4, 'TILES': 16,
                 'T': PAGE, 'H': 24, 'D': D, 'LIMIT': 448.0 if own_scale else None, 'QUERY_LIMIT': 448.0, 'NATIVE': True,
                 **dict.fromkeys(('q_scale', 'k_exponent', 'v_exponent', 'offsets', *([] if rounded else ['scale'])))}
    known = {'k': pool, 'v': pool, 'pages': '*i32', 'counts': '*i32', 'eps': 'fp32', 'sines': 'i32',
             'qkv': '*u8' if rounded else '*bf16', **dict.fromkeys(('q_weight', 'k_weight', 'q'), '*bf16'),
             **dict.fromkeys(('scale', 'rotary', 'k_scale', 'v_scale'), '*fp32'),
             **dict.fromkeys(('token_stride', 'part_stride', 'head_stride'), 'i32')}
    aligned = {(i,): [['tt.divisibility', 16]] for i, name in enumerate(names)
               if name not in constants and known[name] != 'fp32'}
    source = ASTSource(page_write_triton._write, {n: 'constexpr' if n in constants else known[n] for n in names},
                       {(names.index(name),): value for name, value in constants.items()}, aligned)
    return compiled(source, num_warps=page_write_triton.warps(block * D, values))


def flat(own_scale, queries):
    """Compile the write of queries, or of keys and values of a page of 128 tokens of width 128, normalised over all heads."""
    kernel = flat_write_triton._queries if queries else flat_write_triton._pages
    block = BN if own_scale and not queries else page_write_triton.STREAM // D
    values = page_write_triton.PAGE_VALUES[Precision.FP8] if block == BN else page_write_triton.STREAM_VALUES
    constants = {'H': 40, 'D': D, 'BLOCK': block, 'LIMIT': 448.0 if own_scale else None, 'NATIVE': True}
    constants |= {'LIMIT': 448.0, **({} if own_scale else {'q_scale': None})} if queries else \
        {'T': BN, **({} if own_scale else {'k_scale': None, 'v_scale': None})}
    page = '*u8' if own_scale else '*bf16'
    known = {'k': page, 'v': page, 'q': page, 'pages': '*i32', 'qkv': '*bf16',
             **dict.fromkeys(('rotary', 'rms', 'weight', 'q_scale', 'k_scale', 'v_scale'), '*fp32')}
    return compiled(plain(kernel, constants, known), num_warps=page_write_triton.warps(block * D, values))


def cross(fp8):
    constants = {'H': 40, 'D': D, 'BLOCK_M': cross_attention_triton.BLOCK_M, 'BLOCK_N': cross_attention_triton.BLOCK_N,
                 'TYPE': tl.bfloat16, 'NATIVE': True, **({} if fp8 else dict.fromkeys(('scales', 'static')))}
    known = {**dict.fromkeys(('q', 'keys', 'values'), '*bf16'), 'out': '*u8' if fp8 else '*bf16',
             **dict.fromkeys(('rms', 'bias', 'scales', 'static'), '*fp32'),
             'scale_log2': 'fp32', 'log2_e': 'fp32'}
    return compiled(plain(cross_attention_triton._attend, constants, known), num_warps=cross_attention_triton.WARPS,
                    num_stages=cross_attention_triton.STAGES)


def rows(fp8, film):
    """Compile the work between two products, for rows of 5,120 values: in five blocks."""
    cut = rows_triton.blocks(5120)
    constants = {'D': 5120, **cut, 'LIMIT': 448.0, 'NATIVE': True, 'static': None, 'static_stride': 0,
                 **({} if film else {'film': None}),
                 **({} if fp8 else dict.fromkeys(('scales', 'bound', 'ahead')))}
    known = {'out': '*u8' if fp8 else '*bf16', 'eps': 'fp32', **dict.fromkeys(('y', 'film'), '*bf16'),
             **dict.fromkeys(('x', 'gate', 'shift', 'scale', 'total', 'scales', 'bound', 'ahead'), '*fp32')}
    return compiled(plain(rows_triton._modulate, constants, known), num_warps=rows_triton.warps(5120))


def plain(kernel, constants, known):
    """Return the source of a Triton kernel whose other arguments are int32, with pointers that are divisible by 16."""
    names = kernel.arg_names
    kinds = {name: 'constexpr' if name in constants else known.get(name, 'i32') for name in names}
    return ASTSource(kernel, kinds, {(names.index(name),): value for name, value in constants.items()},
                     {(i,): [['tt.divisibility', 16]] for i, name in enumerate(names) if kinds[name][0] == '*'})


def compiled(source, **options):
    kernel = triton.compile(source, target=GPUTarget('cuda', 90, 32), options=options)
    ptxas = Path(triton.__file__).parent / 'backends/nvidia/bin/ptxas'
    with tempfile.NamedTemporaryFile('w', suffix='.ptx') as file:
        file.write(kernel.asm['ptx'])
        file.flush()
        said = subprocess.run([ptxas, '-v', '--gpu-name=sm_90a', file.name, '-o', '/dev/null'], capture_output=True,
                              text=True, check=True).stderr
    _, *between = re.split(r'wgmma\.mma_async', kernel.asm['ptx'])
    return {'shared': kernel.metadata.shared, 'spilled': int(re.search(r'(\d+) bytes spill stores', said)[1]),
            'products': len(between), 'serialised': 'C75' in said,
            # Most multiplications between the start of one product and the next, without waiting for the first.
            'under_product': max((len(re.findall(r'\bmul\.f32', part)) for part in between[:-1]
                                  if 'wgmma.wait_group' not in part), default=0)}


if __name__ == '__main__':
    kernels = {'attention': attention, 'product': product, 'page': page, 'flat': flat, 'cross': cross, 'rows': rows}
    named = (variant.split('-') if '-' in variant else (variant, '') for variant in sys.argv[1:])
    print(json.dumps([kernels[name](*(letter == 'y' for letter in letters)) for name, letters in named]))
