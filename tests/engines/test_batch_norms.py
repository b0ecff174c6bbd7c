"""Batch norms with weights of 16 bit, and stock ones, under autocast."""

import pytest
import torch
from torch import nn

from mmzero.engines.batch_norms import teach_autocast_batch_norms


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('training', [True, False])
def test_rounded_weights_compute_as_their_values_in_float32(dtype: torch.dtype, training: bool) -> None:
    torch.manual_seed(0)
    stock, rounded = nn.BatchNorm1d(4).train(training), nn.BatchNorm1d(4).train(training)
    for norm in (stock, rounded):
        for param, value in zip(norm.parameters(), (1.25, -0.5), strict=True):
            param.data.fill_(value)
    for param in rounded.parameters():
        param.data = param.data.to(torch.bfloat16)
    x = torch.randn(8, 4).to(dtype)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        wanted = stock(x)
        teach_autocast_batch_norms('cpu')
        found, again = rounded(x), stock.eval()(x) if not training else wanted
    assert torch.equal(found, wanted) and torch.equal(again, wanted) and found.dtype == wanted.dtype
    for name, buffer in stock.named_buffers():
        assert torch.equal(rounded.get_buffer(name), buffer)
    found.float().square().sum().backward()
    assert rounded.weight.grad is not None and rounded.weight.grad.dtype == torch.bfloat16


def test_without_autocast_torch_refuses_as_ever() -> None:
    teach_autocast_batch_norms('cpu')
    norm = nn.BatchNorm1d(4)
    norm.weight.data = norm.weight.data.to(torch.bfloat16)
    norm.bias.data = norm.bias.data.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match='expected scalar type'):
        norm(torch.randn(8, 4).to(torch.bfloat16))
