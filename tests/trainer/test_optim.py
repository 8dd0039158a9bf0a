"""Which parameters decay, and rows with optimizers of their own."""

import torch

from offbeat.algorithms.adam import AdamParams
from offbeat.trainer.optim import RowAdam, all_finite, build_optimizer, set_params


def test_norms_and_biases_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model)
    set_params(optimizer, AdamParams(lr=0.5, weight_decay=0.25))
    optimizer.step()
    assert torch.all(model[0].weight == 1 - 0.5 * 0.25)
    assert all(torch.all(parameter == 1) for parameter in (model[0].bias, model[1].weight, model[1].bias))


def test_frozen_parameters_have_no_optimizer_state():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in build_optimizer(model).param_groups] == [1]


def test_each_row_is_updated_as_by_an_optimizer_of_its_own_and_others_keep_every_bit():
    torch.manual_seed(0)
    weights = torch.randn(3, 5)
    gradients = torch.randn(4, 3, 5)
    params = [AdamParams(lr=1e-2, weight_decay=0.1, clip_norm=0.5), AdamParams(lr=0.3, beta1=0.5, eps=1e-3), AdamParams(lr=1.0)]
    theirs = [torch.nn.Parameter(row.clone()) for row in weights]
    optimizers = [
        torch.optim.AdamW([row], lr=p.lr, betas=(p.beta1, p.beta2), eps=p.eps, weight_decay=p.weight_decay)
        for row, p in zip(theirs, params, strict=True)]
    adam = RowAdam(weights)
    for step, rows in enumerate(([0, 1], [1], [0, 1], [1])):
        before = weights[2].clone(), adam.exp_avg[2].clone(), adam.steps[2].clone()
        for row in rows:
            gradient = gradients[step, row].clone()
            theirs[row].grad = gradient.clone()
            if params[row].clip_norm:
                torch.nn.utils.clip_grad_norm_([theirs[row]], params[row].clip_norm)
            optimizers[row].step()
            adam.update(row, gradient, params[row], norm=gradient.norm().item())
        assert all(torch.equal(*pair) for pair in zip(before, (weights[2], adam.exp_avg[2], adam.steps[2]), strict=True))
    assert adam.steps.tolist() == [2, 4, 0]
    for row in range(3):
        torch.testing.assert_close(weights[row], theirs[row].detach(), rtol=1e-6, atol=1e-7)


def test_rows_follow_weights_that_grow_and_can_start_over_or_go_on_from_elsewhere():
    weights = torch.ones(1, 2)
    adam = RowAdam(weights)
    adam.update(0, torch.ones(2), AdamParams(lr=0.1), norm=1.4)
    kept = adam.exp_avg[0].clone()
    more = torch.cat([weights, torch.zeros(3, 2)])
    adam.follow(more)
    assert torch.equal(adam.exp_avg[0], kept) and adam.steps.tolist() == [1, 0, 0, 0]
    adam.set(3, exp_avg=adam.exp_avg[0], exp_avg_sq=adam.exp_avg_sq[0], step=1)
    more[3] = more[0]
    for row in (0, 3):
        adam.update(row, torch.full((2,), 0.5), AdamParams(lr=0.1), norm=0.7)
    assert torch.equal(more[0], more[3])
    adam.clear(0)
    assert not adam.exp_avg[0].any() and not adam.exp_avg_sq[0].any() and adam.steps[0] == 0


def test_values_are_finite_unless_one_of_any_format_is_nan_or_infinite():
    sound = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.empty(0), torch.tensor(2.0)]
    assert all_finite(sound) and all_finite([]) and all_finite([torch.full((4,), 3e38)])
    for broken in (float("nan"), float("inf"), -float("inf")):
        for number in (0, 1):
            values = [tensor.clone() for tensor in sound]
            values[number].view(-1)[2] = broken
            assert not all_finite(values)


def test_a_row_whose_weights_would_not_be_finite_keeps_every_bit():
    weights = torch.ones(2, 3)
    adam = RowAdam(weights)
    for row in (0, 1, 0):
        assert adam.try_update(row, torch.ones(3), AdamParams(lr=0.1), norm=1.7)
    states = weights, adam.exp_avg, adam.exp_avg_sq, adam.steps
    before = [state.clone() for state in states]
    assert not adam.try_update(1, torch.ones(3), AdamParams(lr=0.1, weight_decay=1e200), norm=1.7)
    assert all(torch.equal(*pair) for pair in zip(before, states, strict=True))
