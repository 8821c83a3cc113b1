"""The Wan family next to diffusers' own networks, which must be installed (extra ``[wan]``)."""
import copy
import importlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import wan_tiny as tiny

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.parallel.group import Group
from worldmodel_ros.model.wan.checkpoint import load
from worldmodel_ros.model.wan.sequence import PagedSequences, Window
from worldmodel_ros.model.wan.vae import DecodeStream, ImageCondition, StreamState, WanVae
from worldmodel_ros.model.wan.vae_layers import Rows, fuse

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / 'benchmarks' / 'results' / 'wan_equality.json'
needs_diffusers = pytest.mark.skipif(find_spec('diffusers') is None, reason='diffusers is not installed: extra [wan]')
SIZES = {'num_attention_heads': 2, 'attention_head_dim': 128, 'num_layers': 3, 'ffn_dim': 512, 'in_channels': 36,
         'out_channels': 16, 'text_dim': tiny.TEXT_WIDTH}


def randomise(module):
    """Some of diffusers' layers start at zero, which would hide a mistake."""
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        parameter.data = tiny.draw(name, *shape, scale=0.6 / max(1, parameter[0].numel()) ** 0.5) if len(shape) > 1 else \
            parameter.data + tiny.draw(name, *shape, scale=0.1)
    return module.eval()


def first_chunk(folder):
    """The first chunk by a checkpoint that diffusers' transformer writes into ``folder``, and by that transformer."""
    from diffusers import WanTransformer3DModel
    peer = randomise(WanTransformer3DModel(**SIZES))
    peer.save_pretrained(folder, max_shard_size='5MB')
    dit = load(folder, layers=torch.float32)
    latents, text = tiny.draw('latents', 36, 3, *tiny.LATENT), tiny.text()
    # Padding counts there, too, if it is handed in.
    padded = torch.cat([text, torch.zeros(512 - len(text), tiny.TEXT_WIDTH)])
    wanted, = peer(latents[None], torch.tensor([825]), padded[None], return_dict=False)
    pages = PagedSequences(dit.config, Window(6, 3, 3), tiny.GRID, Precision.FP32, page_tokens=16)
    with pages.open().chunk(3) as attention:
        found = dit(latents, dit.modulation(825.0), dit.prompt(text), None, attention)
    return found, wanted[0]


@needs_diffusers
@torch.inference_mode()
def test_the_first_chunk_is_that_of_the_transformer_whose_checkpoint_it_wrote(tmp_path):
    found, wanted = first_chunk(tmp_path / 'transformer')
    assert len(list((tmp_path / 'transformer').glob('*.safetensors'))) > 2
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-5


@pytest.fixture(scope='module')
def vae():
    from diffusers import AutoencoderKLWan
    torch.manual_seed(0)
    return WanVae(randomise(AutoencoderKLWan(base_dim=8)))


@needs_diffusers
@torch.inference_mode()
def test_decoding_chunk_by_chunk_is_decoding_the_whole_bit_for_bit(vae):
    latents = tiny.draw('z', 16, 5, 4, 6)
    scaled = latents[None] * vae._std + vae._mean
    whole = vae.model.decode(scaled, return_dict=False)[0][0]
    state, parts = vae.start(), []
    for part in latents.split([2, 1, 2], 1):
        images, state = vae.decode(part, state)
        parts.append(images)
    assert [part.shape[1] for part in parts] == [5, 4, 8] and torch.equal(torch.cat(parts, 1), whole)


@needs_diffusers
@torch.inference_mode()
def test_the_comparison_that_is_committed_is_made_with_what_is_installed(vae, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    rows = list(importlib.import_module('wan_equality').diffusers(vae))
    committed = {(row['against'], row['what']) for row in json.loads(RESULT.read_text())['rows']}
    assert len(rows) == 3 and {row[:2] for row in rows} <= committed
    assert all(found <= limit for *_, found, limit in rows)


def test_every_row_of_the_committed_comparison_is_within_its_limit():
    rows = json.loads(RESULT.read_text())['rows']
    assert {row['against'].split(',')[0] for row in rows} >= {'lingbot_world', 'lingbot_world_v2', 'self_forcing', 'diffusers'}
    for row in rows:
        within = row['found'] >= row['limit'] if row['measure'] == 'ssim' else row['found'] <= row['limit']
        assert within and row['passed'], row


@needs_diffusers
@torch.inference_mode()
def test_the_layers_that_take_diffusers_place_give_its_images():
    from diffusers import AutoencoderKLWan
    torch.manual_seed(0)
    model = randomise(AutoencoderKLWan(base_dim=8))
    latents = tiny.draw('z', 16, 3, 4, 6)
    plain = WanVae(copy.deepcopy(model), fused=False)
    wanted, parts = plain.decode(latents, plain.start())[0], []
    vae = WanVae(model)
    kinds = [type(layer).__name__ for layer in vae.model.decoder.modules()]
    assert {'CausalConv', 'NormSilu', 'Upsample'} <= {*kinds} and not {'WanCausalConv3d', 'WanUpsample', 'SiLU'} & {*kinds}
    assert vae.model.state_dict().keys() == plain.model.state_dict().keys()
    assert torch.allclose(vae.decode(latents, vae.start())[0], wanted, atol=1e-5)
    stream = DecodeStream(vae)
    for part in latents.split([1, 2], 1):
        decoded = stream.decode(part)
        decoded.wait()
        parts.append(decoded.images())
    assert torch.allclose(torch.cat(parts, 1), wanted, atol=1e-5) and stream.state.nbytes > 0


@needs_diffusers
@torch.inference_mode()
def test_a_gpus_layers_give_diffusers_images_also_from_states_of_one_frame():
    from diffusers import AutoencoderKLWan
    torch.manual_seed(0)
    model = randomise(AutoencoderKLWan(base_dim=8))
    plain, own = WanVae(copy.deepcopy(model), fused=False), WanVae(model, fused=False)
    fuse(own.model.decoder, blocks=True)
    kinds = {type(layer).__name__ for layer in own.model.decoder.modules()}
    assert not {'WanResidualBlock', 'WanResample', 'WanUpsample'} & kinds
    latents = tiny.draw('z', 16, 7, 4, 6)
    one, other = plain.start(), own.start()
    states = [one]
    for at, part in enumerate(latents.split([1, 3, 1, 2], 1)):
        wanted, one = plain.decode(part, one)
        found, other = own.decode(part, states[1] if at == 1 else other)
        assert torch.allclose(found, wanted, atol=1e-5), at
        states.append(one)  # of one frame after the first: what a CPU has saved goes on on a GPU


class Threads:
    """In place of ``Link``: threads of one process, who meet for each message."""

    def __init__(self, rank, barrier, said):
        self.rank, self.count, self._barrier, self._said = rank, barrier.parties, barrier, said

    def all_gather(self, x):
        self._said[self.rank] = x
        self._barrier.wait(30.0)
        found = torch.stack(self._said)
        self._barrier.wait(30.0)
        return found


@needs_diffusers
@pytest.mark.parametrize('blocks', [False, True])
def test_processes_decode_some_rows_of_each_image_each(blocks):
    from diffusers import AutoencoderKLWan
    torch.manual_seed(0)
    model = randomise(AutoencoderKLWan(base_dim=8))
    plain, barrier, said = WanVae(copy.deepcopy(model), fused=False), threading.Barrier(2), [None, None]
    parts = tiny.draw('z', 16, 4, 4, 6).split([1, 2, 1], 1)
    state, wanted = plain.start(), []
    for part in parts:
        images, state = plain.decode(part, state)
        wanted.append(images)

    @torch.inference_mode()
    def decode(rank):
        vae, found = WanVae(copy.deepcopy(model), fused=False), []
        vae.rows = Rows(Group(Threads(rank, barrier, said)))
        fuse(vae.model.decoder, blocks=blocks, rows=vae.rows)
        one = vae.start()
        for part in parts:
            images, one = vae.decode(part, one)
            found.append(images)
            one = vae.own(vae.whole(one))  # as a file keeps it
        return found, one.nbytes
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(decode, range(2)))
    for found, held in both:
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))
        assert blocks or held * 2 == state.nbytes



@needs_diffusers
@torch.inference_mode()
def test_encoding_chunk_by_chunk_is_encoding_the_whole_bit_for_bit(vae):
    images = tiny.draw('images', 3, 13, 32, 48).clamp(-1, 1)
    whole = (vae.model.encode(images[None]).latent_dist.mode() - vae._mean) / vae._std
    state, parts = vae.start(encoder=True), []
    for part in images.split([1, 8, 4], 1):
        latents, state = vae.encode(part, state)
        parts.append(latents)
    assert torch.equal(torch.cat(parts, 1), whole[0])
    with pytest.raises(ValueError, match='no latent frames'):
        vae.encode(images[:, :3], state)


@needs_diffusers
def test_a_state_is_a_fork_that_nothing_writes_to_and_that_a_file_can_hold(vae):
    first, left, right = (tiny.draw(name, 16, 2, 4, 6) for name in ('first', 'left', 'right'))
    _, state = vae.decode(first, vae.start())
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    _, other = vae.decode(left, state)
    once, _ = vae.decode(right, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())
    again = StreamState.of_tensors(state.tensors(), len(state.features), WanVae.MARK)
    assert torch.equal(vae.decode(right, again)[0], once) and state.nbytes == again.nbytes > 0
    assert not torch.equal(vae.decode(right, other)[0], once)


@needs_diffusers
def test_the_condition_is_the_encoded_image_followed_by_grey_and_settles(vae):
    image = tiny.draw('image', 3, 32, 48).clamp(-1, 1)
    frames = 9
    whole, _ = vae.encode(torch.cat([image[:, None], torch.zeros(3, 4 * (frames - 1), 32, 48)], 1), vae.start(encoder=True))
    stream = ImageCondition(vae, image)
    chunks = [stream.next(3)]
    branch = stream.fork()
    chunks += [stream.next(3), stream.next(3)]
    found = torch.cat(chunks, 1)
    assert torch.equal(found[4:], whole)
    assert found[:4, 0].all() and not found[:4, 1:].any()
    assert torch.equal(branch.next(3), chunks[1])
    stream.next(60)  # more than the encoder sees
    calls, encode = [], vae.encode
    vae.encode = lambda *inputs: calls.append(1) or encode(*inputs)
    try:
        stream.next(6)
    finally:
        del vae.encode
    assert not calls


@needs_diffusers
def test_a_vae_is_read_from_a_folder_and_a_broken_one_is_refused(vae, tmp_path):
    vae.model.save_pretrained(tmp_path / 'vae')
    latents = tiny.draw('z', 16, 1, 4, 6)
    read = WanVae.load(tmp_path / 'vae')
    assert torch.equal(read.decode(latents, read.start())[0], vae.decode(latents, vae.start())[0])
    (tmp_path / 'Wan2.1_VAE.pth').write_bytes(b'no tensors')
    with pytest.raises(ModelError, match='no VAE can be read'):
        WanVae.load(tmp_path / 'Wan2.1_VAE.pth')


@pytest.mark.skipif(find_spec('diffusers') is not None, reason='diffusers is installed')
def test_without_diffusers_the_remedy_is_told(tmp_path):
    with pytest.raises(ModelError, match=r'worldmodel-ros\[wan\]'):
        WanVae.load(tmp_path)
