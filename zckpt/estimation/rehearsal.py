"""A training step in bytes: what a rank allocates and frees, in the order in which the trainer does it, and the peak.

For `choices`. Nothing is allocated here.
[Note: a step] Between steps a rank holds its parts: of trained parameters the fp32 weights and the optimizer's states, of frozen
ones the weights in the dtype of the computation. A group of units is gathered into one buffer and copied out of it. Stages 0 to
2 keep it gathered, also between steps; stage 3 drops a unit after its forward and gathers it
again. Gradients of a group are whole until its backward has ended, are copied into one buffer, and reduced; this rank's part of
the result becomes fp32. Without an accelerator the groups of stages 0 to 2 are large (`runtime.sharding.shard`), and a reduction
needs one more buffer (there, too).
Source: torch 2.13, distributed/fsdp/_fully_shard; checked by tests/estimation/test_measured.py.

Bytes of activations: what a forward keeps for the backward, by formula, for transformers of known kinds.
Counted are the tensors that torch's autograd keeps when transformers' own modules run with scaled dot product
attention and without a mask of padding.
[Note: bytes of a block] Per token, with c bytes of the computation's dtype, width h, queries q, keys k, inner width f:
Llama: c (4h + 2q + 2k + 4f) and 8h + 8 in fp32 for its two norms; Qwen 3 also (c + 4)(q + k) for the norms of queries and keys.
GPT-2 and BERT: c (8h + 2f), and with GPT-2's own gelu, which is made from five operations, c (8h + 5f).
Each head keeps 4 bytes for the softmax. On a GPU torch (2.11) has no kernel for grouped queries in fp32: the matrix
of scores is kept, and keys and values once for each query. Dropout keeps a mask of every element that it sees: a byte on a GPU, c
bytes on a CPU, where dropout in the attention also keeps three fp32 matrices of scores.
Source: transformers 5.23; checked by tests/estimation/test_sizes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.sizes import group_by_size
from zckpt.estimation.sizes import ModelSize, ParameterSize

LLAMA = frozenset(("llama", "mistral", "qwen2", "qwen3"))
BERT = frozenset(("bert", "roberta"))


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro batch on one rank.

    Attributes:
        embedding: kept of what is before the blocks.
        unit: kept of one block.
        unit_input: kept of one block that is computed again in the backward.
        unit_backward: needed for a moment in the backward of a block.
        head: kept of what is behind the blocks; mostly the logarithms of probabilities that the loss keeps.
        head_forward: needed for a moment in computing the loss.
        head_backward: needed for a moment in the backward of the loss.
    """

    embedding: int = 0
    unit: int = 0
    unit_input: int = 0
    unit_backward: int = 0
    head: int = 0
    head_forward: int = 0
    head_backward: int = 0


def activations_of(
    config: Mapping[str, Any], *, compute_bytes: int, micro_batch: int, length: int, accelerator: bool = True
) -> Activations | None:
    """The bytes of activations of a model by its config, as transformers has it; None for a kind that has no formula.
    `compute_bytes`: of a number in the dtype of the computation; `length`: tokens of a sample; `accelerator`: a GPU computes.
    """
    kind, tokens, c = config.get("model_type"), micro_batch * length, compute_bytes
    if kind in LLAMA:
        h, block = _llama(config, c, length if accelerator else 0)
        vocabulary, norm = int(config["vocab_size"]), 2 * c * h + 4 * h
        inner = int(config["intermediate_size"])
    elif kind == "gpt2":
        h, heads = int(config.get("n_embd", 768)), int(config.get("n_head", 12))
        inner = int(config.get("n_inner") or 4 * h)
        own_gelu = config.get("activation_function", "gelu_new") == "gelu_new"
        block = c * (8 * h + (5 if own_gelu else 2) * inner + 4) + 4 * heads
        dropped = float(config.get("resid_pdrop", 0.1)), float(config.get("attn_pdrop", 0.1))
        block += _dropout(*dropped, h=h, heads=heads, length=length, c=c, accelerator=accelerator)
        vocabulary, norm = int(config.get("vocab_size", 50257)), 2 * c * h
    elif kind in BERT:
        h, heads = int(config.get("hidden_size", 768)), int(config.get("num_attention_heads", 12))
        inner = int(config.get("intermediate_size", 3072))
        block = c * (8 * h + 2 * inner + 4) + 4 * heads
        dropped = float(config.get("hidden_dropout_prob", 0.1)), float(config.get("attention_probs_dropout_prob", 0.1))
        block += _dropout(*dropped, h=h, heads=heads, length=length, c=c, accelerator=accelerator)
        vocabulary, norm = int(config.get("vocab_size", 30522)), 4 * c * h
    else:
        return None
    names = config.get("architectures") or [""]
    scores = vocabulary if any(word in str(names[0]) for word in ("CausalLM", "LMHead", "MaskedLM")) else 0
    exact = c if kind in BERT else 4  # the loss of causal language models is computed in fp32
    return Activations(
        embedding=tokens * c * h,
        unit=tokens * block,
        unit_input=tokens * c * h,
        unit_backward=tokens * c * 2 * inner,
        head=tokens * (norm + exact * scores),
        head_forward=tokens * scores * (c + (exact if exact != c else 0)),
        head_backward=tokens * scores * 2 * exact,
    )


_KEY_HEADS, _HEAD_SIZES = {"mistral": 8, "qwen2": 32, "qwen3": 32}, {"qwen3": 128}
"""The values that transformers takes where a config lacks the key; null means the number of heads, and width / heads.
"""


def longest(config: Mapping[str, Any]) -> int | None:
    """The largest number of tokens of a model; None if its config does not give it."""
    for key in ("max_position_embeddings", "n_positions"):
        if isinstance(value := config.get(key), int) and value > 0:
            return value
    return None


def _llama(config: Mapping[str, Any], c: int, length: int) -> tuple[int, int]:
    """The width, and the bytes of a block per token; `length` is 0 on a CPU."""
    h, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kind = str(config.get("model_type"))
    size = int(config.get("head_dim", _HEAD_SIZES.get(kind)) or h // heads)
    groups = int(config.get("num_key_value_heads", _KEY_HEADS.get(kind)) or heads)
    q, k, f = heads * size, groups * size, int(config["intermediate_size"])
    block = c * (4 * h + 2 * q + 2 * k + 4 * f) + 8 * h + 8 + 4 * heads
    if kind == "qwen3":
        block += (c + 4) * (q + k) + 4 * (heads + groups)
    if c == 4 and k < q and length:
        block += 2 * c * (q - k) + 4 * heads * (length - 1)
    return h, block


def _dropout(hidden: float, scores: float, *, h: int, heads: int, length: int, c: int, accelerator: bool) -> int:
    """The bytes of masks per token, and of what attention keeps on a CPU because of dropout."""
    masks = 2 * h * (1 if accelerator else c) if hidden else 0
    if not scores or accelerator:
        return masks
    return masks + 12 * heads * length + 3 * h * (4 - c) - 4 * heads


BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is trained, as far as memory depends on it.

    Attributes:
        stage: of ZeRO.
        offload: parts, their gradients and the optimizer's states are in host memory; without an accelerator it changes nothing.
        precision: fp32, fp16 or bf16.
        shards: ranks that share a parameter; 1 at stage 0.
        accumulation: micro batches in a step.
        states: fp32 numbers that the optimizer keeps for each element.
        temporaries: fp32 numbers for each element that a step of the optimizer needs for a moment.
        reduce_bytes: of an element in gradient reductions.
        accelerator: a GPU computes; otherwise the host, and its memory is what `device` counts.
        bucket: parameters per collective at stage 2 without an accelerator.
        checkpointing: activations of a unit are computed again in the backward.
    """

    stage: int
    offload: bool
    precision: str
    shards: int
    accumulation: int
    states: int
    temporaries: int
    reduce_bytes: int
    accelerator: bool
    bucket: int
    checkpointing: bool


@dataclass(frozen=True, slots=True)
class Peak:
    """The bytes of one rank at the peak.

    Attributes:
        weights: fp32 weights of trained parameters, and frozen weights: this rank's part.
        optimizer: the optimizer's states.
        gradients: this rank's part, in fp32, as the optimizer gets it.
        states: those of `weights` and `optimizer` that are on the device all the time.
        buffers: on the device at the moment of the peak, whatever is neither a state nor an activation: the model's buffers,
            gathered weights, gradients, what is sent and received.
        activations: on the device at the moment of the peak.
        device: the largest sum on the device at any moment: `states`, `buffers` and `activations` together.
        host: the same in host memory.
    """

    weights: int
    optimizer: int
    gradients: int
    states: int
    buffers: int
    activations: int
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A unit, or everything outside units, as one step sees it; in bytes of the computation's dtype unless noted."""

    whole: int
    grads: int
    grad_elements: int
    grad_part_elements: int
    front: int = 0
    """The bytes of `grads` that the backward computes last."""


def rehearse(model: ModelSize, setting: Setting, activations: Activations | None = None) -> Peak:
    """The bytes of a rank in a step: what it keeps, and the largest sum at any moment. No `activations`: none are counted."""
    compute, shards = BYTES[setting.precision], setting.shards
    weights = sum(one.part(shards) * (4 if one.trained else compute) for one in model.parameters)
    trained = sum(one.part(shards) for one in model.parameters if one.trained)
    optimizer, gradients = trained * 4 * setting.states, trained * 4
    step = _Step(model, setting, activations or Activations())
    away = setting.offload and setting.accelerator
    held = 0 if away else weights + optimizer
    step.add(model.buffer_bytes)
    for micro in range(min(setting.accumulation, 2)):
        step.forward(first=micro == 0)
        step.backward(last=micro == min(setting.accumulation, 2) - 1)
    temporaries = trained * 4 * setting.temporaries
    step.add(0 if away else temporaries)
    buffers, moment = step.most
    host = weights + optimizer + gradients + temporaries if away else 0
    return Peak(weights, optimizer, gradients, held, buffers, moment, held + buffers + moment, host)


class _Step:
    """The work of one rank in a step; see [Note: a step]. `most`: bytes of buffers and of activations when they were the most
    together, beside what the device holds all the time.
    """

    def __init__(self, model: ModelSize, setting: Setting, activations: Activations) -> None:
        self.setting, self.activations = setting, activations
        self.most = self._now = (0, 0)
        self.compute = BYTES[setting.precision]
        self.root = self._block((*model.before, *model.after), front=model.before, tied=model.tied)
        self.largest = max((one.numel * self.compute for one in model.parameters if one.trained), default=0)
        self.blocks = [self._block(unit) for unit in model.units]
        self.groups = self._groups(model)
        self.sharded_grads = 0
        self.whole_grads = 0

    def add(self, nbytes: int, activations: int = 0) -> None:
        """Allocates bytes of buffers and of activations; frees them, if they are negative."""
        self._now = self._now[0] + nbytes, self._now[1] + activations
        self.most = max(self.most, self._now, key=sum)

    def _block(
        self, parameters: Sequence[ParameterSize], front: Sequence[ParameterSize] = (), tied: bool = False
    ) -> _Block:
        shards, trained = self.setting.shards, [one for one in parameters if one.trained]
        part = sum(one.part(shards) for one in parameters)
        grad_part = sum(one.part(shards) for one in trained)
        last = 0 if tied else sum(one.numel for one in front if one.trained)
        grads = sum(one.numel for one in trained)
        return _Block(
            part * shards * self.compute, grads * self.compute, grad_part * shards, grad_part,
            last * self.compute,
        )  # fmt: skip

    def _groups(self, model: ModelSize) -> list[list[int]]:
        """The numbers of blocks that are gathered and reduced together, in the order of the forward; all others belong
        to the root.
        """
        bucket = {2: self.setting.bucket, 3: 0}.get(self.setting.stage, model.numel)
        if self.setting.accelerator or not bucket:
            return [[number] for number in range(len(self.blocks))]
        sizes = [(number, sum(one.numel for one in unit)) for number, unit in enumerate(model.units)]
        root = (-1, sum(one.numel for one in (*model.before, *model.after)))
        groups = group_by_size([*reversed(sizes), root], bucket)
        return [group[::-1] for group in groups if -1 not in group][::-1]

    def _gathered(self, group: Sequence[int] | None) -> _Block:
        """The blocks of a group as one; None is the root's, with the blocks outside groups."""
        if group is None:
            taken = {number for one in self.groups for number in one}
            blocks = [self.root, *(block for number, block in enumerate(self.blocks) if number not in taken)]
        else:
            blocks = [self.blocks[number] for number in group]
        return _Block(
            sum(block.whole for block in blocks),
            sum(block.grads for block in blocks),
            sum(block.grad_elements for block in blocks),
            sum(block.grad_part_elements for block in blocks),
            self.root.front,
        )

    def _gather(self, group: _Block, waiting: int) -> int:
        """Gathers a group; `waiting` is a buffer of an earlier one, freed meanwhile. Returns the bytes of its own buffer."""
        if self.setting.shards == 1:
            self.add(group.whole)
            return 0
        self.add(group.whole)  # the buffer
        self.add(-waiting)
        self.add(group.whole)  # what is copied out of it
        return group.whole

    def forward(self, *, first: bool) -> None:
        """The forward of a micro batch."""
        stage, acts = self.setting.stage, self.activations
        keep = acts.unit_input if self.setting.checkpointing else acts.unit
        waiting = self._gather(self._gathered(None), 0) if first or stage == 3 else 0
        self.add(0, acts.embedding)
        starts = {group[0]: group for group in self.groups}
        ends = {group[-1]: group for group in self.groups}
        for number in range(len(self.blocks)):
            if number in starts and (first or stage == 3):
                waiting = self._gather(self._gathered(starts[number]), waiting)
            self.add(0, acts.unit)
            self.add(0, keep - acts.unit)
            if number in ends and stage == 3:
                self.add(-self._gathered(ends[number]).whole)
        self.add(0, acts.head + acts.head_forward)
        self.add(-waiting, -acts.head_forward)

    def backward(self, *, last: bool) -> None:
        """The backward of a micro batch, with the reductions that the stage makes then."""
        stage, acts, setting = self.setting.stage, self.activations, self.setting
        reduces = last or stage >= 2
        keep = acts.unit_input if setting.checkpointing else acts.unit
        again = self.whole_grads > 0
        sent = 0
        starts = {group[0]: group for group in self.groups}
        ends = {group[-1]: group for group in self.groups}
        late = self.root.front
        self.add(0, acts.head_backward)
        self._grow(self.root.grads - late, again)
        self.add(0, -acts.head - acts.head_backward)
        prefetched = 0
        for number in reversed(range(len(self.blocks))):
            if number in ends and stage == 3:
                self.add(0 if prefetched else self._buffer(ends[number]))
                self.add(self._gathered(ends[number]).whole)
                self.add(-self._buffer(ends[number]))
                before = [group for group in self.groups if group[-1] < number]
                prefetched = self._buffer(before[-1]) if before else 0
                self.add(prefetched)
            self.add(0, acts.unit - keep + acts.unit_backward)
            self._grow(self.blocks[number].grads, again)
            self.add(0, -acts.unit - acts.unit_backward)
            if number in starts and reduces:
                sent = self._reduce(self._gathered(starts[number]), sent, last=last, held=0)
        self._grow(late, again)
        self.add(0, -acts.embedding)
        if reduces:
            sent = self._reduce(self._gathered(None), sent, last=last, held=late)
            self.add(-sent)
        if not reduces:
            self.whole_grads = 1

    def _buffer(self, group: Sequence[int]) -> int:
        return 0 if self.setting.shards == 1 else self._gathered(group).whole

    def _grow(self, grads: int, again: bool) -> None:
        """Allocates gradients; those of an earlier micro batch are added to, one parameter at a time."""
        if again:
            self.add(min(grads, self.largest))
            self.add(-min(grads, self.largest))
        else:
            self.add(grads)

    def _reduce(self, group: _Block, sent: int, *, last: bool, held: int) -> int:
        """Reduces a group's gradients. Returns the bytes of the buffer that they were sent from, which is still there."""
        setting = self.setting
        if setting.stage == 3:
            self.add(-group.whole)
        self.add(-sent)
        whole, part = group.grad_elements * setting.reduce_bytes, group.grad_part_elements * setting.reduce_bytes
        self.add(whole)
        self.add(-group.grads)
        if setting.shards > 1 and not setting.accelerator:
            self.add(part + whole + held)
            self.add(-whole - held)
        elif setting.shards > 1 or setting.accelerator:
            self.add(part)
        full = group.grad_part_elements * 4
        own = setting.shards > 1 or setting.accelerator
        if setting.reduce_bytes != 4:
            self.add(full)
            self.add(-part if own else 0)
        elif not own:
            whole = 0  # the buffer becomes the gradient
        if setting.offload and setting.accelerator:
            self.add(-full)
        elif self.sharded_grads >= full and setting.accumulation > 1 and setting.stage >= 2 and last:
            self.add(-full)  # added to what the micro batches before left
        self.sharded_grads += full if not last else 0
        return whole
