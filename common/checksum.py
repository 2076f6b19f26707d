"""Checksums of tensors: whether the sampler holds, bit for bit, what the trainer sent.

The sum of a tensor is over the 8-byte words of its memory (bytes, where its size is no multiple of 8), each word mixed
(splitmix64's constants) and multiplied by an odd weight that the same mixing makes from its position, modulo 2^64. So a single
changed or displaced word always changes the sum, and several changes cancel only by chance; it is no protection against malice.
"""
import contextlib
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
        tables = {i: table for i, (t, n) in enumerate(zip(self.tensors, self.parts))
                  if t.is_cuda and (table := _table(t, n)) is not None}
        self.fast = list(tables)
        if tables:
            # a part may be read in several pieces, whose sums add up
            parts = np.array([self.parts[i] for i in tables])
            pieces = np.repeat([table.shape[1] // n for table, n in zip(tables.values(), parts)], parts)
            self.first, self.ends = np.cumsum(pieces) - pieces, np.cumsum(parts)[:-1]
            table = np.concatenate(list(tables.values()), axis=1)
            self.table, self.words = torch.from_numpy(table).to(self.tensors[self.fast[0]].device), int(table[1].max())

    def __call__(self):
        found = {}
        if self.fast:
            sums = np.add.reduceat(_many(self.table, self.words), self.first)
            found = dict(zip(self.fast, np.split(sums, self.ends)))
        return [found[i] if i in found else np.array([_one(part) for part in _words(t, n)])
                for i, (t, n) in enumerate(zip(self.tensors, self.parts))]


def flat_sums(flat, starts, sizes):
    """The sums of pieces of a uint8 buffer: `starts` (multiples of 8) and `sizes` in bytes. A list of ints."""
    starts, sizes = np.asarray(starts, dtype=np.int64), np.asarray(sizes, dtype=np.int64)
    if flat.is_cuda and len(starts) and not (sizes % 8).any() and sizes.all():
        words = sizes // 8
        table = torch.from_numpy(np.stack([flat.data_ptr() + starts, words, words, words, 0 * words])).to(flat.device)
        return _many(table, int(words.max())).tolist()
    return [checksum(flat[a:a + n]) for a, n in zip(starts, sizes)]


def _table(t, parts):
    """What the kernel must know to read a tensor in place, int64 (5, pieces), as many pieces for each part: address, words, words
    of a row, words from row to row, number of the piece's first word in its part. None for a tensor that it cannot read: whose
    rows are not whole words, or which has too many dimensions."""
    if not t.numel() or parts > 1 and t.shape[0] != parts:
        return None
    t = t if parts > 1 else t[None]
    if t[0].is_contiguous():
        t = t.view(parts, 1, 1, -1) if t.is_contiguous() else t.flatten(1)[:, None, None]
    elif t.ndim in (3, 4):
        t = t if t.ndim == 4 else t[:, None]
    else:
        return None
    size, (_, pieces, rows, width) = t.element_size(), t.shape
    steps = [s * size for s in t.stride()[:3]]
    if t.stride(3) != 1 or t.data_ptr() % 8 or any(n % 8 for n in (width * size, *steps)) or rows * width * size >= 2 ** 34:
        return None
    part, piece = (x.flatten() for x in np.meshgrid(np.arange(parts), np.arange(pieces), indexing="ij"))
    words, one = rows * width * size // 8, np.ones(parts * pieces, dtype=np.int64)
    return np.stack([t.data_ptr() + part * steps[0] + piece * steps[1], one * words, one * (width * size // 8),
                     one * (steps[2] // 8), piece * words])


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
    # another rank's buffer may lie on another GPU than this process works on
    with torch.cuda.device(table.device) if table.device.type == "cuda" else contextlib.nullcontext():
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
        first = tl.load(table + 4 * n + i)
        total = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range(tl.program_id(1).to(tl.int64) * BLOCK, count, tl.num_programs(1).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            place = at
            if width < count:
                row = at.to(tl.int32) // width               # 32 bits: a division of 64 would take longer than the memory
                place = row * stride + (at - row * width)
            word = tl.load(words + place, mask=at < count, other=0) + SHIFT
            word = (word ^ (word >> 32)) * MIX
            weight = (first + at + 1) * GOLDEN
            weight = ((weight ^ (weight >> 29)) * MIX) | 1
            total += tl.where(at < count, (word ^ (word >> 29)) * weight, 0)
        tl.atomic_add(sums + i, tl.sum(total))
    return sum_words
