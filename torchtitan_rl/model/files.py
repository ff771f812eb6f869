"""The files of a configured model: tokenizer, sizes, weights. This module needs no torchtitan and no vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import DecoderShape, shape_of_directory

__all__ = [
    "assets_dir",
    "has_weights",
    "load_tokenizer",
    "missing_weights",
    "pad_token_id",
    "read_shape",
    "token_ids",
    "weight_files",
    "write_model_dir",
]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "added_tokens.json",
)


BUILTIN_ASSETS = {name: Path(__file__).parent.parent / "assets" / name for name in ("bytes", "chars")}


def assets_dir(config: ModelConfig) -> Path:
    """The directory with the tokenizer. Raises ValueError when there is none."""
    path = BUILTIN_ASSETS.get(config.assets) or Path(config.assets).expanduser()
    if not path.is_dir():
        raise ValueError(
            f"model.assets={config.assets!r}: there is no such directory; give a Hugging Face model directory "
            f"or one of {sorted(BUILTIN_ASSETS)}"
        )
    return path


def token_ids(directory: Path, where: str) -> dict[str, int] | None:
    """Text of each token -> its id, by a directory's tokenizer.json; None where it has none. Raises ValueError,
    beginning with `where`, for a file that is no tokenizer."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab = content["model"].get("vocab", {})
        if isinstance(vocab, list):  # of a unigram tokenizer, whose ids are places: (text, score)
            vocab = {text: place for place, (text, _) in enumerate(vocab)}
        return vocab | {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{where}: its tokenizer.json is no tokenizer ({type(error).__name__}: {error}); fetch the directory "
            "again, a pointer of git-lfs with `git lfs pull`"
        ) from None


def has_weights(config: ModelConfig) -> bool:
    return any(assets_dir(config).glob("*.safetensors"))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors of a Hugging Face directory that are the model, as transformers chooses: `model.safetensors`, or
    those that the index names, or all where there is neither. Others may lie beside them: another program's
    `consolidated.safetensors`, or the index of a larger model that was there before. Raises ValueError for an index
    that cannot be read or names a file that is missing."""
    index, one_file = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if one_file.exists():
        return [one_file]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"weights={str(directory)!r}: {index.name} is no index ({error}); fetch it again"
            ) from None
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ValueError(
                f"weights={str(directory)!r}: {missing[0]} is missing, which {index.name} names; finish the download"
            )
        return [directory / name for name in names]
    return sorted(directory.glob("*.safetensors"))


def missing_weights(config: ModelConfig, where: str = "model") -> str:
    """The error of a pretrained model without weight files; empty when weights are there or the model is not
    pretrained. `where` is the model's field in the run's config."""
    if not config.pretrained or has_weights(config):
        return ""
    return (
        f"{where}.assets={config.assets!r}: has no safetensors, and {where}.pretrained is set; "
        f"give --{where}.assets the directory of a checkpoint"
    )


def read_shape(config: ModelConfig) -> DecoderShape:
    """`config.shape`, or the sizes in the config.json of `config.assets`. Raises ValueError without either."""
    if config.shape is not None:
        return config.shape
    directory = assets_dir(config)
    if not (directory / "config.json").exists():
        raise ValueError(
            f"model.assets={config.assets!r}: has no config.json; give model.shape, model.flavor or a model directory"
        )
    return shape_of_directory(directory, config.family)


def write_model_dir(
    directory: Path,
    shape: DecoderShape,
    tokenizer_dir: Path,
    *,
    eos: int,
    pad: int,
    dtype: str = "float32",
    classifier: bool = False,
) -> None:
    """Writes config.json and the tokenizer's files, all that vLLM and transformers need besides weights. `dtype` is
    that of the weights; `classifier`: of the family's sequence classifier with one label."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        if (tokenizer_dir / name).exists():
            shutil.copyfile(tokenizer_dir / name, directory / name)
    content = shape.to_hf(eos, pad) | {"torch_dtype": dtype}
    if classifier:
        names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in content["architectures"]]
        content |= {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (directory / "config.json").write_text(json.dumps(content, indent=1))


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory, as transformers reads it; raises what transformers raises."""
    if directory in BUILTIN_ASSETS.values():
        # AutoTokenizer imports all kinds of models, for 1.5 s, to end with this class.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(directory))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


def pad_token_id(tokenizer) -> int:
    """A tokenizer's padding token, or the end-of-sequence token of a tokenizer without a padding token."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
