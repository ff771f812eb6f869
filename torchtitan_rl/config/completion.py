"""What a shell completes after `torchtitan-rl`: verbs, their options, config files, fields of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.values import field_types

__all__ = ["SHELLS", "field_flags", "script"]

SHELLS = ("bash", "zsh", "fish")

# Files are what readline (`-o default`) offers where the function offers nothing. zsh runs the function as it is.
_BASH = """_torchtitan_rl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} options="" python=""
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  elif [[ -n $python ]] && ((COMP_CWORD == 2)); then
    COMPREPLY=($(compgen -f -X '!*.py' -- "$word") $(compgen -d -- "$word"))
  fi
}}
complete -o default -o filenames -F _torchtitan_rl torchtitan-rl
"""

_ZSH_FIRST = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def field_flags() -> list[str]:
    """Every field of a config as a flag, those of parts that may be None too. The fields of a task, which depend on the
    config file, are not among them."""
    return sorted(set(_flags(RunConfig, "--")))


def _flags(section: type, before: str) -> Iterator[str]:
    for name, kind in field_types(section).items():
        if name.startswith("_"):
            continue
        inner = next((c for c in (kind, *get_args(kind)) if isinstance(c, type) and dataclasses.is_dataclass(c)), None)
        flag = f"{before}{name.replace('_', '-')}"
        yield from [flag] if inner is None else _flags(inner, f"{flag}.")


def script(shell: str, verbs: Mapping[str, Sequence[str]], configured: Sequence[str]) -> str:
    """The script that a shell reads. `verbs`: verb -> its options; `configured`: the verbs that take a config file, and
    its fields. Raises ValueError for another shell."""
    if shell not in SHELLS:
        raise ValueError(f"shell={shell!r}: is none of {', '.join(SHELLS)}")
    fields = field_flags()
    options = {verb: [*own, *(fields if verb in configured else ())] for verb, own in verbs.items()}
    if shell == "fish":
        return "\n".join(_fish(options, configured)) + "\n"
    cases = [
        f'    {verb}) options="{" ".join(own)}"{" python=1" if verb in configured else ""} ;;'
        for verb, own in options.items()
    ]
    bash = _BASH.format(verbs=" ".join(verbs), cases="\n".join(cases))
    return bash if shell == "bash" else f"{_ZSH_FIRST}{bash}"


def _fish(options: Mapping[str, Sequence[str]], configured: Sequence[str]) -> Iterator[str]:
    verbs = " ".join(options)
    yield f'complete -c torchtitan-rl -f -n "not __fish_seen_subcommand_from {verbs}" -a "{verbs}"'
    for verb, own in options.items():
        condition = f'-n "__fish_seen_subcommand_from {verb}"'
        if verb in configured:
            yield f'complete -c torchtitan-rl {condition} -k -a "(__fish_complete_suffix .py)"'
        for option in own:
            yield f"complete -c torchtitan-rl {condition} -l {option.removeprefix('--')}"
