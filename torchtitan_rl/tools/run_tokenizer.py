"""The tokenizer of a run's directory."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from torchtitan_rl.health.run_reader import Run

__all__ = ["tokenizer_of"]

_BUILT_IN = Path(__file__).parent.parent / "assets"


def tokenizer_of(run: Run) -> Tokenizer | None:
    """The tokenizer of a run: of its own `model/` directory, else of the config's `model.assets`. None where neither is
    on this machine."""
    model = run.config().get("model")
    assets = str(model.get("assets", "")) if isinstance(model, dict) else ""
    places = [run.path / "model"]
    if assets:
        places += [_BUILT_IN / assets, Path(assets).expanduser()]
    for place in places:
        if (file := place / "tokenizer.json").is_file():
            try:
                return Tokenizer.from_file(str(file))
            except Exception:  # whatever the file holds; another place may have a better one
                continue
    return None
