"""Which parameters the numbers of an optimizer's state dict mean.

For families with files that hold such a state dict beside the model. An optimizer numbers its parameters group by
group, in the
order in which it was given them, and a script gives it them in the model's order, perhaps sorted into groups. Shapes are the
proof: the numbers have names where exactly one way to give the groups to the model's tensors, in order, has every shape right.
Source: torch 2.13, optim/optimizer.py `state_dict`.
"""

from __future__ import annotations

from collections.abc import Sequence

Extent = tuple[int, ...] | None
"""A tensor's shape; None where it is unknown, because the optimizer has no state for it."""

_MOST = 200_000
"""The most assignments that are followed at the same time; with more, the numbers cannot be resolved."""

_Choice = int | None


def positions(held: Sequence[tuple[int, ...]], groups: Sequence[Sequence[Extent]]) -> list[list[int]] | None:
    """For each group, the positions of its parameters in the model's list of tensors.

    Args:
        held: shapes of the model's tensors, in the model's order.
        groups: shapes of each group's parameters, in the optimizer's order.

    Returns:
        None if there is no way to give the groups to tensors in order, or more than one. Tensors may be left over: buffers, and
        parameters that are not trained.
    """
    total = sum(map(len, groups))
    if total > len(held):
        return None
    skipping = total < len(held)
    start = (0,) * len(groups)
    reached: dict[tuple[int, ...], int] = {start: 1}
    came: list[dict[tuple[int, ...], tuple[tuple[int, ...], _Choice]]] = []
    for number, shape in enumerate(held):
        left = len(held) - number - 1
        following: dict[tuple[int, ...], int] = {}
        back: dict[tuple[int, ...], tuple[tuple[int, ...], _Choice]] = {}
        for state, ways in reached.items():
            options: list[tuple[tuple[int, ...], _Choice]] = []
            for group, at in enumerate(state):
                if at < len(groups[group]) and groups[group][at] in (None, shape):
                    options.append(((*state[:group], at + 1, *state[group + 1 :]), group))
            if skipping:
                options.append((state, None))
            for then, choice in options:
                if total - sum(then) <= left:
                    following[then] = min(2, following.get(then, 0) + ways)
                    back.setdefault(then, (state, choice))
        reached = following
        came.append(back)
        if len(reached) > _MOST:
            return None
    end = tuple(map(len, groups))
    if reached.get(end) != 1:
        return None
    found: list[list[int]] = [[] for _ in groups]
    state = end
    for number in reversed(range(len(held))):
        state, choice = came[number][state]
        if choice is not None:
            found[choice].append(number)
    return [group[::-1] for group in found]
