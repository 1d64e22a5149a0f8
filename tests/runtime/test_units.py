"""Which modules become units."""

from __future__ import annotations

import pytest
from torch import nn

from zckpt.base.errors import UsageError
from zckpt.runtime import utils
from zckpt.runtime.sharding.units import find_units, merge_units


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))


class Model(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(3))
        self.head = nn.Linear(2, 3)


def test_repeated_blocks_the_outermost() -> None:
    model = Model(experts=4)
    assert set(find_units(model)) == set(model.blocks)


def test_a_plain_sequence() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    assert set(find_units(model)) == {model[0], model[2]}
    assert find_units(nn.Linear(2, 2)) == []


def test_what_the_model_says_itself() -> None:
    model = Model(experts=2)
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    assert set(find_units(model)) == {m for m in model.modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("wrap", ["Block", Block, ["Block"], [Block], lambda m: isinstance(m, Block)])
def test_given_units(wrap: object) -> None:
    model = Model(experts=2)
    assert find_units(model, wrap) == list(model.blocks)[::-1]  # type: ignore[arg-type]
    assert find_units(model, model.blocks[1]) == [model.blocks[1]]


def test_inner_units_come_first() -> None:
    model = Model(experts=2)
    units = find_units(model, ["Block", "Linear"])
    assert all(units.index(block) > units.index(block.up) for block in model.blocks)  # type: ignore[arg-type]


def test_a_block_that_shares_a_parameter_is_no_unit() -> None:
    model = Model()
    model.blocks[1].up.weight = model.head.weight = nn.Parameter(model.head.weight[:2].detach().clone())  # type: ignore[union-attr,assignment]
    assert set(find_units(model)) == {model.blocks[0], model.blocks[2]}
    tied = Model()
    tied.blocks[2] = tied.blocks[0]  # the same block twice is one unit
    assert set(find_units(tied)) == {tied.blocks[0], tied.blocks[1]}


def test_a_wrong_name() -> None:
    with pytest.raises(UsageError, match=r"'Blok'.*'Block'"):
        find_units(Model(), "Blok")


@pytest.mark.parametrize(("bucket", "expected"), [(1, [[2], [1], [0]]), (12, [[1, 2]]), (18, [[0, 1, 2]]), (22, [])])
def test_units_that_fill_a_bucket_are_one(bucket: int, expected: list[list[int]]) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)), nn.Linear(1, 2))
    units = list(model)[:3][::-1]  # 6 parameters each, 4 outside of them
    assert merge_units(units, model, bucket) == [[model[i] for i in group] for group in expected]


def test_a_leaf_is_one_unit_whatever_it_contains() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    assert find_units(model, nn.Linear) == [model[1][1], model[1][0], model[0][1], model[0][0]]
    utils.set_z3_leaf_module(model[0], True)
    assert find_units(model, nn.Linear) == [model[1][1], model[1][0], model[0]]
    assert utils.get_z3_leaf_modules(model) == [model[0]]
    assert utils.set_z3_leaf_modules_by_name(model, ["1", "9"], raise_if_not_found=False) == ([model[1]], ["9"])
    assert find_units(model, nn.Linear) == [model[1], model[0]]
    with pytest.raises(UsageError, match="no such modules"):
        utils.set_z3_leaf_modules(model, ["Conv2d"])
