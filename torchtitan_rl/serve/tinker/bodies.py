"""Bodies in JSON: of each request the fields that the server reads. Fields that it does not know are passed over, so
that older and newer SDKs come in alike."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from torchtitan_rl.serve.tinker.faults import fault_of

__all__ = [
    "CreateModelBody",
    "ForwardBackwardBody",
    "FutureBody",
    "LoadWeightsBody",
    "ModelBody",
    "ModelInputBody",
    "NumbersBody",
    "OptimStepBody",
    "SampleBody",
    "SamplerBody",
    "SaveExternalBody",
    "SaveForSamplerBody",
    "SaveWeightsBody",
    "SessionBody",
    "TensorBody",
    "TtlBody",
    "WeightsInfoBody",
    "parse",
]

_Body = TypeVar("_Body", bound=BaseModel)
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Text = Annotated[str, Field(max_length=512)]
_Count = Annotated[int, Field(ge=0, lt=2**62)]
_MAX_METADATA = 2**16  # bytes in JSON: the server keeps them in memory


def _short(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    if metadata is not None and (nbytes := len(json.dumps(metadata))) > _MAX_METADATA:
        raise ValueError(f"has {nbytes} bytes in JSON, and {_MAX_METADATA} may be")
    return metadata


_Metadata = Annotated[dict[str, Any] | None, AfterValidator(_short)]
_Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)] | None


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class ChunkBody(_Lenient):
    type: _Text = "encoded_text"
    tokens: list[_Token] | None = None


class ModelInputBody(_Lenient):
    chunks: list[ChunkBody]


class TensorBody(_Lenient):
    data: list[float] | list[int]
    dtype: Literal["float32", "int64"]
    shape: list[_Count] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class DatumBody(_Lenient):
    model_input: ModelInputBody
    loss_fn_inputs: dict[str, TensorBody]


class ForwardBackwardInput(_Lenient):
    data: list[DatumBody]
    loss_fn: _Text
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardBody(_Lenient):
    model_id: _Text
    seq_id: _Count | None = None
    forward_backward_input: ForwardBackwardInput | None = None
    forward_input: ForwardBackwardInput | None = None


class SessionBody(_Lenient):
    """Heartbeats and everything else that names a session."""

    session_id: _Text = ""
    user_metadata: _Metadata = None
    display_name: _Text | None = None


class LoraBody(_Lenient):
    rank: int
    seed: _Count | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(_Lenient):
    type: _Text = "adamw"


class CreateModelBody(_Lenient):
    session_id: _Text
    model_seq_id: _Count
    base_model: _Text
    user_metadata: _Metadata = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()


class ModelBody(_Lenient):
    """`get_info` and `unload_model`."""

    model_id: _Text


class AdamBody(_Lenient):
    """Bounds are those within which Adam is defined; infinities and NaN are refused."""

    type: _Text = "adamw"
    learning_rate: Annotated[_Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[_Finite, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[_Finite, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[_Finite, Field(ge=1e-30)] = 1e-12
    weight_decay: Annotated[_Finite, Field(ge=0)] = 0.0
    grad_clip_norm: _Finite = 0.0


class OptimStepBody(_Lenient):
    model_id: _Text
    seq_id: _Count | None = None
    optim_params: AdamBody = Field(validation_alias=AliasChoices("adam_params", "optim_params", "optimizer_params"))


class SaveWeightsBody(_Lenient):
    model_id: _Text
    seq_id: _Count | None = None
    path: _Text | None = None
    ttl_seconds: _Ttl = None
    overwrite: bool = False
    user_metadata: _Metadata = None


class SaveForSamplerBody(SaveWeightsBody):
    sampling_session_seq_id: _Count | None = None
    kind: _Text = "snapshot"


class SaveExternalBody(SaveWeightsBody):
    path: _Text
    age_encryption_recipients: list[str] | None = None


class LoadWeightsBody(_Lenient):
    model_id: _Text | None = None
    seq_id: _Count | None = None
    session_id: _Text | None = None
    model_seq_id: _Count | None = None
    base_model: _Text | None = None
    user_metadata: _Metadata = None
    path: _Text
    optimizer: bool
    optimizer_config: OptimizerBody | None = None


class SamplerBody(_Lenient):
    session_id: _Text
    sampling_session_seq_id: _Count
    base_model: _Text | None = None
    model_path: _Text | None = None


class SamplingBody(_Lenient):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[_Token] | list[str] | None = None
    temperature: Annotated[_Finite, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[_Finite, Field(gt=0, le=1)] = 1.0


class SampleBody(_Lenient):
    prompt: ModelInputBody
    sampling_params: SamplingBody
    num_samples: Annotated[int, Field(ge=1)] = 1
    sampling_session_id: _Text | None = None
    seq_id: _Count | None = None
    base_model: _Text | None = None
    model_path: _Text | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


class FutureBody(_Lenient):
    request_id: _Text


class WeightsInfoBody(_Lenient):
    tinker_path: _Text


class TtlBody(_Lenient):
    ttl_seconds: _Ttl = None


class NumbersBody(_Lenient):
    """Of a request that is wrong in other fields, whose it is and its number."""

    model_id: _Text
    seq_id: Annotated[int, Field(ge=1, lt=2**62)]


def parse(kind: type[_Body], body: bytes) -> _Body:
    """A body as an object. Raises Fault (user) that names the field which is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise fault_of(error) from error
