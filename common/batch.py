"""How a batch is divided and put together again. Plain Python: the driver and the ranks share it."""


def deal(lengths, n):
    """Deal items to n hands, longest first to the hand with the fewest tokens (of those, the fewest items): [[index,
    ...], ...]."""
    hands, load = [[] for _ in range(n)], [0] * n
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        hand = min(range(n), key=lambda h: (load[h], len(hands[h]), h))
        hands[hand].append(i)
        load[hand] += lengths[i]
    return hands


def micro_count(lengths, max_tokens):
    """The smallest number of hands for which `deal` keeps every hand within max_tokens (or at a single longer sequence)."""
    n = max(1, -(-sum(min(n, max_tokens) for n in lengths) // max_tokens))
    while n < len(lengths) and any(len(h) > 1 and sum(lengths[i] for i in h) > max_tokens for h in deal(lengths, n)):
        n += 1
    return n


def merge(parts, n):
    """Answers of `logprobs` from all ranks -> list of n arrays, in the order of the batch."""
    found = dict(pair for part in parts for pair in part)
    if len(found) != n:
        raise RuntimeError(f"the trainer scored {len(found)} of {n} sequences")
    return [found[i] for i in range(n)]
