"""Many pieces of one buffer to many places on the same GPU, in one kernel: a launch for each tensor of an adapter would take
longer than the copies themselves (thousands of tensors, each written once for every expert that shares it)."""
import contextlib
import functools

import numpy as np
import torch

BLOCK, WARPS = 1024, 8            # 8-byte words that a program of the kernel copies at once; 4 for each thread


class Scatter:
    """Copies `sources` (views of one uint8 buffer) to `regions`, broadcasting; what goes where is worked out once, for any buffer
    of the same layout. What the kernel cannot copy, and everything on a CPU, goes through `copy`."""

    def __init__(self, regions, sources, flat):
        tables, self.rest = [], ([], [])
        for region, source in zip(regions, sources, strict=True):
            table = _table(region, source, flat) if region.is_cuda else None
            if table is None:
                if _whole_words(source) and _whole_words(region) and source.dtype == region.dtype:
                    source, region = source.view(torch.int64), region.view(torch.int64)      # four times as fast as bfloat16
                self.rest[0].append(region)
                self.rest[1].append((source.dtype, (tuple(source.shape), source.stride(), source.storage_offset())))
            else:
                tables.append(table)
        self.table = torch.from_numpy(np.concatenate(tables, axis=1)).to(regions[0].device) if tables else None
        self.words = max((int(table[2].max()) for table in tables), default=0)

    def __call__(self, flat, pick, copy=torch._foreach_copy_):
        """pick(flat, places): the views of `flat` at the places of the rest; copy(regions, sources)."""
        if self.table is not None and flat.device != self.table.device:
            raise ValueError(f"the buffer is on {flat.device}, its places on {self.table.device}")
        if self.rest[0]:
            copy(self.rest[0], pick(flat, self.rest[1]))
        if self.table is not None:
            n = self.table.shape[1]
            # few large pieces are shared out among as many programs as many small ones
            split = max(1, min(2 ** 16 // n, self.words // BLOCK + 1))
            with torch.cuda.device(self.table.device) if self.table.device.type == "cuda" else contextlib.nullcontext():
                _kernel()[(n * split,)](self.table, flat.view(torch.int64), n, split, BLOCK=BLOCK, num_warps=WARPS)


def _whole_words(t):
    """Whether the rows of a tensor can be read as 8-byte words."""
    size = t.element_size()
    return t.stride(-1) == 1 and not any(n * size % 8 for n in (t.shape[-1], *t.stride()[:-1])) and t.data_ptr() % 8 == 0


def _table(region, source, flat):
    """What the kernel must know, int64 (8, pieces), in words: where a piece begins in the buffer, its first place (an address),
    its length, its rows' length, from row to row in the buffer and at its place; number of places, bytes from one to the next.
    None for what it cannot copy."""
    if region.dtype != source.dtype or region.ndim > 4 or not all(t.numel() and _whole_words(t) for t in (region, source)):
        return None
    lead = 4 - region.ndim
    source, region = (t[(None,) * lead] for t in (source.expand(region.shape), region))
    size, (a, b, rows, width) = region.element_size(), region.shape
    width = width * size // 8
    (s0, s1, s_row, _), (r0, r1, r_row, _) = ([n * size // 8 for n in t.stride()] for t in (source, region))
    start = (source.data_ptr() - flat.data_ptr()) // 8
    if rows == 1 or s_row == r_row == width:                 # one long row
        rows, width = 1, rows * width
    if rows * width >= 2 ** 30:
        return None
    # read once, written to the place of every expert
    if s1 == 0:
        places, step, b = b, r1, 1
    elif s0 == 0:
        places, step, a = a, r0, 1
    else:
        places, step = 1, 0
    i, j = (x.flatten() for x in np.meshgrid(np.arange(a), np.arange(b), indexing="ij"))
    one = np.ones(a * b, dtype=np.int64)
    return np.stack([start + i * s0 + j * s1, region.data_ptr() + 8 * (i * r0 + j * r1), one * rows * width, one * width,
                     one * s_row, one * r_row, one * places, one * 8 * step])


@functools.cache
def _kernel():
    import triton
    import triton.language as tl

    # integers are not specialized on: a 1 would become a constant, and every layout would be compiled anew
    @triton.jit(do_not_specialize=["n", "split"])
    def copy_words(table, flat, n, split, BLOCK: tl.constexpr):
        i = tl.program_id(0) // split                        # neighbours copy the same piece
        source, address = flat + tl.load(table + i), tl.load(table + n + i)
        count, width = tl.load(table + 2 * n + i).to(tl.int32), tl.load(table + 3 * n + i).to(tl.int32)
        from_row, to_row = tl.load(table + 4 * n + i), tl.load(table + 5 * n + i)
        places, step = tl.load(table + 6 * n + i).to(tl.int32), tl.load(table + 7 * n + i)
        for start in range(tl.program_id(0) % split * BLOCK, count, split * BLOCK):
            at = start + tl.arange(0, BLOCK)
            there, here = at.to(tl.int64), at.to(tl.int64)
            if width < count:
                row = at // width
                column = at - row * width
                there, here = row * from_row + column, row * to_row + column
            word = tl.load(source + there, mask=at < count)
            for k in range(0, places):
                tl.store((address + k * step).to(tl.pointer_type(tl.int64)) + here, word, mask=at < count)
    return copy_words
