"""Checksums of tensors: whether the sampler holds, bit for bit, what the trainer sent.

The sum of a tensor is over the 8-byte words of its memory (bytes, where its size is no multiple of 8), each word mixed
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
    """For each tensor the sums of its `parts` equal parts along the first dimension, in order."""
    return [sums.tolist() for sums in Reader(tensors, parts)()]


class Reader:
    """Sums the `parts` equal parts along the first dimension of each tensor, int64 arrays in order, whenever it is called:
    where the tensors lie is worked out once. On a GPU it is one kernel and one wait, at the speed of reading them once."""

    def __init__(self, tensors, parts):
        self.tensors, self.parts = [t.detach() for t in tensors], list(parts)
        for t, n in zip(self.tensors, self.parts, strict=True):
            if t.numel() % n:
                raise ValueError(f"a tensor of {t.numel()} elements has no {n} equal parts")
        tables = [_table(t, n) if t.is_cuda else None for t, n in zip(self.tensors, self.parts)]
        self.fast = [i for i, table in enumerate(tables) if table is not None]
        self.ends = np.cumsum([self.parts[i] for i in self.fast])
        if self.fast:
            table = np.concatenate([tables[i] for i in self.fast], axis=1)
            self.table, self.words = torch.from_numpy(table).to(self.tensors[self.fast[0]].device), int(table[1].max())

    def __call__(self):
        found = dict(zip(self.fast, np.split(_many(self.table, self.words), self.ends[:-1]))) if self.fast else {}
        return [found[i] if i in found else np.array([_one(part) for part in _words(t, n)])
                for i, (t, n) in enumerate(zip(self.tensors, self.parts))]


def flat_sums(flat, starts, sizes):
    """The sums of pieces of a uint8 buffer: `starts` (multiples of 8) and `sizes` in bytes. A list of ints."""
    starts, sizes = np.asarray(starts, dtype=np.int64), np.asarray(sizes, dtype=np.int64)
    if flat.is_cuda and len(starts) and not (sizes % 8).any() and sizes.all():
        words = sizes // 8
        table = torch.from_numpy(np.stack([flat.data_ptr() + starts, words, words, words])).to(flat.device)
        return _many(table, int(words.max())).tolist()
    return [checksum(flat[a:a + n]) for a, n in zip(starts, sizes)]


def _table(t, parts):
    """What the kernel must know to read a tensor in place, int64 (4, parts): address, words, words of a row, words from row to
    row. None for one that it cannot: of rows that are not whole words, or not evenly spaced."""
    size, lead = t.element_size(), parts > 1
    if not t.numel() or lead and t.shape[0] != parts:
        return None
    if t.is_contiguous():
        words = t.numel() // parts * size / 8
        step, rows = words, (words, words)
    else:
        shape, stride = t.shape[lead:], t.stride()[lead:]
        if len(shape) != 2 or stride[1] != 1:
            return None
        words, step = shape[0] * shape[1] * size / 8, t.stride(0) * size / 8
        rows = shape[1] * size / 8, stride[0] * size / 8
    if t.data_ptr() % 8 or any(x % 1 for x in (words, step, *rows)) or words >= 2 ** 31:
        return None
    one = np.ones(parts, dtype=np.int64)
    return np.stack([t.data_ptr() + np.arange(parts, dtype=np.int64) * int(step) * 8, one * int(words), one * int(rows[0]),
                     one * int(rows[1])])


def _words(tensor, parts):
    """The memory of a tensor (of a copy, where it is not contiguous or not aligned) as integers, (parts, words)."""
    t = tensor.contiguous()
    if t.data_ptr() % 8:
        t = t.clone()
    kind = torch.int64 if t.nbytes // parts % 8 == 0 else torch.uint8
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


def _many(table, words):
    """Sums of the pieces of one GPU's memory that a table (see `_table`) describes, an int64 array; words: of the largest."""
    sums = torch.zeros(table.shape[1], dtype=torch.int64, device=table.device)
    # few large tensors are shared out among as many programs as many small ones
    split = max(1, min(4096 // len(sums), words // BLOCK + 1))
    _kernel()[(len(sums), split)](table, sums, len(sums), BLOCK=BLOCK, GOLDEN=GOLDEN, MIX=MIX, SHIFT=SHIFT)
    return sums.cpu().numpy()


@functools.cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def sum_words(table, sums, n, BLOCK: tl.constexpr, GOLDEN: tl.constexpr, MIX: tl.constexpr, SHIFT: tl.constexpr):
        i = tl.program_id(0)
        words = tl.load(table + i).to(tl.pointer_type(tl.int64))
        count = tl.load(table + n + i)
        width, stride = tl.load(table + 2 * n + i).to(tl.int32), tl.load(table + 3 * n + i)
        total = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range(tl.program_id(1).to(tl.int64) * BLOCK, count, tl.num_programs(1).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            row = at.to(tl.int32) // width                   # 32 bits: a division of 64 would take longer than the memory
            word = tl.load(words + row * stride + (at - row * width), mask=at < count, other=0) + SHIFT
            word = (word ^ (word >> 32)) * MIX
            weight = (at + 1) * GOLDEN
            weight = ((weight ^ (weight >> 29)) * MIX) | 1
            total += tl.where(at < count, (word ^ (word >> 29)) * weight, 0)
        tl.atomic_add(sums + i, tl.sum(total))
    return sum_words
