"""Batches of the sweep."""

import torch

import mmzero  # noqa: F401  # mmdet imports mmcv's operators


def test_identities_are_one_item_of_several_images() -> None:
    from mmdet.models.reid.base_reid import BaseReID

    from mmzero.integrations.mmdet.inputs import demo_batch

    class Embedder(BaseReID):
        """Without mmpretrain, which its class would ask for."""

        def __init__(self) -> None:
            pass

    batch = demo_batch(Embedder(), 64, 3, classes=10)
    assert [images.shape for images in batch['inputs']] == [(4, 3, 64, 32)]
    assert [sample.gt_label.label.tolist() for sample in batch['data_samples']] == [[0, 0, 1, 1]]
    again = demo_batch(Embedder(), 64, 3, classes=10)
    other = demo_batch(Embedder(), 64, 4, classes=10)
    assert torch.equal(batch['inputs'][0], again['inputs'][0])
    assert not torch.equal(batch['inputs'][0], other['inputs'][0])
