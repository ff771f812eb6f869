"""Every key of a `config.json`, by family: `python -m tests.config_keys` writes docs/config_keys.md."""

from pathlib import Path

from torchtitan_rl.families import deepseek_v3, gpt_oss, llama3, qwen2, qwen3, qwen3_5
from torchtitan_rl.families.hf_keys import HfKeys

PAGE = Path(__file__).parents[1] / "docs" / "config_keys.md"
FAMILIES: dict[str, HfKeys] = {
    "Qwen3": qwen3.HF_KEYS,
    "Qwen3, mixtures": qwen3.HF_KEYS_OF_MIXTURE,
    "Llama 3": llama3.HF_KEYS,
    "Qwen2.5": qwen2.HF_KEYS,
    "Qwen3.5": qwen3_5.HF_KEYS,
    "gpt-oss": gpt_oss.HF_KEYS,
    "DeepSeek-V3": deepseek_v3.HF_KEYS,
}
TEXT = """\
# Keys of a config.json

What each [family](families.md) does with every key of a Hugging Face `config.json` that it knows. The table is written
from `torchtitan_rl/families/` by `python -m tests.config_keys`.

| in a cell | is |
|---|---|
| read | the value becomes a size or a setting of the model |
| a value | the key may have this value, or null; with another value the model is another one, and is refused |
| absent | the key may only be null: with any value the model is refused |
| - | the key changes nothing that this family computes |
| empty | the family does not know the key, and refuses a model that has it |

A key on none of these lists is refused in every family, with its name and value. Keys that begin with `_` are ignored.
`layer_types` has a kind for every layer; where the table says `['full_attention']`, all must be of this kind. A Qwen3.5
whose `config.json` has a part `text_config` is read from there; what describes its images is left out, as is the part
of the model that sees.

{table}

These change nothing in any family: {ignored}.

Of `rope_parameters` and `rope_scaling`, each family reads `rope_theta` and these kinds of scaling, with these names:

| family | kind | names |
|---|---|---|
{scalings}
"""


def cell(keys: HfKeys, key: str) -> str:
    rule = keys.rule(key)
    if rule == "one value":
        return " or ".join(f"`{value!r}`" for value in keys.values(key)) or "absent"
    return {"read": "read", "changes nothing": "-", "unknown": ""}[rule]


def page() -> str:
    """The whole page, from the lists of the families."""
    known = sorted({key for keys in FAMILIES.values() for key in keys.known()})
    rows = {key: [cell(keys, key) for keys in FAMILIES.values()] for key in known}
    ignored = [key for key, cells in rows.items() if set(cells) == {"-"}]
    table = ["| key | " + " | ".join(FAMILIES) + " |", "|---" * (len(FAMILIES) + 1) + "|"]
    table += [f"| `{key}` | " + " | ".join(cells) + " |" for key, cells in rows.items() if key not in ignored]
    scalings = [
        f"| {family} | `{kind}` | {', '.join(f'`{name}`' for name in names)} |"
        for family, keys in FAMILIES.items()
        for kind, names in keys.rope.items()
    ]
    ignored_list = ", ".join(f"`{key}`" for key in ignored)
    return TEXT.format(table="\n".join(table), ignored=ignored_list, scalings="\n".join(scalings))


if __name__ == "__main__":
    PAGE.write_text(page())
