"""Every route computes what a loop over tokens does."""

import pytest
import torch

from offbeat.model.lora_routes import EqualRoute, OneRoute, SpanRoute

NUM_SLOTS, NUM_IN, NUM_OUT = 5, 6, 4
SCALINGS = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.25])


def scaling_of(slots, lengths):
    return SCALINGS[slots].repeat_interleave(torch.tensor(lengths)).unsqueeze(1)


ROUTES = {
    "one": (OneRoute(3, 3.0), [3], [12]),
    "neighbours of one length": (EqualRoute([1, 2, 3], scaling_of([1, 2, 3], [4] * 3)), [1, 2, 3], [4, 4, 4]),
    "any of one length": (EqualRoute([4, 0, 4], scaling_of([4, 0, 4], [4] * 3)), [4, 0, 4], [4, 4, 4]),
    "spans": (SpanRoute([2, 0, 2], [1, 9, 2], scaling_of([2, 0, 2], [1, 9, 2])), [2, 0, 2], [1, 9, 2]),
}


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_each_token_with_its_own_adapter(name, dtype):
    route, slots, lengths = ROUTES[name]
    torch.manual_seed(0)
    weights, sums = torch.randn(NUM_SLOTS, NUM_IN, NUM_OUT), torch.randn(NUM_SLOTS, NUM_IN, NUM_OUT)
    x, g, onto = (torch.randn(12, width).to(dtype) for width in (NUM_IN, NUM_OUT, NUM_OUT))
    of_token = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
    expected = torch.stack([x[t].float() @ weights[of_token[t]] for t in range(12)])
    expected_sums = sums.clone()
    for t in range(12):
        expected_sums[of_token[t]] += torch.outer(x[t].float(), g[t].float())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.06}
    assert route.multiply(x, weights).dtype == dtype
    torch.testing.assert_close(route.multiply(x, weights).float(), expected, **tolerance)
    for rows in (onto.clone(), onto.to(torch.float32, copy=True)):
        route.add_product(rows, x, weights)
        torch.testing.assert_close(rows.float(), onto.float() + expected, **tolerance)
    route.add_outer(sums, x, g)
    torch.testing.assert_close(sums, expected_sums, **tolerance)
    torch.testing.assert_close(torch.as_tensor(route.scaling).expand(12, 1), SCALINGS[of_token].unsqueeze(1))
