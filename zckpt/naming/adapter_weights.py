"""One adapter that a job merges: its tensors by module, and what its config says of each; what cannot be merged is refused.

For `merge`. Source: PEFT 0.21.2, tuners/lora/config.py, layer.py `LoraLayer.update_layer` (scaling), `set_scale` (weights),
utils/other.py `get_pattern_key` (patterns), tuners/lora/variants.py (what each variant does when it is merged).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field
from typing import NoReturn

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import examples
from zckpt.core.catalog import TensorEntry
from zckpt.layouts.joining.patterns import Patterns
from zckpt.naming.other_methods import Parts, is_known, parse_part
from zckpt.storage.location import locate

_PATTERNS = "Write the names of modules, or simpler expressions, as rank_pattern and alpha_pattern of the config."
ROOT = "base_model.model."

_KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_B.bias": "bias",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_FACTOR = re.compile(rf"(?P<module>.+)\.(?P<kind>{'|'.join(map(re.escape, _KINDS))})")
_TOKENS = re.compile(r"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta")
_OTHER = re.compile(
    r"(?:.*\.)?(?:lora|hada|lokr|ia3|oft|boft|hra|miss|c3a|vera|road|waveft|gralora|delora|prompt)_\w+.*"
)
_ORIGINAL, _SAVED = ".original_module.", ".modules_to_save."
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|token_adapter)(?=\.|$)")

_METHODS = {
    "use_qalora": "QALoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "Arrow",
    "alora_invocation_tokens": "aLoRA",
    "use_bdlora": "BD-LoRA",
    "velora_config": "VeLoRA",
    "layer_replication": "layer replication",
}
"""Keys of a config that stand for another method, with other merged weights or none."""
_ALONE = "Use it unmerged, with PEFT"
_UNMERGED = {
    **dict.fromkeys(("QALoRA", "aLoRA", "Arrow"), f"{_ALONE}, which does not merge it either."),
    "layer replication": f"{_ALONE}: repeated layers share weights there, and its merge adds all their updates to the same ones.",
    (
        _NO_FORMULA := "no use_cayley_neumann in the config of an OFT"
    ): "Put it into the adapter's config, true or false, as it was trained. PEFT writes it, and takes true where it is missing.",
}
"""What to do with methods that have no merged weights. Source: PEFT 0.21.2, tuners/lora/variants.py, and its merges, tried."""
_OTHER_SERIES = (0, 18)
"""The version of PEFT since which OFT's series ends as it does. Source: PEFT 0.21.2, tuners/oft/config.py `check_kwargs`."""
_CHANGING = re.compile(r"pissa.*|corda|olora|loftq|lora_ga|mica")
"""Values of `init_lora_weights` that derive the adapter's start from the base weights, and change these."""

_INITIAL = ("pissa_init", "pissa_backup", "initial_model")
"""Directories of such adapters with a config that does not say so: they are saved for a later conversion.
Source: LLaMA-Factory 0.9.5, train/callbacks.py `PissaConvertCallback`; ms-swift 4.6, trainers/mixin.py `_save_initial_model`.
"""
_CONVERTED = ("pissa_converted", "converted/default")
"""Where both put what became of it, a plain LoRA."""


def version_of(said: object) -> tuple[int, ...] | None:
    """The numbers of a version: (4, 57, 6) for "4.57.6"; None for anything else."""
    match = re.match(r"\d+(?:\.\d+)+", said) if isinstance(said, str) else None
    return tuple(map(int, match[0].split("."))) if match else None


def bare(name: str) -> str:
    """A tensor's or module's name in the base model, without the parts that PEFT's wrappers add."""
    at = f".{name}".find(f".{ROOT}")
    return _WRAPPED.sub("", name[at + len(ROOT) :] if at >= 0 else name)


@dataclass(frozen=True, slots=True)
class Factors:
    """The LoRA of one module.

    Attributes:
        module: its name in the adapter's file, without `base_model.model.`; parameters of one module nest (`.base_layer`).
        a: the factor A.
        b: the factor B.
        bias: of B.
        magnitude: of a DoRA.
        embedding: whether the module is an embedding.
    """

    module: str
    a: TensorEntry
    b: TensorEntry
    bias: TensorEntry | None = None
    magnitude: TensorEntry | None = None
    embedding: bool = False

    @property
    def rank(self) -> int:
        """The rows of A; for experts in one parameter, the rows times their number."""
        return self.a.shape[0] if self.a.shape else 0


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter that a job merges.

    Attributes:
        name: as a person calls it: its name in the checkpoint, or its directory's.
        file: where it is, for errors.
        tensors: by their names in `adapter_model.safetensors`.
        config: what its `adapter_config.json` says.
        config_file: where that is, for errors.
        weight: that its effect is multiplied by.
        with_base: whether it lies in one checkpoint with the weights that it was trained on.
        beside: tensors that were trained whole with it, and are not in its own file, by their names in the base model.
        factors: the LoRA of each module, by its name in the adapter's file.
        tokens: rows of tokens that were trained alone, by their module's name in the base model.
        whole: tensors that were trained whole, by their names in the base model.
        twice: further copies of some of these, which PEFT saves with all embeddings.
        products: the matrices of another method than LoRA, by their module's name in the adapter's file.
    """

    name: str
    file: str
    tensors: Mapping[str, TensorEntry]
    config: Mapping[str, object]
    config_file: str
    weight: float = 1.0
    with_base: bool = False
    beside: Mapping[str, TensorEntry] = field(default_factory=dict[str, TensorEntry])
    factors: Mapping[str, Factors] = field(init=False, repr=False)
    tokens: Mapping[str, TensorEntry] = field(init=False, repr=False)
    whole: Mapping[str, TensorEntry] = field(init=False, repr=False)
    twice: Mapping[str, TensorEntry] = field(init=False, repr=False)
    products: Mapping[str, Parts] = field(init=False, repr=False)
    _patterns: Patterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sorts the tensors.

        Raises:
            UnsupportedError: it is of a method that is not merged. IncompleteError: a tensor lacks its counterpart.
            InconsistentError: config and tensors contradict each other.
        """
        object.__setattr__(self, "_patterns", Patterns(self.config_file, _PATTERNS))
        self._check_method()
        parts: dict[str, dict[str, TensorEntry]] = {}
        tokens: dict[str, TensorEntry] = {}
        whole: dict[str, TensorEntry] = {}
        twice: dict[str, TensorEntry] = {}
        products: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self.tensors.items():
            own = name.removeprefix(ROOT)
            if not entry.numel:
                raise IncompleteError(
                    f"tensor {name!r} of adapter {self.name!r} is empty", file=self.file, found=f"shape {list(entry.shape)}",
                    remedy="Merge the checkpoint itself: an adapter saved without gathering ZeRO-3's or FSDP's shards is empty.",
                )  # fmt: skip
            if match := _FACTOR.fullmatch(own):
                if is_known(kind := self.config.get("peft_type")):
                    raise self._refused(f"peft_type {kind}", name)
                kind = "embedding" if "lora_embedding" in match["kind"] else "linear"
                parts.setdefault(match["module"], {})[_KINDS[match["kind"]]] = entry
                parts[match["module"]][kind] = entry
            elif match := _TOKENS.fullmatch(own):
                tokens[bare(match["module"])] = entry
            elif part := parse_part(self.config.get("peft_type"), own):
                products.setdefault(part[0], {})[part[1]] = entry
            elif _OTHER.fullmatch(own):
                raise self._refused(f"a tensor {name!r}", name)
            elif _SAVED in own:
                twice[bare(own.replace(_SAVED, "."))] = entry
            elif _ORIGINAL not in own:  # else it is the base's, beside the one in its place
                whole[bare(own)] = entry
        whole |= {name: twice.pop(name) for name in twice.keys() - whole.keys()}
        object.__setattr__(self, "factors", {module: self._factors(module, found) for module, found in parts.items()})
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "twice", twice)
        object.__setattr__(self, "products", products)

    def _check_method(self) -> None:
        config = self.config
        first = next((name for name in self.tensors if "lora_" in name), next(iter(self.tensors), ""))
        if (kind := config.get("peft_type", "LORA")) not in ("LORA", "TRAINABLE_TOKENS") and not is_known(kind):
            raise self._refused(f"peft_type {kind}", first)
        if named := [method for key, method in _METHODS.items() if config.get(key)]:
            raise self._refused(named[0], first)
        if config.get("use_cayley_neumann") and (version_of(config.get("peft_version")) or ()) < _OTHER_SERIES:
            raise self._refused("use_cayley_neumann of PEFT before 0.18, which had another series", first)
        if kind == "OFT" and "use_cayley_neumann" not in config:
            raise self._refused(_NO_FORMULA, first)
        start = str(config.get("init_lora_weights"))
        home = locate(self.config_file).absolute().parent
        if (_CHANGING.fullmatch(start.lower()) or home.name in _INITIAL) and not self.with_base:
            near = home.parent if home.name in _INITIAL else home
            converted = [str(near / one) for one in _CONVERTED if (near / one).is_dir()]
            raise UnsupportedError(
                f"adapter {self.name!r} belongs to base weights that were changed when it was made", file=self.config_file,
                found=f"init_lora_weights {start!r} in {home.name!r}, for tensor {first!r}",
                expected="an adapter for unchanged weights",
                remedy=f"Merge {converted[0]!r}, which is what was trained, as a plain LoRA." if converted else
                "Merge a checkpoint that holds the changed base weights too, or save the adapter with "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it a plain LoRA.",
            )  # fmt: skip

    def _refused(self, found: str, tensor: str) -> UnsupportedError:
        return UnsupportedError(
            f"adapter {self.name!r} is of a method that is not merged", file=self.file, found=f"{found}, for tensor {tensor!r}",
            expected="LoRA, rsLoRA, DoRA, LoHa, LoKr, VeRA, OFT, BOFT, IA3, trained tokens and modules that are trained whole",
            remedy=_UNMERGED.get(found) or "Merge it with PEFT, if that can; to-peft takes an adapter out of a checkpoint.",
        )  # fmt: skip

    def _factors(self, module: str, found: Mapping[str, TensorEntry]) -> Factors:
        for kind, other in (("a", "b"), ("b", "a")):
            if kind not in found:
                there = found.get(other) or next(iter(found.values()))
                raise IncompleteError(
                    f"the LoRA of {module!r} has no {kind.upper()}", file=self.file, found=f"only {there.name!r}",
                    expected="both of its matrices", remedy="Copy the adapter's files again, or use another save.",
                )  # fmt: skip
        dora = bool(self.config.get("use_dora"))
        if dora != ("magnitude" in found):
            raise (IncompleteError if dora else InconsistentError)(
                f"the {'DoRA' if dora else 'LoRA'} of {module!r} has {'no' if dora else 'a'} magnitude", file=self.file,
                found=f"use_dora {str(dora).lower()} in {self.config_file}",
                expected=f"{'a' if dora else 'no'} tensor '{module}.lora_magnitude_vector'",
                remedy="Copy the adapter's files again; weights and config must be of one save.",
            )  # fmt: skip
        return Factors(module, found["a"], found["b"], found.get("bias"), found.get("magnitude"), "embedding" in found)

    def scaling(self, key: str, rank: int, factors: Factors) -> float:
        """What the product of a module's factors is multiplied by, its weight included; `key`: its name in the base model,
        `rank`: that the tensors show. Raises InconsistentError if the config says another rank, CorruptError if it does not
        say rank or alpha.
        """
        r = self._number("rank_pattern", "r", key)
        alpha = self._number("alpha_pattern", "lora_alpha", key)
        if r != rank:
            raise InconsistentError(
                f"the LoRA of {key!r} has another rank than its config says", file=self.file,
                found=f"rank {rank:,} in {factors.a.name!r}", expected=f"rank {r:g}, as {self.config_file} says",
                remedy="Use the config that was saved with these weights.",
            )  # fmt: skip
        return self.weight * alpha / (math.sqrt(r) if self.config.get("use_rslora") else r)

    def scaling_of_product(self, key: str) -> float:
        """The factor of the product of a LoHa's or LoKr's matrices; arguments and errors as for `scaling`."""
        return self.weight * self._number("alpha_pattern", "alpha", key) / self._number("rank_pattern", "r", key)

    def _number(self, patterns: str, usual: str, key: str) -> float:
        found = self.config.get(patterns)
        value = self.config.get(usual)
        if found is not None and not isinstance(found, Mapping):
            self._wrong(patterns, found)
        for pattern, own in (found or {}).items():
            try:
                if self._patterns.match(rf"(.*\.)?({pattern})$", key):
                    value = own
                    break
            except CorruptError:
                self._wrong(patterns, pattern)
        if type(value) not in (int, float) or not math.isfinite(value) or (usual == "r" and value < 1):  # type: ignore[arg-type, operator]
            self._wrong(usual, value)
        return value  # type: ignore[return-value]

    def _wrong(self, key: str, value: object) -> NoReturn:
        raise CorruptError(
            f"does not say the {key} of adapter {self.name!r}", file=self.config_file, found=repr(value)[:80],
            expected="rank and alpha, in numbers, and patterns that are regular expressions",
            remedy="Use the adapter_config.json that was saved with the adapter.",
        )  # fmt: skip

    def rows_of(self, module: str) -> list[int]:
        """The tokens that were trained, row for row of the adapter's tensor. Raises CorruptError if the config does not
        say them.
        """
        said = self.config.get("trainable_token_indices") or self.config.get("token_indices")
        if isinstance(said, Mapping):
            said = next((rows for name, rows in said.items() if f".{module}".endswith(f".{name}")), None)
        if not isinstance(said, list) or not all(type(row) is int for row in said):
            raise CorruptError(
                f"does not say which tokens of {module!r} adapter {self.name!r} trained", file=self.config_file,
                found=repr(said)[:80], expected="trainable_token_indices",
                remedy="Use the adapter_config.json that was saved with the adapter.",
            )  # fmt: skip
        return said

    @property
    def targets(self) -> tuple[str, ...]:
        """Parameters with a LoRA that are not a module's weight, as the config names them."""
        found = self.config.get("target_parameters")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def __str__(self) -> str:
        return f"adapter {self.name!r} of {examples([self.file])}"
