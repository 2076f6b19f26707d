"""Sequences of a micro-batch as one packed row, and where the response tokens are in it."""
import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from common.cli import Stop
from common.cpu import device


def pack(batch, index, multiple):
    """The sequences `index` of a batch (see trainer.py) as a dict on this process's device:

    ids, positions (1, tokens), psp: megatron-core's description of the packing; rows, targets (N,): for each response
    token the position that predicts it, and the token; index, lengths: the sequences and their response lengths;
    fields: {name: (N,) float32}, a number per sequence repeated over its response. The row is padded to a `multiple`
    (sequence parallelism splits it evenly) with a sequence of its own."""
    tokens = [torch.as_tensor(np.asarray(batch["tokens"][i], dtype=np.int64)) for i in index]
    lengths = [len(t) for t in tokens]
    n_response = [n - batch["n_prompt"][i] for i, n in zip(index, lengths)]
    ends = np.cumsum([0, *lengths])
    # the hidden state at position t predicts token t + 1: responses are read off one position earlier
    rows = torch.from_numpy(np.concatenate([np.arange(end - n, end) - 1 for n, end in zip(n_response, ends[1:])]))
    fields = {}
    for name in batch.keys() - {"tokens", "n_prompt", "routes"}:
        values = [batch[name][i] for i in index]
        parts = [np.broadcast_to(v, n) if np.ndim(v) == 0 else v for v, n in zip(values, n_response)]
        if (sizes := [len(p) for p in parts]) != n_response:
            raise Stop(f"field {name!r} has {sizes[:4]} values for responses of {n_response[:4]} tokens")
        fields[name] = torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(device())
    if rest := -sum(lengths) % multiple:
        tokens.append(torch.zeros(rest, dtype=torch.int64))
    ids, longest = torch.cat(tokens), max(map(len, tokens))
    cu = torch.tensor(np.cumsum([0, *map(len, tokens)]), dtype=torch.int32, device=device())
    psp = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = torch.cat([torch.arange(len(t)) for t in tokens])[None].to(device())
    return dict(ids=ids[None].to(device()), positions=positions, psp=psp, rows=rows.to(device()),
                targets=ids[rows + 1].to(device()), index=index, lengths=n_response, fields=fields)
