"""Prompts as the rows that the networks were trained with: by UMT5 (Chung et al. 2023), or from a file."""
from __future__ import annotations

import html
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint_description import ModelError


def read_rows(file: Path) -> Tensor:
    """Read rows (n, width) from a safetensors file that holds nothing else. Raises ModelError."""
    try:
        rows, = load_file(file).values()
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f'{file} holds no rows of a text: one tensor (rows, width) in safetensors ({error})') from error
    return rows.float()


def encode(folder: Path, prompt: str, tokens: int, device: torch.device | str = 'cpu') -> Tensor:
    """Return rows (n, width), float32, of a prompt of at most ``tokens``, its end included.

    ``folder`` has what transformers saves: ``text_encoder`` (UMT5EncoderModel, safetensors) and ``tokenizer``, as in
    checkpoints in diffusers' layout. The encoder is 11 GB in bfloat16; it is loaded, run once and freed. Raises ModelError.
    """
    try:
        from transformers import AutoTokenizer, UMT5EncoderModel
    except ImportError as error:
        raise ModelError(f'a prompt needs transformers ({error}): pip install "worldmodel-ros[wan]"') from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder / 'tokenizer', local_files_only=True)
        encoder = UMT5EncoderModel.from_pretrained(
            folder / 'text_encoder', local_files_only=True, use_safetensors=True,
            dtype=torch.bfloat16 if torch.device(device).type == 'cuda' else torch.float32)
    except Exception as error:  # transformers, tokenizers and safetensors each raise their own
        raise ModelError(f'no text encoder can be read from {folder}: {error}') from error
    # Cleaned as in the published code, except that wrongly decoded text is not repaired.
    words = re.sub(r'\s+', ' ', html.unescape(html.unescape(prompt))).strip()
    ids = tokenizer(words, max_length=tokens, truncation=True, add_special_tokens=True, return_tensors='pt').input_ids
    with torch.inference_mode():
        return encoder.to(device).eval()(ids.to(device)).last_hidden_state[0].float().cpu()
