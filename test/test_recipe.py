"""What the stages learn from: targets mean what they say, roll-outs are what a session imagines, losses fall."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_model import SMALL, small_checkpoint, small_model

from worldmodel_ros.engine import load
from worldmodel_ros.engine.sampler import Noise
from worldmodel_ros.model.action_head import action_head
from worldmodel_ros.model.rollout import frame_mask
from worldmodel_ros.model.sampling import FLOW, HALF, WHOLE
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import Chunks, mix, noisy_chunks
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.objectives.imitation import BLOCK, ImitationObjective, committed_features
from worldmodel_ros.train.objectives.policy import command_targets, draw_policy, imitation_loss, policy_labels
from worldmodel_ros.train.objectives.pose import dead_reckoning, displacement
from worldmodel_ros.train.objectives.sampler import ChunkSampler, roll_out
from worldmodel_ros.train.objectives.self_forcing import SelfForcingObjective
from worldmodel_ros.train.objectives.student import StudentObjective
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.run.loop import averaged_copy
from worldmodel_ros.train.run.options import ImitationOptions, SelfForcingOptions, StudentOptions, TeacherOptions

WINDOW = SMALL.window_frames


def moving_square(episodes=6, steps=40, seed=0) -> Episodes:
    """Episodes of a bright square that moves by the action, with latents and labels, on the CPU."""
    rng = np.random.default_rng(seed)
    actions = np.repeat(rng.uniform(-0.3, 0.6, (episodes, steps // 4, 2)), 4, 1).astype(np.float32)
    h, w = SMALL.latent_size
    place = np.cumsum(actions, 1) + [h / 2, w / 2]
    grid = np.arange(h)
    near = [np.exp(-(grid - place[..., axis, None]) ** 2) for axis in (0, 1)]
    picture = near[0][..., :, None, None] * near[1][..., None, :, None]
    latents = torch.from_numpy(4.0 * np.repeat(picture, SMALL.latent_channels, -1) - 0.5)
    goals = len(SMALL.goals)
    return Episodes(
        frames=torch.zeros(episodes, steps, 1, 1, 3, dtype=torch.uint8), actions=torch.from_numpy(actions),
        expert=torch.from_numpy(np.repeat(actions[:, :, None], goals, 2)),
        collided=torch.from_numpy(rng.random((episodes, steps)) < 0.1),
        goal_distance=torch.from_numpy(rng.uniform(0.3, 4.0, (episodes, steps, goals)).astype(np.float32)),
        visible=torch.ones(episodes, steps, goals, dtype=torch.bool),
        poses=dead_reckoning(1.03 * torch.from_numpy(actions), SMALL.step_period), latents=latents.bfloat16())


def trained(objective, steps, rate=2e-3, averaged=None, seed=0):
    """The values of every step of a plain training loop."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(objective.parameters(), lr=rate)
    rows = []
    for step in range(steps):
        loss, values = objective.loss(objective.draw(rng, generator))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if averaged is not None:
            for slow, fast in zip(averaged.parameters(), objective.model.parameters()):
                slow.lerp_(fast.detach(), 0.1)
        objective.after_update(step)
        rows.append({name: float(value.detach()) for name, value in values.items()})
    return rows


def fell(rows, name, to=0.9, ends=8):
    values = [row[name] for row in rows]
    assert np.mean(values[-ends:]) < to * np.mean(values[:ends]), (name, values[:ends], values[-ends:])


def options(kind, **changes):
    sizes = {'clip_frames': 14}
    if kind is SelfForcingOptions:
        sizes = {'clip_frames': WINDOW + 16, 'crop_frames': WINDOW + 8}
    return kind(**{'batch': 4, 'chunks': 2} | sizes | changes)


@pytest.mark.parametrize('steps', [1, 2])
def test_a_roll_out_is_what_a_session_imagines(tmp_path, steps):
    engine = load(str(small_checkpoint(tmp_path)), 'torch')
    session, observed = engine.open_session(seed=5), []
    frames = np.random.default_rng(1).integers(0, 256, (WINDOW, *SMALL.image_size, 3), dtype=np.uint8)
    actions = np.random.default_rng(2).uniform(-0.3, 0.6, (WINDOW + 12, 2)).astype(np.float32)
    for frame, action in zip(frames, actions):
        session.observe(frame, action)
        observed.append(torch.as_tensor(session._latent).cpu())
    units = session.what_if(actions[WINDOW:], steps)
    try:
        while True:
            next(units)
    except StopIteration as end:
        truth = end.value.latents
    shape = SMALL.chunk_frames, *SMALL.latent_size, SMALL.latent_channels
    noise = [Noise(5, shape).draw(first) for first in range(WINDOW, WINDOW + 12, 4)]  # the same moment, the same noise
    ours = roll_out(engine.backend.model.dit.cpu(), torch.stack(observed)[None], torch.from_numpy(actions)[None],
                    torch.from_numpy(np.concatenate(noise))[None], steps)
    np.testing.assert_allclose(ours[0], truth, rtol=1e-3, atol=2e-4)


def test_a_command_chunk_follows_the_expert_only_while_the_robot_does():
    expert = torch.zeros(1, 8, 1, 2)
    expert[0, :, 0, 0] = torch.arange(8) * 0.05
    actions = torch.zeros(1, 8, 2)
    actions[0, 1:] = expert[0, :-1, 0]  # the robot does what the expert said ...
    actions[0, 3] = torch.tensor([0.6, 1.5])  # ... but for the action that led to frame 3
    _, target, mask = command_targets(expert, actions, torch.zeros(1, 4, dtype=torch.long), SMALL)
    torch.testing.assert_close(target[0, 0, 0, :, 0], torch.tensor([0.0, 0.05, 0.10, 0.15]))
    assert mask[0, :3, 0].tolist() == [[True, True, True, False], [True, True, False, False],
                                       [True, False, False, False]]
    # Once the odd action is under way, the expert's labels after it are its answer to just that.
    prefix, _, mask = command_targets(expert, actions, torch.tensor([[3, 2, 1, 0]]), SMALL)
    torch.testing.assert_close(prefix[0, 0, 2], torch.tensor([0.6, 1.5]))
    assert mask[0, :3, 0].tolist() == [[False, False, False, True], [False, False, True, True],
                                       [False, True, True, True]]


def test_the_policy_searches_for_a_goal_that_its_window_does_not_show():
    episodes, goal, last = moving_square(episodes=2), 1, 20
    episodes.search = torch.full_like(episodes.actions, 0.9)
    episodes.visible[0, :, goal] = False
    episodes.visible[0, last, goal] = True  # seen once
    clip = torch.tensor([[0], [1]]), torch.arange(10, 40).expand(2, 30)
    labels = policy_labels(episodes, clip, SMALL, search=True)
    searches = (labels == 0.9).all(-1)
    assert torch.arange(10, 40)[~searches[0, :, goal]].tolist() == list(range(last, last + WINDOW + 1))
    assert not searches[0, :, goal + 1].any() and not searches[1].any()
    assert torch.equal(labels[~searches], episodes.expert[clip][~searches])
    assert torch.equal(policy_labels(episodes, clip, SMALL, search=False), episodes.expert[clip])
    # A clip that begins after the goal was last seen does not show it.
    assert (policy_labels(episodes, (clip[0], clip[1][:, last - 9:]), SMALL, search=True)[0, :, goal] == 0.9).all()


def test_a_share_of_the_clips_holds_a_frame_in_contact_behind_a_window():
    episodes, length = moving_square(episodes=4, steps=60), WINDOW + 8
    episodes.collided = torch.zeros(4, 60, dtype=torch.bool)
    episodes.collided[1, 30:34], episodes.collided[2, 57:], episodes.collided[3, 2] = True, True, True
    episodes.lengths = torch.tensor([60, 60, 58, 60])  # what follows in the third is padding
    objective = TeacherObjective(small_model(), episodes, TeacherOptions(batch=8, clip_frames=length, contact_share=0.5))
    assert objective.contacts.tolist() == [[1, 30], [1, 31], [1, 32], [1, 33], [2, 57], [3, 2]]
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    found = set()
    for _ in range(20):
        batch = objective.draw(rng, generator)
        for episode, frames in zip(batch.episode[4:, 0].tolist(), batch.frame[4:].tolist()):
            assert frames == list(range(frames[0], frames[0] + length)) and 0 <= frames[0]
            assert frames[-1] < episodes.lengths[episode]
            inside = [at for e, at in objective.contacts.tolist() if e == episode and at in frames]
            assert inside and (max(inside) >= frames[0] + WINDOW or frames[0] == 0)
            found |= {(episode, at) for at in inside}
    assert len(found) == len(objective.contacts)


def test_chunks_of_the_share_begin_in_a_long_contact_as_often_as_such_contacts_last():
    episodes, length = moving_square(episodes=3, steps=120), WINDOW + 12
    episodes.collided = torch.zeros(3, 120, dtype=torch.bool)
    episodes.collided[0, 40:100] = True  # pushes for 6 s, most of which is far from where the contact begins and ends
    episodes.collided[1, 50] = True      # and a touch
    objective = TeacherObjective(small_model(), episodes, TeacherOptions(batch=16, clip_frames=length, contact_share=1.0))
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    begin = []  # whether the frame before a chunk is in contact, as what-if questions begin in one
    for _ in range(60):
        batch = objective.draw(rng, generator)
        before = batch.frame[:, batch.starts[batch.starts >= WINDOW] - 1]
        begin.append(episodes.collided[batch.episode, before].float().mean().item())
    assert np.mean(begin) > 0.6


def test_no_share_of_contacts_draws_the_clips_that_were_always_drawn_and_drives_without_any_are_refused():
    episodes, model = moving_square(), small_model()
    first, second = (TeacherObjective(model, episodes, TeacherOptions(batch=4, clip_frames=14, contact_share=share)).draw(
        np.random.default_rng(0), torch.Generator().manual_seed(0)) for share in (0.0, 0.1))  # 0.1 of 4 clips are none
    assert torch.equal(first.frame, second.frame) and torch.equal(first.noise, second.noise)
    episodes.collided = torch.zeros_like(episodes.collided)
    with pytest.raises(ValueError, match='contact_share needs drives that tell of contacts'):
        TeacherObjective(model, episodes, TeacherOptions(contact_share=0.5))
    with pytest.raises(ValueError, match='for the stages teacher and student'):
        SelfForcingOptions(contact_share=0.5)


def test_features_of_frames_committed_in_blocks_are_those_of_sessions():
    episodes, model = moving_square(episodes=2, steps=2 * BLOCK + 4), small_model()
    found = committed_features(model.dit, episodes.latents, episodes.actions)
    frames = episodes.actions.shape[1]
    ones = torch.ones(2, frames)
    whole = model.dit(episodes.latents.float(), ones, ones.long() * FLOW, episodes.actions,
                      clips.rotary(SMALL, np.arange(frames), ones),
                      clips.on_device(frame_mask(SMALL, 0, frames, committed=True), ones.device))[1]
    torch.testing.assert_close(found.float(), whole, rtol=1e-2, atol=1e-2)  # bfloat16


def test_a_policy_learns_alone():
    model = small_model()
    model.action_head.requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = ImitationObjective(model, moving_square(), ImitationOptions(batch=8, clip_frames=10, search=False))
    objective.model.action_head.train()
    fell(trained(objective, 60), 'imitation')
    moved = {name.split('.')[0] for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert moved == {'action_head'}


def test_a_policy_can_keep_what_it_plans_where_a_goal_was_seen():
    episodes, model, goal = moving_square(episodes=2), small_model(), 2
    episodes.search = torch.full_like(episodes.actions, 0.9)
    episodes.visible[:, :, goal] = False
    objective = ImitationObjective(model, episodes, ImitationOptions(keep=True))
    assert (objective.labels[:, :, goal] == 0.9).all()
    features = committed_features(model.dit, episodes.latents, episodes.actions)
    planned = model.action_head(features[1].float())[:, :, 0]
    others = [other for other in range(len(SMALL.goals)) if other != goal]
    torch.testing.assert_close(objective.labels[1][:, others], planned[:, others])
    with pytest.raises(ValueError, match='keep without search leaves nothing to learn'):
        ImitationOptions(keep=True, search=False)


def test_chunks_with_a_full_window_are_as_many_as_asked_for():
    rng = np.random.default_rng(0)
    starts = np.array([clips.draw_starts(SMALL, WINDOW + 8, 4, rng, 0.5) for _ in range(200)])
    assert (starts[:, :2] >= WINDOW).all() and starts[:, 2:].min() == 1 and starts.max() == WINDOW + 4
    assert clips.draw_starts(SMALL, WINDOW, 4, rng, 1.0).max() <= WINDOW - SMALL.chunk_frames


def test_dead_reckoning_drives_a_circle_and_displacements_are_seen_from_the_robot():
    turn, speed, count = 0.5, 0.4, 41
    actions = torch.tensor([speed, turn]).expand(1, count, 2)
    poses = dead_reckoning(actions, 0.1)
    angle = turn * 0.1 * (count - 1)
    moved = displacement(poses, torch.tensor([0]), torch.tensor([count - 1]))[0, 0]
    radius = speed / turn
    torch.testing.assert_close(moved, torch.tensor([radius * np.sin(angle), radius * (1 - np.cos(angle)), angle],
                                                   dtype=torch.float32), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('policy', ['flow', 'regression'])
def test_a_plan_stays_in_range_and_begins_with_what_is_under_way(policy):
    torch.manual_seed(0)
    head = action_head(replace(SMALL, policy=policy)).eval()
    features = torch.randn(2, SMALL.tokens, SMALL.width)
    noise, prefix = 3.0 * torch.randn(2, 4, 4, 2), torch.tensor([0.5, -1.0]).expand(2, 4, 2)
    plan = head(features, noise, prefix, torch.tensor([0, 3]))
    assert plan.shape == (2, 4, 4, 2)
    assert (plan >= torch.tensor(SMALL.action_low)).all() and (plan <= torch.tensor(SMALL.action_high)).all()
    assert torch.equal(plan[1, :, :3], prefix[1, :3].expand(4, 3, 2))
    assert not torch.equal(plan[0, :, :3], plan[1, :, :3])
    free = head(features, noise)
    torch.testing.assert_close(free[0], plan[0])  # without a delay, the prefix is not looked at


def test_the_flow_policy_draws_one_of_two_habits_and_goes_on_with_the_one_under_way():
    """An expert that turns left or right, half of the time each: the mean, straight on, is what nobody does."""
    torch.manual_seed(0)
    head = action_head(SMALL)
    features = torch.zeros(256, SMALL.tokens, SMALL.width)
    optimiser, generator = torch.optim.Adam(head.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
    side = torch.where(torch.arange(32) % 2 == 0, 1.0, -1.0)
    expert = (side[:, None, None, None] * torch.tensor([0.0, 1.0])).expand(32, 5, 4, 2)
    actions, observed = expert[:, :, 0], torch.ones(32, 5, dtype=torch.bool)
    for _ in range(200):
        loss = imitation_loss(head, features[:32, None].expand(-1, 5, -1, -1), expert, actions, observed,
                              draw_policy(SMALL, 32, 5, features.device, generator))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        turns = head(features, torch.randn(256, 4, 4, 2, generator=generator))[..., 1]
        assert (turns.abs() > 0.5).float().mean() > 0.85
        assert 0.3 < (turns[:, 0, 0] > 0).float().mean() < 0.7
        prefix = torch.tensor([0.0, 1.0]).expand(256, 4, 2)
        after = head(features, torch.randn(256, 4, 4, 2, generator=generator), prefix, torch.full((256,), 2))[..., 1]
        assert (after > 0.7).float().mean() > 0.95


def test_teacher_student_and_self_forcing_learn():
    episodes = moving_square()
    model = small_model().requires_grad_(True)
    rows = trained(TeacherObjective(model, episodes, options(TeacherOptions, pose_weight=0.2)), 60)
    for name in ('flow', 'imitation', 'pose'):
        fell(rows, name)
    teacher, averaged = averaged_copy(model), averaged_copy(model)
    rows = trained(StudentObjective(model, averaged, teacher, episodes, options(StudentOptions)), 40, averaged=averaged)
    for name in ('half', 'whole'):
        fell(rows, name)
    averaged = averaged_copy(model)
    before = drift(averaged, episodes)
    trained(SelfForcingObjective(model, averaged, teacher, episodes, options(SelfForcingOptions)), 60, 1e-3, averaged)
    assert drift(averaged, episodes) < 0.9 * before


def drift(model, episodes) -> float:
    """Squared error of the imagined frames, four chunks ahead."""
    clean = episodes.latents[:, :WINDOW + 16].float()
    noise = torch.randn(clean[:, WINDOW:].shape, generator=torch.Generator().manual_seed(9))
    imagined = roll_out(model.dit, clean[:, :WINDOW], episodes.actions, noise, 2)
    return float((imagined - clean[:, WINDOW:]).square().mean())


def test_a_tethered_roll_out_is_denoised_from_half_way_to_the_truth():
    episodes, model = moving_square(2), small_model()
    clean, k = episodes.latents[:, :WINDOW + 2 * SMALL.chunk_frames].float(), SMALL.chunk_frames
    truth = clean[:, WINDOW:]
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(9))
    arguments = model.dit, clean[:, :WINDOW], episodes.actions, noise, 2
    held = roll_out(*arguments, truth, torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(held[1], roll_out(*arguments)[1])
    chunk = Chunks(clean[:1, :WINDOW], episodes.actions[:1, :WINDOW], np.array([WINDOW]), noise[:1, :k],
                   episodes.actions[:1, WINDOW:WINDOW + k])
    half = torch.full((1, k), 0.5)
    mended = ChunkSampler(model, chunk).euler(mix(noise[:1, :k], truth[:1, :k], half), half, 0.5, HALF)
    torch.testing.assert_close(held[:1, :k], mended, rtol=1e-4, atol=1e-4)


def self_forcing_batch(seed=0, **changes):
    episodes, model = moving_square(), small_model()
    objective = SelfForcingObjective(model, model, small_model(1), episodes, options(SelfForcingOptions, **changes))
    return objective, objective.draw(np.random.default_rng(seed), torch.Generator().manual_seed(seed))


def test_self_forcing_commits_what_was_imagined_and_what_was_recorded():
    objective, batch = self_forcing_batch(batch=8, context_noise=0.0)
    truth = objective.episodes.latents[batch.episode, batch.frame].float()
    assert torch.equal(batch.clean, truth)
    observed = batch.observed[..., None, None, None].expand_as(truth)
    assert torch.equal(batch.context[observed], truth[observed])
    assert batch.observed[4:].all() and (~batch.observed[:4]).any(1).all()
    assert not torch.isclose(batch.context[~observed], truth[~observed]).all()


def test_the_truth_counts_the_less_the_further_the_imagined_frames_before_a_chunk_are_from_it():
    objective, batch = self_forcing_batch(batch=16)
    k, half = SMALL.chunk_frames, objective.options.truth_distance
    assert (batch.trust[8:] == 1).all() and (batch.flow_trust[8:] == 1).all()
    imagined = 0
    for clip in range(8):
        for chunk, start in enumerate(batch.starts):
            before = list(range(start - k, start))
            if before[0] < 0:
                continue
            apart = np.mean([float((batch.context[clip, f] - batch.clean[clip, f]).square().mean())
                             * (not batch.observed[clip, f]) for f in before])
            ours = batch.trust[clip, chunk * k]
            assert ours == pytest.approx(1 / (1 + (apart / half) ** 2), rel=1e-4)
            imagined += ours < 1
    assert imagined > 4
    assert (batch.flow_trust >= batch.trust).all() and (batch.flow_trust[:8] < 1).any()


def test_the_flow_keeps_to_the_teacher_where_the_truth_is_lost():
    objective, batch = self_forcing_batch(batch=16, truth_distance=1e-6)  # any difference at all
    z, target = objective.targets(batch)
    lost = (batch.step == FLOW) & (batch.trust < 1e-3) & (batch.tau < 0.9)
    assert lost.any()
    told = ChunkSampler(objective.teacher, batch).predict(z, batch.tau, batch.step)
    torch.testing.assert_close(target[lost], told[lost], rtol=1e-2, atol=1e-2)
    kept = (batch.step == FLOW) & (batch.trust == 1)
    torch.testing.assert_close(target[kept], batch.target[kept])


def test_with_the_truth_in_the_place_of_its_roll_outs_self_forcing_is_the_students_stage():
    """Frames, actions, times and masks of a crop then fit together just as those of a recorded clip."""
    objective, _ = self_forcing_batch(batch=8, context_noise=0.0, bootstrap=False)
    objective.latents = objective.episodes.latents[objective.episode, objective.frame].float()
    rng, generator = np.random.default_rng(4), torch.Generator().manual_seed(4)
    batch = objective.draw(rng, generator)
    assert (~batch.observed).any() and torch.equal(batch.context, batch.clean)
    student = StudentObjective(objective.model, objective.averaged, objective.teacher, objective.episodes,
                            options(StudentOptions, batch=8))
    recorded = noisy_chunks(SMALL, student.options, batch.clean, batch.clean, batch.actions, batch.episode, batch.frame,
                            np.random.default_rng(0), torch.Generator())
    recorded = replace(batch, **{name: getattr(recorded, name) for name in ('trust', 'flow_trust', 'clean', 'context')})
    ours, theirs = objective.loss(batch)[1], student.loss(recorded)[1]
    for name in ('flow', 'half', 'whole', 'contact', 'progress'):
        torch.testing.assert_close(ours[name], theirs[name])
    # The same drive, read where the clip came from: nothing is shifted.
    frame = batch.frame[:, :1] + torch.arange(batch.frame.shape[1])
    assert torch.equal(batch.actions, objective.episodes.actions[batch.episode, frame])
    assert torch.equal(batch.target, objective.episodes.latents[batch.episode, frame][:, batch.noisy_index].float())


def test_distribution_matching_pulls_imagined_chunks_to_what_the_world_shows():
    """A student that renders everything too bright; the truth has no weight, so only the two scores can tell it."""
    torch.manual_seed(0)
    episodes = moving_square()
    model = small_model().requires_grad_(True)
    trained(TeacherObjective(model, episodes, options(TeacherOptions, blind_share=1.0)), 100)
    teacher = averaged_copy(model)
    with torch.no_grad():
        model.dit.out.bias += 1.0
    averaged = averaged_copy(model)
    objective = SelfForcingObjective(model, averaged, teacher, episodes,
                                   options(SelfForcingOptions, dmd_weight=1.0, dmd_frames=24, dmd_rate=1e-3))
    matching, rng, generator = objective.matching, np.random.default_rng(0), torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.dit.out.parameters(), lr=1e-2)
    level = []
    for _ in range(50):
        loss = matching.loss(matching.draw(rng, generator))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        matching.after_update()
        averaged.load_state_dict(model.state_dict())
        level.append(float(matching.seen[0].mean() - episodes.latents.float().mean()))
    assert abs(np.mean(level[-10:])) < 0.6 * max(level[:10]), level


def test_a_restored_objective_draws_what_the_interrupted_one_would_have():
    episodes = moving_square()
    model = small_model().requires_grad_(True)
    averaged = averaged_copy(model)

    def objective():
        return SelfForcingObjective(model, averaged, averaged, episodes,
                                  options(SelfForcingOptions, pose_weight=0.1, dmd_weight=0.1))
    first, rng, generator = objective(), np.random.default_rng(0), torch.Generator().manual_seed(0)
    first.loss(first.draw(rng, generator))
    first.after_update(0)
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    places = rng.bit_generator.state, generator.get_state()
    expected = first.draw(rng, generator)
    second = objective()
    second.restore(state)
    rng.bit_generator.state = places[0]
    generator.set_state(places[1])
    drawn = second.draw(rng, generator)
    assert torch.equal(drawn.context, expected.context) and torch.equal(drawn.noise, expected.noise)
    assert torch.equal(drawn.far.context, expected.far.context)
    for each, batch in ((first, expected), (second, drawn)):
        each.loss(batch)
        each.after_update(1)
    for ours, theirs in zip(second.matching.fake.parameters(), first.matching.fake.parameters()):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(second.parameters(), first.parameters()):
        assert torch.equal(ours, theirs)


def test_every_kind_of_step_is_drawn_at_its_level():
    episodes = moving_square()
    model = small_model()
    objective = StudentObjective(model, model, model, episodes, options(StudentOptions, batch=64))
    batch = objective.draw(np.random.default_rng(0), torch.Generator().manual_seed(0))
    assert (batch.tau[batch.step == WHOLE] == 0).all()
    assert set(batch.tau[batch.step == HALF].tolist()) == {0.0, 0.5}
    assert (batch.tau[batch.halfway] == 0.5).all() and batch.halfway.any()


@pytest.mark.parametrize('changes, halves, whole', [
    ({'truth_weight': 1.0}, True, True), ({'truth_weight': 1.0, 'half_truth_weight': 0.0}, False, True),
    ({'truth_weight': 0.0, 'half_truth_weight': 1.0}, True, False), ({'truth_weight': 0.0}, False, False)])
def test_second_half_steps_take_as_much_of_the_truth_as_they_are_told(changes, halves, whole):
    model = small_model()
    objective = StudentObjective(model, model, model, moving_square(), options(StudentOptions, batch=64, **changes))
    batch = objective.draw(np.random.default_rng(0), torch.Generator().manual_seed(0))
    same = (objective.targets(batch)[1] == batch.target).all(-1).all(-1).all(-1)
    assert (same[(batch.step == HALF) & (batch.tau == 0.5)] == halves).all()
    assert (same[batch.step == WHOLE] == whole).all()
    assert not same[(batch.step == HALF) & (batch.tau == 0.0)].any() and same[batch.step == FLOW].all()


@pytest.mark.parametrize('changes, message', [
    ({'clip_frames': WINDOW + 5}, f'{WINDOW + 4} for one'), ({'crop_frames': 4}, 'crop_frames is 4'),
    ({'recorded_share': 1.0}, 'recorded_share is 1.0'),
])
def test_lengths_that_do_not_fit_are_refused_with_the_remedy(changes, message):
    model = small_model()
    with pytest.raises(ValueError, match=message):
        SelfForcingObjective(model, model, model, moving_square(1), options(SelfForcingOptions, **changes))


def test_the_pose_task_needs_poses_and_says_so():
    episodes = moving_square(1)
    episodes.poses = None
    with pytest.raises(ValueError, match='pose_weight'):
        TeacherObjective(small_model(), episodes, TeacherOptions(pose_weight=0.1))
