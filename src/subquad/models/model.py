"""What all models share: their config, device and type, saving and loading."""

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from subquad.checks import check_device, check_methods, refuse
from subquad.models import saving
from subquad.models.config import Config


@check_methods
class Model(nn.Module):
    """Base of the models: built from its `config`; `save` writes safetensors beside JSON, `load` reads them."""

    config_type: ClassVar[type[Config]]
    config: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_methods(cls)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def save(self, directory: str | Path) -> None:
        """Write model.safetensors and config.json, whole or not at all."""
        if Path(directory).exists() and not Path(directory).is_dir():
            refuse("directory", str(directory), "a folder, or a name that nothing has yet")
        saving.write(self, Path(directory))

    @classmethod
    def load(cls, directory: str | Path, device: str | torch.device = "cpu") -> Self:
        """The model that was saved there, in eval mode; bit for bit."""
        check_device("device", device, meta=False)
        model: Self = saving.read(cls, directory, device)
        return model
