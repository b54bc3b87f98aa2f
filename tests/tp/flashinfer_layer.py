"""One layer of FlashInfer's attention beside its definition."""

import torch

from tests.tp.flashinfer_stand_in.kernels import attend
from tllm_core.engines.tp.attention import AttentionMetadata, AttentionShape
from tllm_core.engines.tp.attention.flashinfer import FlashInferAttention
from tllm_core.engines.tp.batch import ScheduledBatch

HEAD_DIM = 64


def shape_of(num_blocks: int, block_size: int, **options: object) -> AttentionShape:
    own = {
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": HEAD_DIM,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    return AttentionShape(**(own | {"num_blocks": num_blocks, "block_size": block_size} | options))  # type: ignore[arg-type]


def run_once(
    attention: FlashInferAttention, shape: AttentionShape, batch: ScheduledBatch, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one layer makes of random contexts and queries, and what it is by definition."""
    metadata = AttentionMetadata.of(batch, shape.block_size)
    lengths = metadata.seq_lens.tolist()
    kv = [torch.randn(2, n, shape.num_kv_heads, HEAD_DIM).bfloat16().to(shape.device) for n in lengths]
    for i, table in enumerate(batch.block_tables):
        for position in range(batch.context_lens[i]):
            block, row = table[position // shape.block_size], position % shape.block_size
            attention.cache[0, :, block, row] = kv[i][:, position].to(attention.cache.dtype)
    q = torch.randn(metadata.num_tokens, shape.num_heads, HEAD_DIM).bfloat16().to(shape.device)
    attention.plan(metadata)
    new = [x[:, context:] for x, context in zip(kv, batch.context_lens, strict=True)]
    attention.write_kv(0, torch.cat(new, dim=1).transpose(0, 1).flatten(1, 2))
    scale = HEAD_DIM**-0.5 if shape.scale is None else shape.scale
    queries = q.split(batch.query_lens)
    expected = [
        attend(part.cpu(), k.cpu().float(), v.cpu().float(), scale, -1 if window is None else window - 1)
        for part, (k, v) in zip(queries, kv, strict=True)
    ]
    return attention.run(0, q).cpu().float(), torch.cat(expected).flatten(1)
