"""The base class of the models, and models on disk: model.safetensors and config.json, never pickle.

Files are replaced atomically. The weights hold a copy of the config, so that loading notices a crash between writing
the two files, and nothing is lost. config.json also holds a SHA-256 of weights and config, and the two keys by which
transformers recognises the folder (see subquad.hf).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from subquad.checks import check_device, check_methods, refuse
from subquad.disk import DIGEST, logger, parse_json, read_json, write_whole
from subquad.mechanisms.base import Mixer
from subquad.models.config import Config
from subquad.ops.short_conv import ShortConv

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
KEYS = ("format", "model", "dtype", "config")
MODEL_TYPE = "subquad"  # of transformers; a folder that has it may have more of its keys


@check_methods
class Model(nn.Module):
    """Base of the models, built from a `config`; `save` writes safetensors and JSON files, `load` reads them."""

    config_type: ClassVar[type[Config]]
    architecture: ClassVar[str | None] = None  # the class of subquad.hf that wraps it
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
        """Write model.safetensors and config.json, each atomically; ValueError if the config holds code."""
        from safetensors.torch import save

        folder = Path(directory)
        if folder.exists() and not folder.is_dir():
            refuse("directory", str(directory), "a folder, or a path that does not exist yet")
        dtype = str(self.dtype).removeprefix("torch.")
        header = {"format": FORMAT, "model": type(self).__name__, "dtype": dtype, "config": self.config.to_dict()}
        text = json.dumps(header, indent=2, allow_nan=False)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors_of(self).items()}
        theirs = {"architectures": [self.architecture]} if self.architecture else {}
        known = {"model_type": MODEL_TYPE, **theirs, **header, DIGEST: digest_tensors(tensors, json.loads(text))}
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / WEIGHTS, save(tensors, metadata={"format": "pt", "subquad": text}))
        write_whole(folder / CONFIG, json.dumps(known, indent=2).encode() + b"\n")

    @classmethod
    def load(cls, directory: str | Path, device: str | torch.device = "cpu") -> Self:
        """Load a saved model, in eval mode; all its tensors must be there, unchanged, and no others."""
        check_device("device", device, meta=False)
        header, weights = read_header(directory), Path(directory) / WEIGHTS
        if (kind := header["model"]) != cls.__name__:
            raise ValueError(f"{directory} holds a {kind}: load it with {kind}.load or models.load")
        dtype = getattr(torch, header["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{directory} has dtype={header['dtype']!r}: accepted is the name of a torch type")
        _check_fit(cls, header["config"], weights)
        if DIGEST not in header:
            logger.warning("%s has no digest, so its weights cannot be checked for changes", directory)
        tensors = verify(directory)
        model = cls(cls.config_type.from_dict(header["config"])).to(device, dtype)
        for name, tensor in tensors_of(model).items():
            tensor.data = tensors[name].to(device)  # also takes over a type that differs from the model's
        restore(model)
        return model.eval()


def read_header(directory: str | Path) -> dict[str, Any]:
    """What config.json says: the model's class, its type, its config, and the digest if there is one."""
    weights, config = Path(directory) / WEIGHTS, Path(directory) / CONFIG
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} does not exist: a saved model is a directory with {WEIGHTS} and {CONFIG}")
    text = describe(weights)[0].get("subquad")
    if text is None and not config.is_file():
        raise FileNotFoundError(f"{config} does not exist, and {weights} holds no config: subquad did not save it")
    header = _check_header(read_json(config), config) if config.is_file() else {}
    carried = header if text is None else _check_header(parse_json(text, weights), weights)
    if not header:
        return carried
    if any(carried[key] != header[key] for key in KEYS):
        raise ValueError(
            f"{config} is not the config that {weights} was saved with: "
            f"restore it, or delete it to load the weights with their own copy of the config"
        )
    return header


def of_transformers(directory: str | Path) -> bool:
    """Whether a folder holds a model of transformers' own, such as a Llama."""
    config = Path(directory) / CONFIG
    return config.is_file() and is_theirs(read_json(config))


def is_theirs(header: Any) -> bool:
    """Whether this is what transformers writes as config.json of a model that is not ours."""
    return isinstance(header, dict) and "format" not in header and header.get("model_type") not in (None, MODEL_TYPE)


def verify(directory: str | Path) -> dict[str, Tensor]:
    """The weights of a saved model; ValueError if there is a digest and they or the config do not match it."""
    from safetensors.torch import load_file

    header, weights = read_header(directory), Path(directory) / WEIGHTS
    tensors: dict[str, Tensor] = load_file(weights)
    if header.get(DIGEST) not in (None, digest_tensors(tensors, {key: header[key] for key in KEYS})):
        raise ValueError(
            f"{weights} is damaged: weights and config are not what was saved (SHA-256); restore the folder, "
            f'or delete the "{DIGEST}" line of {CONFIG} if they were changed on purpose'
        )
    return tensors


def restore(model: nn.Module) -> None:
    """Recompute what is not saved, after tensors were loaded one by one."""
    for module in model.modules():
        if isinstance(module, Mixer | ShortConv):
            module.restore()


def seal(directory: str | Path) -> None:
    """Write the digest into the config of a folder that transformers has just saved."""
    from safetensors.torch import load_file

    weights, config = Path(directory) / WEIGHTS, Path(directory) / CONFIG
    whole = read_json(config)
    header = _check_header(whole, config)
    digest = digest_tensors(load_file(weights), {key: header[key] for key in KEYS})
    write_whole(config, json.dumps({**whole, DIGEST: digest}, indent=2).encode() + b"\n")


def check_finite(model: nn.Module, source: object) -> None:
    """ValueError if a tensor holds a NaN or an infinity; it names the first one."""
    for name, tensor in tensors_of(model).items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
            values = f"{wrong:,} of {tensor.numel():,} values that are NaN or infinite"
            raise ValueError(f"{source} cannot be used: {name} holds {values}; accepted are finite weights")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model; tied ones appear once, under their first name."""
    named: dict[str, Tensor] = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: named[name] for name in first.values()}


def digest_tensors(tensors: Mapping[str, Tensor], header: Any = None) -> str:
    """SHA-256 of names, types, shapes and all bits of tensors on the CPU, and of the header."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe(path: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """The metadata of a safetensors file and the shapes of its tensors, without reading the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118, it is no mapping
            return file.metadata() or {}, shapes
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error})") from error


def _check_fit(cls: Any, config: Any, weights: Path) -> None:
    """Refuse a config that asks for more than the file holds, before anything is allocated."""
    _, shapes = describe(weights)
    depth = sum(_depths(config))
    if depth > len(shapes):  # each layer has its own tensors; building so many takes long, even on meta
        raise ValueError(f"{weights} does not fit its config: depth={depth:,}, but it holds only {len(shapes)} tensors")
    try:
        parsed = cls.config_type.from_dict(config)
        with torch.device("meta"):
            wanted = tensors_of(cls(parsed))
    except (ValueError, RuntimeError, MemoryError, OverflowError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{weights} does not fit its config, which no model can be built from: {reason}") from error
    odd = {"lacks": wanted.keys() - shapes.keys(), "has unknown": shapes.keys() - wanted.keys()}
    for what, names in odd.items():
        if names:
            some = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ValueError(f"{weights} does not fit its config: it {what} {some}")
    for name, tensor in wanted.items():
        if shapes[name] != list(tensor.shape):
            raise ValueError(f"{weights}: {name} has shape {shapes[name]}: accepted is {list(tensor.shape)}")


def _depths(config: Any) -> Iterator[int]:
    """All values of `depth` in a config and its parts."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if key == "depth" and isinstance(value, int):
            yield value
        yield from _depths(value)


def _check_header(header: Any, path: Path) -> dict[str, Any]:
    """The keys that are ours; a folder that transformers saved has others as well."""
    given = set(header) if isinstance(header, dict) else set()
    theirs = given if isinstance(header, dict) and header.get("model_type") == MODEL_TYPE else set()
    named = set(KEYS) <= given and given - theirs <= {*KEYS, DIGEST}
    if is_theirs(header):
        raise ValueError(
            f"{path} is of a model of transformers, {header['model_type']!r}: accepted here are those of subquad; "
            "`subquad generate`, `subquad serve` and AutoModelForCausalLM take decoders from this folder"
        )
    if not named or not all(isinstance(header[key], str) for key in ("model", "dtype")):
        raise ValueError(f"{path} is not a model's config: accepted are the keys {', '.join((*KEYS, DIGEST))}")
    if header["format"] != FORMAT:
        raise ValueError(f"{path} has format {header['format']!r}: this version reads {FORMAT}")
    return {key: header[key] for key in (*KEYS, DIGEST) if key in header}
