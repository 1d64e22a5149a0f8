"""The part of one parameter that this rank holds.

For `shard`, which makes them, and all that need weights, masters or gradients.
[Note: sharded parameters]
*weight* is the parameter as it is registered in the module between steps: a DTensor with a local part that is this rank's rows
of dim 0, or, where `fully_shard` cannot cut (scalars, parameters without elements), the whole on every rank: *replicated*.
*master* is what the optimizer updates: this rank's part as a plain fp32 tensor. For a sharded weight it is the same memory;
a replicated weight in half precision has a master of its own. Frozen parameters have none.
Rows of dim 0 are a run of elements, so a part is (start, count) of the row-major tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zckpt.base.dataclass import dataclass
from zckpt.core.dtypes import BY_TORCH_NAME

try:
    from zckpt._core import is_beyond_doubt
except ImportError:  # built without a compiler
    is_beyond_doubt = None  # type: ignore[assignment]

_ATTRIBUTE = "_zckpt_sharded_parameter"

_PIECE = 1 << 16


@dataclass(slots=True, eq=False)
class ShardedParameter:
    """The part of one parameter that this rank holds; see [Note: sharded parameters].

    Attributes:
        name: as `named_parameters` gives it; of tied ones the first.
        shape: of the whole parameter.
        start: this rank's first element, row-major.
        count: this rank's elements.
        replicated: every rank holds all of it, outside of `fully_shard`.
        dtype: that the parameter is computed with.
        weight: as registered in the module.
        holders: the modules that it is registered in, and its names there.
        exact: the first numbers of a replicated parameter, before they were rounded to `dtype`.
        master: None for a parameter that no optimizer updates.
        whole: what the modules hold instead of `weight` while it is gathered; only where it is between steps (see `whole`).
        end_copies: lets the modules hold `whole` or `weight` again instead of a copy; see [Note: copies] in `whole`.
        on_use: called before somebody gets the part, who may change it; None where that is nobody's concern.
    """

    name: str
    shape: torch.Size
    start: int
    count: int
    replicated: bool
    dtype: torch.dtype
    weight: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]
    exact: torch.Tensor | None = None
    master: nn.Parameter | None = None
    whole: nn.Parameter | None = None
    _drop: Callable[[], None] | None = None
    _version: int | None = None
    on_use: Callable[[], None] | None = None
    end_copies: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.own(self.weight)

    def own(self, tensor: torch.Tensor) -> None:
        """Makes `sharded_parameter_of` find this one for a tensor."""
        setattr(tensor, _ATTRIBUTE, self)

    @property
    def trained(self) -> bool:
        """Whether it has gradients."""
        return self.weight.requires_grad

    @property
    def elements(self) -> slice:
        """The range of this rank's elements in the whole parameter, row-major."""
        return slice(self.start, self.start + self.count)

    @property
    def is_whole(self) -> bool:
        """Whether the modules hold the whole parameter now, apart from copies."""
        if self.end_copies is not None:
            self.end_copies()
        module, name = self.holders[0]
        return self.whole is not None and module._parameters[name] is self.whole

    def hold(self, whole: nn.Parameter, drop: Callable[[], None]) -> None:
        """Sets the parameter that the modules hold while it is gathered, and the function that drops it."""
        self.whole, self._drop = whole, drop
        self.own(whole)

    def settle(self) -> None:
        """Records that the whole parameter has just been gathered: both sides are equal."""
        self._version = None if self.master is None else self.master._version

    @torch.no_grad()
    def take_up(self) -> torch.Tensor | None:
        """Copies what a script has written to the whole parameter into this rank's part, element by element.

        A part in other memory than the device's is not looked at if it is trained; nor is a master that the script has changed
        itself. Returns this rank's elements of the whole parameter, if they are for certain, bit for bit, what those of the part
        become in its dtype, and none of them is infinite or NaN.
        """
        if self.whole is None or not self.is_whole or not self.whole.untyped_storage().size():
            return None  # without memory it has nothing to take, and its address means nothing
        local = self.local()
        if self.master is not None and (local.device != self.whole.device or self.master._version != self._version):
            return None
        rows = self.whole.detach().reshape(-1)[self.elements].view(local.shape).to(local.device)
        if local.is_cpu:  # on a device the answer would be waited for
            local = local.contiguous()
            if _is_certain(local, rows):
                return rows
            if _are_equal(local, rows):
                return None
        mine = local.to(rows.dtype)
        self.local().copy_(torch.where(mine == rows, local, rows.to(local.dtype)))
        return None

    def drop(self) -> None:
        """Makes the next forward gather the parameter again, since this rank's part has changed."""
        if self.is_whole and self._drop is not None:
            self._drop()

    def local(self) -> torch.Tensor:
        """This rank's part of the weight, in the weight's own memory."""
        if self.on_use is not None:
            self.on_use()
        return self._local()

    def _local(self) -> torch.Tensor:
        return self.weight._local_tensor if isinstance(self.weight, DTensor) else self.weight.data

    def part(self) -> torch.Tensor:
        """This rank's part in full precision: of the master if there is one, otherwise of the weight. Not a copy."""
        local = self.local()
        return local if self.master is None else self.master.data

    @torch.no_grad()
    def make_master(self) -> nn.Parameter:
        """Creates the master for an optimizer: of the weight's own memory where that is fp32."""
        local = self.local() if self.exact is None else self.exact
        self.exact = None
        self.master = nn.Parameter(local if local.dtype == torch.float32 else local.float())
        return self.master

    def bind(self) -> None:
        """Lets the master use the weight's memory again, if something has replaced the weight's."""
        if self.master is not None and not self.replicated:
            local = self._local()
            if self.master.data_ptr() != local.data_ptr():
                self.master.data = local

    @torch.no_grad()
    def take_gradient(self) -> None:
        """Moves the gradient of a backward from the weight to the master, or drops it if there is no master."""
        grad, self.weight.grad = self.weight.grad, None
        if self.master is None or grad is None:
            return
        local = grad._local_tensor if isinstance(grad, DTensor) else grad.to(torch.float32)
        if self.replicated and self.master.grad is not None:
            self.master.grad += local
        else:
            self.master.grad = local

    @torch.no_grad()
    def give_back(self) -> None:
        """Rounds a replicated master into its weight; a sharded master shares the weight's memory."""
        if self.master is not None and self.replicated and self.master.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(self.master)


def _is_certain(exact: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Whether the C++ engine is sure that finite numbers, cast to the others' dtype, equal these; dense, on the CPU."""
    if is_beyond_doubt is None:
        return False
    source, target = (BY_TORCH_NAME[str(one.dtype).removeprefix("torch.")].number for one in (exact, rounded))
    return is_beyond_doubt(source, target, exact.data_ptr(), rounded.data_ptr(), exact.numel())


def _are_equal(exact: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Whether numbers, cast to the dtype of others, equal these; compared in pieces that fit a processor's cache."""
    pieces = zip(exact.reshape(-1).split(_PIECE), rounded.reshape(-1).split(_PIECE), strict=True)
    return all(torch.equal(one.to(other.dtype), other) for one, other in pieces)


def sharded_parameter_of(parameter: torch.Tensor) -> ShardedParameter | None:
    """The part of a parameter that `shard` has sharded; None for any other tensor."""
    found = getattr(parameter, _ATTRIBUTE, None)
    return found if isinstance(found, ShardedParameter) else None
