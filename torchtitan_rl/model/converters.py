"""Refusing torchtitan model-config converters that cannot run on this machine, before any process starts."""

from __future__ import annotations

from torchtitan_rl import platform

__all__ = ["check_converters"]


def check_converters(converters: list, where: str = "trainer.converters") -> None:
    """Raises ValueError for what is no converter's config, for missing hardware or packages, and for LoRA's."""
    if not converters:
        return  # torchtitan's converters take seconds to import; a config that lists a converter has imported them
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.quantization import Float8GroupedExpertsConverter, Float8LinearConverter

    for index, converter in enumerate(converters):
        if isinstance(converter, type):
            own = converter.__qualname__
            config = own if own.endswith("Config") else f"{own}.Config"
            raise ValueError(f"{where}[{index}]={own}: is a class, not a config of one; write {config}()")
        name = f"{where}[{index}]={type(converter).__qualname__}"
        if not callable(getattr(converter, "build", None)):
            raise ValueError(f"{name}: has no build() method; give a converter's config, such as X.Config()")
        if isinstance(converter, LoRAConverter.Config):
            raise ValueError(
                f"{name}: adapters belong to trainer.lora, which also checkpoints, merges and exports "
                "them; use trainer.lora=LoRAConfig(...)"
            )
        float8 = isinstance(converter, (Float8LinearConverter.Config, Float8GroupedExpertsConverter.Config))
        if float8 and not getattr(converter, "emulate", False) and not platform.has_float8():
            raise ValueError(
                f"{name}: this {platform.device_type()} device has no float8; use a GPU of compute "
                "capability 8.9 or later, or leave the converter out"
            )
        try:
            converter.build()  # torchtitan's own checks of hardware and packages
        except (ValueError, ImportError) as error:
            raise ValueError(f"{name}: {' '.join(str(error).split()).rstrip('.')}; or leave it out") from None
