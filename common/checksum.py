"""Checksums of tensors: whether the sampler holds, bit for bit, what the trainer sent.

The sum of a tensor is over the 8-byte words of its memory (elements, where its size is no multiple of 8 bytes), each word mixed
(splitmix64's constants) and multiplied by an odd weight that the same mixing makes from its position, modulo 2^64. So a single
changed or displaced word always changes the sum, and several changes cancel only by chance; it is no protection against malice.
"""
import functools

import numpy as np
import torch

GOLDEN, MIX, SHIFT = -7046029254386353131, -4658895280553007687, 0x5851F42D
BLOCK = 4096                      # words that a program of the CUDA kernel reads at once


def checksum(tensor):
    """The 64-bit sum of one tensor, as a Python int."""
    return checksums([tensor])[0]


def checksums(tensors):
    """The sums of many tensors, all on one device, in order."""
    return [sums[0] for sums in part_sums(tensors, [1] * len(tensors))]


def part_sums(tensors, parts):
    """For each tensor the sums of its `parts` equal parts along the first dimension, in order. On a GPU it is one kernel and
    one wait for all of them, at the speed of reading them once."""
    bits = [_words(t, n) for t, n in zip(tensors, parts, strict=True)]
    fast = [i for i, b in enumerate(bits) if b.is_cuda and b.dtype == torch.int64]
    found = dict(zip(fast, _many([bits[i] for i in fast])))
    return [found[i] if i in found else [_one(part) for part in b] for i, b in enumerate(bits)]


def _words(tensor, parts):
    """The memory of a tensor (of a copy, where it is not contiguous or not aligned) as integers, (parts, words)."""
    t = tensor.detach().contiguous()
    if t.data_ptr() % 8:
        t = t.clone()
    if t.numel() % parts:
        raise ValueError(f"a tensor of {t.numel()} elements has no {parts} equal parts")
    size = 8 if t.nbytes // parts % 8 == 0 else t.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return t.view(-1).view(torch.uint8).view(kind).view(parts, -1)


def _one(bits, piece=1 << 20):
    """Temporary memory: 24 bytes x `piece`."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), piece):
        part = bits[start:start + piece].to(torch.int64)
        weight = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=bits.device) * GOLDEN
        weight = ((weight ^ (weight >> 29)) * MIX) | 1
        word = part + SHIFT
        word = (word ^ (word >> 32)) * MIX                   # else the same high bit turned in two words would cancel
        total += ((word ^ (word >> 29)) * weight).sum()      # wraps modulo 2^64, on purpose
    return total.item()


def _many(bits):
    """Sums of the rows of int64 tensors of one GPU, a list for each tensor."""
    if not bits:
        return []
    rows, words = np.array([len(b) for b in bits]), np.array([b.shape[1] for b in bits])
    start = np.repeat(np.array([b.data_ptr() for b in bits]), rows)
    row = np.concatenate([np.arange(n) for n in rows])
    table = torch.from_numpy(np.stack([start + row * np.repeat(words * 8, rows), np.repeat(words, rows)])).to(bits[0].device)
    sums = torch.zeros(len(row), dtype=torch.int64, device=bits[0].device)
    # few large tensors are shared out among as many programs as many small ones
    split = int(max(1, min(4096 // len(row), words.max() // BLOCK + 1)))
    _kernel()[(len(row), split)](table, sums, len(row), BLOCK=BLOCK, GOLDEN=GOLDEN, MIX=MIX, SHIFT=SHIFT)
    return [part.tolist() for part in torch.split(sums.cpu(), rows.tolist())]


@functools.cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def sum_words(table, sums, n, BLOCK: tl.constexpr, GOLDEN: tl.constexpr, MIX: tl.constexpr, SHIFT: tl.constexpr):
        i = tl.program_id(0)
        words = tl.load(table + i).to(tl.pointer_type(tl.int64))
        count = tl.load(table + n + i)
        total = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range(tl.program_id(1).to(tl.int64) * BLOCK, count, tl.num_programs(1).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            word = tl.load(words + at, mask=at < count, other=0) + SHIFT
            word = (word ^ (word >> 32)) * MIX
            weight = (at + 1) * GOLDEN
            weight = ((weight ^ (weight >> 29)) * MIX) | 1
            total += tl.where(at < count, (word ^ (word >> 29)) * weight, 0)
        tl.atomic_add(sums + i, tl.sum(total))
    return sum_words
