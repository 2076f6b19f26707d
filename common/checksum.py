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
BLOCK, WARPS = 1024, 8            # words that a program of a CUDA kernel reads at once; 4 a thread fit its registers
LARGEST = 2 ** 34                 # bytes of a piece whose words the kernel can count in 32 bits


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
    where the tensors lie is worked out once. On a GPU the other parts of a tensor are compared with its first one, bit for bit,
    at the speed of reading them once. Where all are alike only the first ones are summed, else all parts of all tensors."""

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
            n, tables = np.array([self.parts[i] for i in tables]), list(tables.values())
            pieces = np.array([table.shape[1] for table in tables]) // n
            self.n, self.first, self.device = n, np.cumsum(pieces) - pieces, self.tensors[self.fast[0]].device
            self.all, every = np.concatenate(tables, axis=1), np.repeat(pieces, n)
            self.all_first, self.ends = np.cumsum(every) - every, np.cumsum(n)
            self.some = self._there(np.concatenate([table[:, :k] for table, k in zip(tables, pieces)], axis=1))
            alike = [np.stack([*table[:4, :k], table[0, k:2 * k] - table[0, :k], np.full(k, m)])
                     for table, k, m in zip(tables, pieces, n) if m > 1]
            self.alike = self._there(np.concatenate(alike, axis=1)) if alike else None

    def _there(self, table):
        return torch.from_numpy(table).to(self.device), int(table[1].max())

    def _sums(self):
        """Of the parts of all tensors that the kernels read, one after the other."""
        *sums, unlike = _many(*self.some, self.alike)
        if unlike:
            *sums, _ = _many(*self._there(self.all))
            return np.add.reduceat(sums, self.all_first)
        return np.repeat(np.add.reduceat(sums, self.first), self.n)

    def __call__(self):
        found = {}
        if self.fast:
            sums = self._sums()
            found = {i: sums[end - n:end] for i, n, end in zip(self.fast, self.n.tolist(), self.ends.tolist())}
        return [found[i] if i in found else np.array([_one(part) for part in _words(t, n)])
                for i, (t, n) in enumerate(zip(self.tensors, self.parts))]


def flat_sums(flat, starts, sizes):
    """The sums of pieces of a uint8 buffer: `starts` (multiples of 8) and `sizes` in bytes. A list of ints."""
    starts, sizes = np.asarray(starts, dtype=np.int64), np.asarray(sizes, dtype=np.int64)
    if flat.is_cuda and len(starts) and not (sizes % 8).any() and sizes.all() and sizes.max() < LARGEST:
        words = sizes // 8
        table = torch.from_numpy(np.stack([flat.data_ptr() + starts, words, words, words, 0 * words])).to(flat.device)
        return _many(table, int(words.max()))[:-1].tolist()
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
    if t.stride(3) != 1 or t.data_ptr() % 8 or any(n % 8 for n in (width * size, *steps)) or rows * width * size >= LARGEST:
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


def _many(table, words, alike=None):
    """Sums of the pieces of one GPU's memory that a table (see `_table`) describes, an int64 array, and after them whether parts
    of a tensor differ. words: of the largest piece. alike: (table, words) of what is compared: as in `_table` the first part's
    address, words, words of a row, words from row to row; then bytes from part to part, number of parts."""
    n = table.shape[1]
    found = torch.zeros(n + 1, dtype=torch.int64, device=table.device)
    sum_words, compare_words = _kernels()
    # another rank's buffer may lie on another GPU than this process works on
    with torch.cuda.device(table.device) if table.device.type == "cuda" else contextlib.nullcontext():
        if alike is not None:
            pieces, split = alike[0].shape[1], _split(*alike, 1)
            compare_words[(pieces * split,)](alike[0], found, pieces, split, n, BLOCK=BLOCK, num_warps=WARPS)
        split = _split(table, words, 4)
        sum_words[(n * split,)](table, found, n, split, BLOCK=BLOCK, GOLDEN=GOLDEN, MIX=MIX, SHIFT=SHIFT, num_warps=WARPS)
    return found.cpu().numpy()


def _split(table, words, blocks):
    """Programs for each piece: few large pieces are shared out among as many as many small ones. A program begins with reading
    its piece's table, which is worth it for a few blocks."""
    return max(1, min(2 ** 16 // table.shape[1], words // (blocks * BLOCK) + 1))


@functools.cache
def _kernels():
    import triton
    import triton.language as tl

    # integers are not specialized on: a 1 would become a constant, and every layout would be compiled anew
    @triton.jit(do_not_specialize=["n", "split"])
    def sum_words(table, sums, n, split, BLOCK: tl.constexpr, GOLDEN: tl.constexpr, MIX: tl.constexpr, SHIFT: tl.constexpr):
        i = tl.program_id(0) // split                        # neighbours read from one piece
        words = tl.load(table + i).to(tl.pointer_type(tl.int64))
        count = tl.load(table + n + i)
        width, stride = tl.load(table + 2 * n + i).to(tl.int32), tl.load(table + 3 * n + i)
        first = tl.load(table + 4 * n + i)
        total = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range((tl.program_id(0) % split).to(tl.int64) * BLOCK, count, split.to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            place = at
            if width < count:                                # rows with gaps between them
                row = at.to(tl.int32) // width               # 32 bits: a division of 64 would take longer than the memory
                place = row * stride + (at - row * width)
            word = tl.load(words + place, mask=at < count, other=0) + SHIFT
            word = (word ^ (word >> 32)) * MIX
            weight = (first + at + 1) * GOLDEN
            weight = ((weight ^ (weight >> 29)) * MIX) | 1
            total += tl.where(at < count, (word ^ (word >> 29)) * weight, 0)
        tl.atomic_add(sums + i, tl.sum(total))

    @triton.jit(do_not_specialize=["n", "split", "flag"])
    def compare_words(table, found, n, split, flag, BLOCK: tl.constexpr):
        i = tl.program_id(0) // split
        address, count = tl.load(table + i), tl.load(table + n + i)
        width, stride = tl.load(table + 2 * n + i).to(tl.int32), tl.load(table + 3 * n + i)
        step, parts = tl.load(table + 4 * n + i), tl.load(table + 5 * n + i).to(tl.int32)
        differ = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range((tl.program_id(0) % split).to(tl.int64) * BLOCK, count, split.to(tl.int64) * BLOCK):
            # past the end the last word again: loads with a mask would wait for each other
            at = tl.minimum(start + tl.arange(0, BLOCK).to(tl.int64), count - 1)
            place = at
            if width < count:
                row = at.to(tl.int32) // width
                place = row * stride + (at - row * width)
            first = tl.load(address.to(tl.pointer_type(tl.int64)) + place)
            for part in range(1, parts):
                differ |= first ^ tl.load((address + part * step).to(tl.pointer_type(tl.int64)) + place)
        if tl.max((differ != 0).to(tl.int32)):
            tl.atomic_or(found + flag, 1)
    return sum_words, compare_words
