"""Prompts of open world models: rows from transformers' UMT5, and from files."""
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file

from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.wan.text import encode, read_rows

needs_transformers = pytest.mark.skipif(find_spec('transformers') is None, reason='transformers is not installed: extra [wan]')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A text encoder that is small enough for a test, in the layout of diffusers' checkpoints."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
    folder = tmp_path_factory.mktemp('text')
    words = ['<pad>', '</s>', '<unk>', *(f'▁{word}' for word in 'a quiet street with cats & dogs'.split())]
    tokenizer = Tokenizer(models.Unigram([(word, -float(at)) for at, word in enumerate(words)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single='$A </s>', special_tokens=[('</s>', 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='</s>', pad_token='<pad>', unk_token='<unk>').save_pretrained(
        folder / 'tokenizer')
    torch.manual_seed(0)
    UMT5EncoderModel(UMT5Config(vocab_size=len(words), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)).save_pretrained(
        folder / 'text_encoder')
    return folder


@needs_transformers
def test_rows_are_those_of_the_prompt_without_padding_as_diffusers_pipeline_makes_them(folder):
    from transformers import AutoTokenizer, UMT5EncoderModel
    rows = encode(folder, '  a quiet\n street with cats &amp; dogs ', 24)
    ids = AutoTokenizer.from_pretrained(folder / 'tokenizer')(
        'a quiet street with cats & dogs', padding='max_length', max_length=24, return_tensors='pt')
    with torch.inference_mode():
        encoder = UMT5EncoderModel.from_pretrained(folder / 'text_encoder')
        wanted = encoder(ids.input_ids, ids.attention_mask).last_hidden_state[0]
    assert rows.shape == (8, 32) and rows.dtype == torch.float32
    assert torch.allclose(rows, wanted[:8], atol=1e-5)
    assert not torch.allclose(rows[0], encode(folder, 'quiet street', 24)[0], atol=1e-3)


@needs_transformers
def test_a_prompt_is_cut_to_what_the_network_takes(folder):
    assert len(encode(folder, 'a ' * 100, 24)) == 24


@needs_transformers
def test_a_folder_without_an_encoder_is_refused(tmp_path):
    with pytest.raises(ModelError, match='no text encoder can be read'):
        encode(tmp_path, 'a street', 24)


def test_rows_come_from_a_file_that_holds_nothing_else(tmp_path):
    rows = torch.randn(5, 32)
    save_file({'rows': rows.bfloat16()}, tmp_path / 'rows.safetensors')
    assert torch.equal(read_rows(tmp_path / 'rows.safetensors'), rows.bfloat16().float())
    save_file({'rows': rows, 'more': rows.clone()}, tmp_path / 'two.safetensors')
    (tmp_path / 'none.safetensors').write_bytes(b'')
    for name in ('two.safetensors', 'none.safetensors', 'nowhere.safetensors'):
        with pytest.raises(ModelError, match='no rows of a text'):
            read_rows(tmp_path / name)


@pytest.mark.skipif(find_spec('transformers') is not None, reason='transformers is installed')
def test_without_transformers_the_remedy_is_told(tmp_path):
    with pytest.raises(ModelError, match=r'worldmodel-ros\[wan\]'):
        encode(tmp_path, 'a street', 24)
