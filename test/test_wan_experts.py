"""Two networks, one for much noise and one for little: from both layouts, and next to diffusers' pipeline."""
import json
from importlib.util import find_spec

import pytest
import torch
import wan_tiny as tiny
from test_wan_diffusers import SIZES, randomise
from test_wan_model import CONFIG, ORIGINAL, write_shards

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.wan import checkpoint, experts
from worldmodel_ros.model.wan.sampler import Sampler
from worldmodel_ros.model.wan.schedule import Schedule
from worldmodel_ros.model.wan.sequence import PagedSequences, Window

LEVELS = 1.0, 0.95, 0.8, 0.4
TEXT = dict(CONFIG.__dict__, in_channels=16, camera_width=0)
needs_diffusers = pytest.mark.skipif(find_spec('diffusers') is None, reason='diffusers is not installed: extra [wan]')


def originals(**changes):
    """Two networks of text alone, in the original names, that differ."""
    shapes = checkpoint.original_shapes(type(CONFIG)(**TEXT))
    return [{name: tiny.weight(name, shape) + (0.02 * at) for name, shape in shapes.items()} for at in range(2)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp('original')
    for name, tensors in zip(experts.LAYOUTS['original'], originals()):
        write_shards(path / name, tensors, ORIGINAL | {'in_dim': 16})
    return path


def sequences(pair, **window):
    return [PagedSequences(network.config, Window(6, 0, 3), tiny.GRID, Precision.FP32, network.device, page_tokens=16).open()
            for network in pair.networks]


def test_the_original_layout_has_two_networks_and_the_published_boundary(folder):
    pair = experts.load(folder, layers=torch.float32)
    assert pair.boundary == 0.875 and [pair.at(t) for t in (1000.0, 875.0, 874.9, 0.0)] == [0, 0, 1, 1]
    assert not torch.equal(pair.high.head.weight, pair.low.head.weight)
    assert experts.load(folder, layers=torch.float32, boundary=0.5).boundary == 0.5
    assert experts.has_experts(folder) and not experts.has_experts(folder / 'high_noise_model')
    with pytest.raises(ModelError, match='between 0 and 1'):
        experts.load(folder, boundary=1.5)
    with pytest.raises(ModelError, match='has no two networks: they are in high_noise_model and low_noise_model, or'):
        experts.load(folder / 'high_noise_model')


def test_a_folder_whose_networks_differ_in_size_is_refused(folder, tmp_path):
    high, low = experts.LAYOUTS['original']
    write_shards(tmp_path / high, originals()[0], ORIGINAL | {'in_dim': 16})
    shapes = checkpoint.original_shapes(type(CONFIG)(**TEXT | {'layers': 2}))
    write_shards(tmp_path / low, {name: tiny.weight(name, shape) for name, shape in shapes.items()},
                 ORIGINAL | {'in_dim': 16, 'num_layers': 2})
    with pytest.raises(ModelError, match='the two networks differ'):
        experts.load(tmp_path)


@torch.inference_mode()
def test_a_network_sees_its_own_steps_only_and_both_keep_the_clean_chunk(folder):
    pair = experts.load(folder, layers=torch.float32)
    schedule, asked = Schedule.euler(LEVELS), []
    for index, network in enumerate(pair.networks):
        network.register_forward_pre_hook(lambda module, inputs, index=index: asked.append(index))
    sampler, both, prompts = experts.ExpertSampler(pair, schedule), sequences(pair), pair.prompt(tiny.text())
    first = sampler.chunk(both, prompts, tiny.noise(0, 3))
    assert asked == [0, 0, 1, 1] and [sequence.frame for sequence in both] == [3, 3]
    # By hand: the second chunk's first step is the first network's alone, after its own keys of the clean chunk.
    alone = sequences(pair)[0]
    Sampler(pair.high, schedule).commit(alone, prompts[0], first)
    x = tiny.noise(1, 3)(0)
    with alone.chunk(3) as attention:
        wanted = pair.high(x, pair.high.modulation(1000.0), prompts[0], None, attention)
    seen = []
    pair.high.register_forward_hook(lambda module, inputs, out: seen.append(out))
    sampler.chunk(both, prompts, tiny.noise(1, 3))
    torch.testing.assert_close(seen[0], wanted, rtol=1e-4, atol=1e-5)
    sampler.commit(both, prompts, tiny.draw('seen', 16, 3, *tiny.LATENT))
    assert [sequence.frame for sequence in both] == [9, 9]


@torch.inference_mode()
def test_what_fails_in_one_network_leaves_both_sequences_as_they_were(folder):
    pair = experts.load(folder, layers=torch.float32)
    sampler, both, prompts = experts.ExpertSampler(pair, Schedule.euler(LEVELS)), sequences(pair), pair.prompt(tiny.text())

    def broken(module, inputs):
        raise RuntimeError('out of memory')
    handle = pair.low.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match='out of memory'):
        sampler.chunk(both, prompts, tiny.noise(0, 3))
    handle.remove()
    assert [sequence.frame for sequence in both] == [0, 0]
    assert sampler.chunk(both, prompts, tiny.noise(0, 3)).isfinite().all()


@needs_diffusers
@pytest.mark.skipif(find_spec('transformers') is None, reason='transformers is not installed: extra [wan]')
@torch.inference_mode()
def test_the_whole_video_is_that_of_diffusers_pipeline_from_the_folder_it_wrote(tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    sizes = SIZES | {'in_channels': 16}
    high, low = (randomise(WanTransformer3DModel(**sizes)) for _ in range(2))
    for parameter in low.parameters():
        parameter.data = 0.9 * parameter.data
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
                           transformer=high, transformer_2=low, boundary_ratio=0.8)
    for name in experts.LAYOUTS['diffusers']:
        getattr(pipeline, name).save_pretrained(tmp_path / name, max_shard_size='5MB')
    pipeline.save_config(tmp_path)
    assert json.loads((tmp_path / 'model_index.json').read_text())['boundary_ratio'] == 0.8
    text, x = tiny.text(), tiny.draw('x', 16, 3, *tiny.LATENT)
    padded = torch.cat([text, torch.zeros(512 - len(text), tiny.TEXT_WIDTH)])
    pipeline.set_progress_bar_config(disable=True)
    wanted = pipeline(prompt_embeds=padded[None], height=8 * tiny.LATENT[0], width=8 * tiny.LATENT[1], num_frames=9,
                      num_inference_steps=4, guidance_scale=1.0, latents=x[None], output_type='latent').frames[0]
    levels = pipeline.scheduler.sigmas[:-1].tolist()
    assert levels[0] >= 0.8 > levels[-1]
    pair = experts.load(tmp_path, layers=torch.float32)
    assert pair.boundary == 0.8
    found = experts.ExpertSampler(pair, Schedule.euler(levels)).chunk(sequences(pair), pair.prompt(text), lambda step: x)
    assert float((found - wanted).norm() / wanted.norm()) <= 2e-5
