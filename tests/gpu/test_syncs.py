"""Device syncs as CUDA and the dispatcher tell them."""

import pytest
import torch

from mmzero.analysis.collectives import CollectiveLog
from mmzero.analysis.syncs import runtime_syncs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'),
]


def test_reading_a_number_waits() -> None:
    tensor = torch.ones((), device='cuda')
    # The profiler waits for the device when it ends.
    without = sum(runtime_syncs(lambda: tensor + 1).values())
    assert sum(runtime_syncs(lambda: float(tensor)).values()) > without


def test_the_log_tells_host_from_device() -> None:
    on_device, on_host = torch.ones(2, device='cuda'), torch.ones(2)
    with CollectiveLog() as log:
        _ = float(on_host[0]), on_host.tolist(), on_host.nonzero()
        _ = on_device.to('cpu', non_blocking=True), on_device + 1
    assert not log.syncs
    with CollectiveLog() as log:
        _ = float(on_device[0]), on_device.nonzero(), on_device[on_device > 0], on_device.cpu()
    assert log.syncs == dict(_local_scalar_dense=1, nonzero=1, mask=1, copy=1)
