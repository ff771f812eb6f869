"""The contract of a family of models: its sizes, its Hugging Face `config.json`, and the model that torchtitan builds.

A family is a data class of sizes. Users give one as `model.shape`, or leave it to the `config.json` of `model.assets`.
What is particular about a family stands in its own file: nothing else in the package asks which family a model is of;
`engine/plan.py` asks which kind of attention a layer has. Modules of shapes import torchtitan's models inside
functions, because configs import these modules.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt

from torchtitan_rl.constraints import Hint
from torchtitan_rl.families.hf_keys import required, rope_of

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["DecoderShape", "ExpertsShape", "sizes_of_hf", "read_config_json"]


@dataclass(kw_only=True, slots=True)
class ExpertsShape:
    """A mixture of experts in the place of every feed-forward. Example: `ExpertsShape(num_experts=8, top_k=2)`."""

    num_experts: Annotated[int, Ge(1)]
    """Experts in each layer."""
    top_k: Annotated[int, Ge(1)]
    """Experts that see a token."""
    load_balance_coeff: Annotated[float | None, Gt(0), Hint("use None for no bias")] = None
    """How far torchtitan's load-balancing bias moves towards experts with few tokens at every optimizer step; None: no
    bias. Hugging Face's Qwen3 has no such bias: with one, an export is complete for this package only."""


@dataclass(kw_only=True, slots=True)
class DecoderShape(ABC):
    """The sizes of a causal decoder with grouped-query attention and a gated feed-forward. Each family is a subclass,
    and so is a family of your own (docs/families.md)."""

    vocab_size: Annotated[int, Ge(1)]
    """Rows of the embedding; at least one for every token id of the tokenizer."""
    dim: Annotated[int, Ge(1)]
    """Hidden size."""
    n_layers: Annotated[int, Ge(1)]
    n_heads: Annotated[int, Ge(1)]
    """Query heads of a layer."""
    n_kv_heads: Annotated[int, Ge(1)]
    """Key and value heads of a layer."""
    head_dim: Annotated[int, Ge(1)]
    """Size of one head."""
    hidden_dim: Annotated[int, Ge(1)]
    """Inner size of the gated feed-forward; in a mixture of experts, of each expert."""
    rope_theta: Annotated[float, Gt(1)] = 1e4
    """Base of the rotary embedding's frequencies."""
    max_seq_len: Annotated[int, Ge(1)] = 4096
    """Positions that the rotary embedding covers, in tokens."""
    tie_embeddings: bool = True
    """Whether the head shares the embedding's weights."""
    norm_eps: Annotated[float, Ge(0)] = 1e-6
    """Added to the mean square in every RMS norm."""

    name: ClassVar[str]
    """The family's name in messages and tables, such as `"qwen3"`."""
    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` in a `config.json` that are this family."""
    lora_targets: ClassVar[tuple[str, ...]] = ("qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Layers that can have low-rank adapters, by the names of `LoRAConfig.target_modules`."""
    other_weights: ClassVar[tuple[str, ...]] = ()
    """How names begin of tensors in a directory that are of parts which the family leaves out."""
    optional_weights: ClassVar[str] = ""
    """How names end of tensors that a directory may lack: a router's load-balancing bias, which then begins at 0."""
    has_sinks: ClassVar[bool] = False
    """Whether attention has sinks: learned scores, one a head, that take weight from a query's positions."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that do not go together. A family with checks of its own calls this one first."""
        if not all(isinstance(size, int) and size > 0 for size in (self.n_heads, self.n_kv_heads, self.head_dim)):
            return  # one size by itself is refused by its constraints, in `validation.fields`
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.shape.n_kv_heads={self.n_kv_heads}: every key head serves as many query heads, and "
                f"n_heads={self.n_heads} is no multiple of it; use a number that divides n_heads"
            )
        field, rotated = self._rotation
        if rotated % 2 or not rotated:
            raise ValueError(
                f"model.shape.{field}={getattr(self, field)}: the rotary embedding turns pairs of dimensions, and this "
                f"is {rotated} of a head's {self.head_dim}; use a value for an even number"
            )

    @property
    def _rotation(self) -> tuple[str, int]:
        """The field that says how many dimensions of a head the rotary embedding turns, and how many it turns."""
        return "head_dim", self.head_dim

    # The model.

    @abstractmethod
    def model_spec(self) -> ModelSpec:
        """torchtitan's spec of the model: its config, its canonical parallel plan and its state-dict adapter."""

    @classmethod
    def debug(cls, **sizes: Any) -> Self:
        """A model of the family with what makes it special, which two cores check in seconds. `sizes` are those that
        every family has; a family adds its own."""
        return cls(**sizes)

    def own_model_fault(self, device: Literal["cpu", "cuda"]) -> str:
        """Why vLLM's own model of the family is not the model of these sizes on a device, in words that stand alone;
        "" where no fault is known."""
        return ""

    # What a model of these sizes has and needs.

    @property
    def experts(self) -> ExpertsShape | None:
        """Sizes of a mixture of experts. None here: a family that has mixtures makes this a field."""
        return None

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values in the engine's cache."""
        return self.n_layers

    @property
    def num_mixture_layers(self) -> int:
        """Layers with a mixture of experts in the place of the feed-forward."""
        return 0 if self.experts is None else self.n_layers

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the tensors that a layer without attention keeps of a sequence, whatever its length."""
        return ()

    @property
    def cut_sizes(self) -> dict[str, int]:
        """Sizes that a tensor-parallel degree must divide, by name."""
        return {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads, "hidden_dim": self.hidden_dim}

    @property
    def layer_extras(self) -> int:
        """Parameters of a layer besides its matrices and the two norms of `dim`: biases, norms of heads."""
        return 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each tied one once."""
        attention = self.dim * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        feed_forward = 3 * self.dim * self.hidden_dim
        if self.experts is not None:
            feed_forward = self.experts.num_experts * (feed_forward + self.dim)  # and its row of the router
        layer = attention + feed_forward + 2 * self.dim + self.layer_extras
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * layer + self.dim

    # Hugging Face's config.json.

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any], where: str) -> Self:
        """Sizes in the content of a `config.json`. Raises ValueError for a model that computes otherwise than this
        family; the messages begin with `where`."""
        if hf.get("model_type") not in cls.model_types:
            kinds = " or ".join(f"{kind!r}" for kind in cls.model_types)
            raise ValueError(
                f"{where}: its config.json says model_type={hf.get('model_type')!r}, and the family {cls.name} has "
                f"{kinds}; give model.shape or model.family of the model's own family"
            )
        try:
            fields = cls._fields_of_hf(hf, where)
        except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:  # a value of another kind
            raise ValueError(
                f"{where}: its config.json cannot be read as a {cls.name}'s ({type(error).__name__}: {error}); fetch "
                "the directory again"
            ) from None
        try:
            return cls(**fields)
        except (ValueError, TypeError) as error:  # sizes that do not go together
            raise ValueError(
                f"{where}: its config.json is of no {cls.name}: {error}; fetch the directory again"
            ) from None

    @classmethod
    def from_hf(cls, config_json: Path) -> Self:
        """`from_hf_config` of a file."""
        where = f"model.assets={str(config_json.parent)!r}"
        return cls.from_hf_config(read_config_json(config_json, where), where)

    @classmethod
    @abstractmethod
    def _fields_of_hf(cls, hf: dict[str, Any], where: str) -> dict[str, Any]:
        """The fields of the shape: `hf_keys.check_keys`, then `sizes_of_hf` and the fields that the family adds."""

    def require_described_by(self, config_json: Path, *, head: bool = True) -> None:
        """Raises ValueError for a config.json of another family or of a model that computes otherwise: with another
        rotary embedding, say, which no tensor's size shows. `head=False`: whether the head is tied does not matter.

        What a config.json leaves open may differ: the longest sequence, a load-balancing bias, and a scaled rotary
        embedding where the config.json has none, which is how one asks for longer contexts."""
        described = self.from_hf(config_json)
        theirs = dict(_leaves(described))
        for path, ours in _leaves(self):
            name = path.rpartition(".")[2]
            if name in ("max_seq_len", "load_balance_coeff") or name == "tie_embeddings" and not head:
                continue
            if path.startswith("rope_scaling.") and theirs.get("rope_scaling", 0) is None:
                continue
            if path not in theirs or theirs[path] != ours:
                says = theirs[path] if path in theirs else getattr(described, path.partition(".")[0])
                raise ValueError(
                    f"weights={str(config_json.parent)!r}: its config.json says {path}={says}, and model.shape says "
                    f"{ours}; leave model.shape out, which takes the sizes of model.assets, or give the "
                    "directory of a model of this shape"
                )

    def to_hf(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """The content of a Hugging Face `config.json` with these sizes."""
        scaled = self._hf_rope()
        version_4_keys = {"rope_scaling": scaled} if "rope_type" in scaled else {}  # it knows no rope_parameters
        return dict(
            **self._hf_kind(),
            **version_4_keys,
            vocab_size=self.vocab_size,
            hidden_size=self.dim,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.hidden_dim,
            rope_theta=self.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta} | scaled,
            max_position_embeddings=self.max_seq_len,
            tie_word_embeddings=self.tie_embeddings,
            rms_norm_eps=self.norm_eps,
            hidden_act="silu",
            attention_dropout=0.0,
            initializer_range=0.02,
            use_cache=True,
            torch_dtype="float32",
            eos_token_id=eos_token_id,
            bos_token_id=None,
            pad_token_id=pad_token_id,
        )

    @abstractmethod
    def _hf_kind(self) -> dict[str, Any]:
        """`architectures`, `model_type`, and the family's own keys."""

    def _hf_rope(self) -> dict[str, Any]:
        """Keys of `rope_parameters` that describe a scaled rotary embedding."""
        return {}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every field of a shape, and of its parts."""
    for field in dataclasses.fields(value):
        name, inner = f"{path}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from _leaves(inner, f"{name}.")
        else:
            yield name, inner


def sizes_of_hf(
    hf: dict[str, Any],
    where: str,
    *,
    inner: str = "intermediate_size",
    heads: Sequence[str] = (),
    norm_eps: float = 1e-6,
) -> dict[str, Any]:
    """The fields that every family has. `inner` is the key of the feed-forward's size. `heads`: those of
    `num_key_value_heads` and `head_dim` for which transformers would take a number of its own, not the one that follows
    from the other sizes. `norm_eps` is for a missing `rms_norm_eps`. A key with null is as good as none.

    Raises ValueError, beginning with `where`, for missing keys."""
    hf = {name: value for name, value in hf.items() if value is not None}
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", inner, "max_position_embeddings")
    required(hf, (*sizes, *heads), where)
    theta, scaling = rope_of(hf, where)
    return dict(
        vocab_size=hf["vocab_size"],
        dim=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        hidden_dim=hf[inner],
        rope_theta=theta,
        max_seq_len=_num_positions(hf["max_position_embeddings"], scaling),
        tie_embeddings=hf.get("tie_word_embeddings", False),
        norm_eps=hf.get("rms_norm_eps", norm_eps),
    )


def _num_positions(number: int, scaling: dict[str, Any]) -> int:
    """Positions that the rotary embedding covers, of which the config.json says `number`. With YaRN they are `factor`
    times the original ones, and many a config.json leaves the original number, as Qwen2.5's README advises."""
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if scaling.get("rope_type") != "yarn" or not isinstance(factor, (int, float)) or not isinstance(original, int):
        return number
    return max(number, int(factor * original))


def read_config_json(path: Path, where: str) -> dict[str, Any]:
    """The content of a `config.json`. Raises ValueError, beginning with `where`, for a file that is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: its config.json is not JSON ({error}); fetch the directory again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where}: its config.json holds no JSON object; fetch the directory again")
    return content
