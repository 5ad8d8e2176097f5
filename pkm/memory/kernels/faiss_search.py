"""Nearest keys by faiss (Johnson et al., 2017), the paper's own search: an optional package, and an oracle for tests."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def nearest(query: Tensor, keys: Tensor, k: int) -> Tensor:
    """query (N, q), keys (M, q) -> the k keys with the largest inner products (N, k) int64, largest first; in fp32."""
    import faiss

    query, keys = query.float().contiguous(), keys.float().contiguous()
    if query.is_cuda and hasattr(faiss, "StandardGpuResources"):
        import faiss.contrib.torch_utils  # lets faiss take tensors of the GPU

        resources = faiss.StandardGpuResources()
        resources.setDefaultNullStreamAllDevices()
        _, found = faiss.knn_gpu(resources, query, keys, k, metric=faiss.METRIC_INNER_PRODUCT)
        return found
    _, indices = faiss.knn(query.cpu().numpy(), keys.cpu().numpy(), k, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(indices).to(query.device)
