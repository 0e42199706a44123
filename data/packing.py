"""Row lengths -> packs: which rows share one packed row of at most `max_tokens` tokens, in a seeded order per epoch."""

import random
from collections.abc import Sequence

_OPEN_PACKS = 32


def plan_packs(lengths: Sequence[int], max_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of `lengths`, grouped; every row that fits appears exactly once, every pack holds at most max_tokens.

    First fit over shuffled rows leaves little padding; the packs are shuffled again, so that the length profile of a
    batch says nothing about when it comes. Rows longer than max_tokens are left out (the caller counts them).
    """
    order = [index for index, length in enumerate(lengths) if 0 < length <= max_tokens]
    shuffler = random.Random(f"{seed}-{epoch}")
    shuffler.shuffle(order)
    packs: list[list[int]] = []
    room: list[int] = []
    for index in order:
        # Only the last few packs are tried: the fill hardly changes and planning stays linear.
        for slot in range(max(0, len(packs) - _OPEN_PACKS), len(packs)):
            if room[slot] >= lengths[index]:
                packs[slot].append(index)
                room[slot] -= lengths[index]
                break
        else:
            packs.append([index])
            room.append(max_tokens - lengths[index])
    shuffler.shuffle(packs)
    return packs
