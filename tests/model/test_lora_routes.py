"""Every route computes what a loop over tokens does."""

import pytest
import torch

from offbeat.model.lora_routes import EqualRoute, OneRoute, SpanRoute

NUM_SLOTS = 5
SCALINGS = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.25])
CPU = torch.device("cpu")


def scaling_of(slots, lengths):
    return SCALINGS[slots].repeat_interleave(torch.tensor(lengths)).unsqueeze(1)


def spread(route, slots, lengths):
    return route(slots, lengths, scaling_of(slots, lengths), device=CPU), slots, lengths


ROUTES = {
    "one": (OneRoute(3, 3.0), [3], [12]),
    "neighbours of one length": spread(EqualRoute, [1, 2, 3], [4, 4, 4]),
    "any of one length": spread(EqualRoute, [4, 0, 4], [4, 4, 4]),
    "spans of neighbours": spread(SpanRoute, [2, 3, 4], [1, 9, 2]),
    "spans": spread(SpanRoute, [2, 0, 2], [1, 9, 2]),
}


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "num_out"), [(16, 8), (6, 4), (5, 3)])
def test_products_are_those_of_each_token_with_its_own_adapter(name, dtype, num_in, num_out):
    route, slots, lengths = ROUTES[name]
    torch.manual_seed(0)
    # As the bank's: rows of a wider matrix, of which a layer has a part.
    weights, sums = (torch.randn(NUM_SLOTS, 3, num_in, num_out)[:, 1] for _ in range(2))
    x, g, onto = (torch.randn(12, width).to(dtype) for width in (num_in, num_out, num_out))
    of_token = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
    expected = torch.stack([x[t].float() @ weights[of_token[t]] for t in range(12)])
    expected_sums = sums.clone()
    for t in range(12):
        expected_sums[of_token[t]] += torch.outer(x[t].float(), g[t].float())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.06}
    # A product with a transpose, as in the backward pass.
    for factor in (weights, weights.mT.contiguous().mT):
        assert route.multiply(x, factor).dtype == dtype
        torch.testing.assert_close(route.multiply(x, factor).float(), expected, **tolerance)
    for rows in (onto.clone(), onto.to(torch.float32, copy=True)):
        route.add_product(rows, x, weights)
        torch.testing.assert_close(rows.float(), onto.float() + expected, **tolerance)
    route.add_outer(sums, x, g)
    torch.testing.assert_close(sums, expected_sums, **tolerance)
    torch.testing.assert_close(torch.as_tensor(route.scaling).expand(12, 1), SCALINGS[of_token].unsqueeze(1))


@pytest.mark.parametrize("name", ROUTES)
def test_the_route_of_some_tokens_is_theirs(name):
    route, _, _ = ROUTES[name]
    torch.manual_seed(0)
    weights, x, g = torch.randn(NUM_SLOTS, 5, 3), torch.randn(12, 5), torch.randn(12, 3)
    for some in ([0, 1, 2, 5, 11], [4], [6, 7, 9]):
        rows = torch.tensor(some)
        own, expected, sums = route.subset(rows), torch.zeros(NUM_SLOTS, 5, 3), torch.zeros(NUM_SLOTS, 5, 3)
        torch.testing.assert_close(own.multiply(x[rows], weights), route.multiply(x, weights)[rows])
        torch.testing.assert_close(torch.as_tensor(own.scaling).expand(len(some), 1), torch.as_tensor(route.scaling).expand(12, 1)[rows])
        own.add_outer(sums, x[rows], g[rows])
        route.add_outer(expected, x * torch.isin(torch.arange(12), rows)[:, None], g)
        torch.testing.assert_close(sums, expected)
