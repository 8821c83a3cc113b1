"""The contact probability is calibrated to the odds that hold."""
import pytest
import torch
from episodes import moving_squares
from small_model import small_model

from worldmodel_ros.train.run import calibrate


def test_calibration_finds_the_true_odds_of_overconfident_logits():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, generator=generator) - 2.0
    truth = (torch.rand(20_000, generator=generator) < torch.sigmoid(logits)).float()
    scale, shift = calibrate.fit(4.0 * logits + 1.0, truth)
    assert scale == pytest.approx(0.25, rel=0.05)
    assert shift == pytest.approx(-0.25, abs=0.05)


def test_calibrated_probabilities_are_those_that_the_head_then_gives():
    model = small_model().requires_grad_(True)
    episodes = moving_squares()
    episodes.encode(model.vae)
    result = calibrate.calibrate(model, episodes, batches=1, batch=4)
    logits, truth = calibrate.contact_logits(model, episodes, batches=1, batch=4)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, truth)
    assert float(loss) == pytest.approx(result['log_loss'], abs=1e-3)
    assert result['log_loss'] <= result['log_loss_before']


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order():
    assert calibrate.area_under_curve(torch.tensor([0.1, 0.9, 0.4, 0.3]), torch.tensor([0.0, 1.0, 0.0, 1.0])) == 0.75
