"""A folder to a model and its tokenizer: base models, adapters and runs alike."""

import copy
import hashlib
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from litft import run_dir
from litft.checkpoints.conversion import Rule, TensorMapping, mappings_from_hf, untransposed
from litft.checkpoints.hub import TOKENIZER_FILES, HubId, fetch, hub_id, origin
from litft.checkpoints.peft_format import ADAPTER_CONFIG, read_adapter_config
from litft.checkpoints.weight_files import Checkpoint, check_weights, load_weights, packed_modules
from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import DTYPES
from litft.families import family, peft_rules, read_config, text_config
from litft.methods import Method, read_method
from litft.model.config import Config, read_object
from litft.model.placement import UNSHARDED, WeightPlacement
from litft.model.quantization import KINDS, quantize_modules
from litft.model.transformer import GPT, built_in

DEMO = Path(__file__).parent / "demo"


@dataclass(frozen=True)
class PretrainedFolder:
    """What a folder holds, known before any weight is read."""

    folder: Path  # the model's or the adapter's: where the tokenizer lies
    base: Path  # where config.json and the weights lie
    adapter: Path | None
    hf: dict[str, Any]
    config: Config

    @property
    def name(self) -> str:
        """What a person calls it: a run's result is called as the run."""
        folder = self.folder.resolve()
        return folder.parent.name if folder.name in ("final", "best") else folder.name

    @property
    def rules(self) -> list[Rule]:
        """How this family's weights are named."""
        return family(self.config.model_type).rules(self.config)

    @property
    def stored_rules(self) -> list[Rule]:
        """How this very folder's weights are named."""
        return untransposed(self.rules) if self.checkpoint.is_quantized else self.rules

    @property
    def adapter_rules(self) -> list[Rule]:
        """How an adapter's files name this family's Linears: as PEFT does where it has names of its own."""
        return [*peft_rules(self.config), *self.rules]

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weight files, opened but not read."""
        return Checkpoint(self.base)

    @property
    def record(self) -> dict[str, Any]:
        """What litft has written into an adapter of the run that made it; empty for other folders."""
        return read_adapter_config(self.adapter).get("litft", {}) if self.adapter else {}

    def another_quantization(self, kind: str | None) -> str | None:
        """A warning where an adapter learned beside a base that was kept otherwise; kind: how it is kept now."""
        before, now = self.record.get("quantize"), kind or "none"
        if before in (None, now):
            return None
        return f"warning: {self.adapter} learned beside a base with --quantize {before}, and is used with --quantize {now}"

    def tokenizer(self) -> Tokenizer | None:
        """The adapter's own tokenizer, else the base's; None where neither has one."""
        names = ("tokenizer.json", "tokenizer.model")
        holds = next((f for f in (self.folder, self.base) if any((f / n).is_file() for n in names)), None)
        return Tokenizer(holds) if holds else None

    def dtype(self, precision: str | None) -> torch.dtype:
        """The dtype asked for; None: the folder's own."""
        if precision is None:
            embedding = next((mapping.sources[0] for mapping in self.mappings if mapping.targets == ("embed.weight",)), None)
            return self.checkpoint.meta(embedding or self.checkpoint.names[0]).dtype
        if precision not in DTYPES:
            raise ValueError(f"precision {precision!r} is not known; use {', '.join(DTYPES)}")
        return DTYPES[precision]

    def meta_model(self, dtype: torch.dtype = torch.float32, placement: WeightPlacement = UNSHARDED) -> GPT:
        """The network without memory for its weights."""
        with torch.device("meta"), built_in(dtype):
            return placement.network(self.config)

    def check_length(self, flag: str, tokens: int | None) -> None:
        """ValueError where the model has no positions for so many tokens."""
        context = self.config.max_positions
        if self.config.learned_positions and tokens and tokens > context:
            raise ValueError(f"{flag} {tokens}: this model has learned {context} positions and no more; lower it")

    def check(self) -> None:
        """Compare the weight files' names and shapes with the config, without reading data."""
        _ = self.checked_moves

    @cached_property
    def checked_moves(self) -> list[TensorMapping]:
        """`moves`, once it is known that they fill the network."""
        return check_weights(self.meta_model(), self.checkpoint, self.stored_rules)

    @cached_property
    def mappings(self) -> list[TensorMapping]:
        """How the weight files' tensors become ours."""
        return mappings_from_hf(self.stored_rules, self.checkpoint.names)[0]

    def tensor(self, name: str) -> torch.Tensor:
        """The base's tensor of one of our names, in the file's own dtype."""
        mapping = next(mapping for mapping in self.mappings if name in mapping.targets)
        return mapping.convert([self.checkpoint.read(source) for source in mapping.sources])[mapping.targets.index(name)]

    def quantization(self, asked: str | None = None) -> str | None:
        """The kind that the folder's Linears are kept in: as asked for, or as it was saved; ValueError for both at odds."""
        asked = None if asked == "none" else asked
        settings = self.hf.get("quantization_config") or {}
        if settings.get("quant_method") != "bitsandbytes":
            return asked
        nested = "-dq" if settings.get("bnb_4bit_use_double_quant") else ""
        stored = f"{settings.get('bnb_4bit_quant_type', 'fp4')}{nested}" if settings.get("load_in_4bit") else "int8"
        if asked not in (None, stored):
            raise ValueError(f"{self.base} is quantized already, as {stored}; leave --quantize {asked} out")
        return stored

    def base_model(
        self,
        precision: str | None = None,
        device: torch.device | str = "cpu",
        quantize: str | None = None,
        plain: Collection[str] = (),
        placement: WeightPlacement = UNSHARDED,
    ) -> GPT:
        """The base network with its weights, frozen."""
        model = self.unfilled(precision, quantize, plain, placement).requires_grad_(False)
        self.fill(model, precision, device, placement)
        return model.eval()

    def unfilled(
        self,
        precision: str | None,
        quantize: str | None = None,
        plain: Collection[str] = (),
        placement: WeightPlacement = UNSHARDED,
    ) -> GPT:
        """The base network on the meta device, in its dtype, Linears quantized but for those in `plain`."""
        self.check()
        model = self.meta_model(self.dtype(precision), placement)
        if kind := self.quantization(quantize):
            quantize_modules(model, list(packed_modules(model, self.checkpoint, self.checked_moves, plain)), kind)
        return model

    def fill(
        self, model: GPT, precision: str | None, device: torch.device | str, placement: WeightPlacement = UNSHARDED
    ) -> None:
        """Give `unfilled`, with a method on it and sharded maybe, its memory on `device`, and the weights from disk."""
        placement.allocate(model, device)
        load_weights(model, self.checkpoint, self.checked_moves, self.dtype(precision), placement)
        model.rotaries.to_empty(device=device)  # their tables are computed, not read

    def model(
        self, precision: str | None, device: torch.device | str, quantize: str | None, placement: WeightPlacement = UNSHARDED
    ) -> GPT:
        """The network to use, or a share of it: the base's, with the adapter on it where this folder is one."""
        return load_models([self], precision, device, quantize, placement)[0]

    def read_adapter(self) -> tuple[Method, dict[str, torch.Tensor]] | None:
        """The method of this folder, where it is an adapter, and what it has learned."""
        return read_method(self.adapter, self) if self.adapter else None


def resolve(folder: str | Path, base_dir: str | Path | None = None) -> PretrainedFolder:
    """Find out what a folder is, or a model of the hub; ValueError with a remedy where it is nothing that can be opened."""
    folder = _located(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; {_of_gguf([folder]) or 'name the folder it lies in'}")
    if run_dir.is_run(folder) and not run_dir.finished(folder):
        raise ValueError(f"{folder} is a run that has not finished; continue it with --resume --out_dir {folder}")
    if (folder / "final").is_dir() and not (folder / "config.json").is_file():
        folder = folder / "final"  # a run's folder stands for its result
    adapter = folder if (folder / ADAPTER_CONFIG).is_file() else None
    base = _base_of(folder, base_dir) if adapter else folder
    hf = text_config(_read_config_json(base))
    source = PretrainedFolder(folder, base, adapter, hf, read_config(hf))
    if (kind := (hf.get("quantization_config") or {}).get("quant_method")) not in (None, "mxfp4", "bitsandbytes"):
        reason = f"its weights are quantized ({kind}), and litft reads plain ones, MXFP4 and bitsandbytes'"
        raise ValueError(f"{base}: {reason}; get the unquantized folder")
    if adapter:
        _check_fingerprint(source)
    return source


def _located(folder: str | Path) -> Path:
    """The folder of a path or of a hub id."""
    if wanted := hub_id(folder):
        return fetch(wanted)[0]
    if not Path(folder).exists():
        raise ValueError(f"{folder} does not exist; name a model folder in Hugging Face's format, an adapter's, or a hub id")
    return Path(folder)


def load_models(
    sources: Sequence[PretrainedFolder],
    precision: str | None,
    device: torch.device | str,
    quantize: str | None,
    placement: WeightPlacement = UNSHARDED,
) -> list[GPT]:
    """The network of each folder; all have one base, and its tensors are there once. None of them may be trained.

    ValueError where one of several trains whole modules of a base that is to be quantized: the others have them quantized.
    """
    adapters = [source.read_adapter() for source in sources]
    plain = {name for adapter in adapters if adapter for name in adapter[0].unquantized_modules()}
    if plain and len(sources) > 1 and (kind := sources[0].quantization(quantize)):
        reason = f"{len(plain)} whole modules ({min(plain)}) are trained by one of the adapters, and {kind} for the others"
        raise ValueError(f"{reason}; open that adapter alone, or all of them unquantized")
    base = sources[0].base_model(precision, device, quantize, plain, placement)
    models = [*(share_weights(base) for _ in adapters[1:]), base]
    for model, adapter in zip(models, adapters, strict=True):
        if adapter:
            method, values = adapter
            method.load(model, values, placement)
        placement.connect(model.eval())
    return models


def share_weights(model: GPT) -> GPT:
    """A network of the same tensors: what a method changes of its modules it changes there alone."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def load(
    folder: str | Path,
    precision: str | None = None,
    device: torch.device | str = "cpu",
    base_dir: str | Path | None = None,
    quantize: str | None = None,
) -> tuple[GPT, Tokenizer | None]:
    """Open any folder: a base model, an adapter (litft's or PEFT's), a merged model, a run.

    precision: bf16, fp16 or fp32; None means the folder's own dtype. base_dir overrides where an adapter says its base
    lies. quantize: nf4, nf4-dq, fp4, fp4-dq or int8; None leaves the folder's Linears as they are. The tokenizer is None
    where there is none. Raises ValueError for what cannot be opened.
    """
    if quantize not in (None, "none", *KINDS):
        raise ValueError(f"quantize {quantize!r} is not known; use {', '.join(KINDS)}")
    source = resolve(folder, base_dir)
    if warning := source.another_quantization(source.quantization(quantize)):
        warnings.warn(warning.removeprefix("warning: "), stacklevel=2)
    return source.model(precision, device, quantize), source.tokenizer()


def _read_config_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        remedy = _of_gguf(folder.iterdir()) or "name the folder that Hugging Face's save_pretrained wrote"
        raise ValueError(f"{folder} has no config.json; {remedy}")
    return read_object(path)


def _of_gguf(files: Iterable[Path]) -> str | None:
    """What to do with llama.cpp's files, if there is one."""
    found = next((path for path in files if path.suffix == ".gguf"), None)
    return found and f"python scripts/convert_gguf_checkpoint.py --checkpoint_dir {found} makes a folder of it"


def _base_of(adapter: Path, base_dir: str | Path | None) -> Path:
    """An adapter's base: as asked for, as recorded relative to the adapter, or as named in PEFT's own field."""
    if base_dir:
        return _located(base_dir)
    config = read_adapter_config(adapter)
    recorded = config.get("litft", {}).get("base_path")
    named = config.get("base_model_name_or_path") or ""
    candidates = [adapter / recorded] if recorded else []
    for path in [*candidates, Path(named)]:
        if named and path.is_dir():
            return Path(os.path.normpath(path))
    reason = f"{adapter}: its base model {named!r} is not a folder here; pass --base_dir"
    revision = config.get("revision")
    if not (wanted := hub_id(f"{named}@{revision}" if revision else named)):
        raise ValueError(reason)
    try:
        return fetch(wanted)[0]
    except ValueError as error:
        raise ValueError(f"{reason} ({error})") from None


def _check_fingerprint(source: PretrainedFolder) -> None:
    recorded = source.record.get("base_fingerprint")
    if recorded and recorded != (found := fingerprint(source.checkpoint)):
        raise ValueError(
            f"{source.adapter} was trained on another base than {source.base} (fingerprint {recorded[:12]}, found "
            f"{found[:12]}); pass --base_dir with the folder it was trained on"
        )


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash over every tensor's name, shape, dtype and first numbers: which weights these are, in milliseconds."""
    digest = hashlib.sha256()
    for name in checkpoint.names:
        meta = checkpoint.meta(name)
        digest.update(f"{name} {tuple(meta.shape)} {meta.dtype}".encode())
        digest.update(checkpoint.head(name, 64).float().numpy().tobytes())
    return digest.hexdigest()


def base_record(source: PretrainedFolder, folder: Path) -> dict[str, Any]:
    """What an adapter written to `folder` says about its base: PEFT's field, and litft's own to find it again."""
    base = os.path.realpath(source.base)
    own = {"base_path": os.path.relpath(base, os.path.realpath(folder)), "base_fingerprint": fingerprint(source.checkpoint)}
    known = origin(source.base) or HubId(str(base))
    return {"base_model_name_or_path": known.name, "revision": known.revision, "litft": own}


def copy_files(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config as they are."""
    for name in TOKENIZER_FILES:
        if (path := source / name).is_file():
            shutil.copyfile(path, folder / name)


def copy_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer beside a model, with the chat template and the stop tokens the model was trained with."""
    copy_files(tokenizer.folder, folder)
    tokenizer.save_added(folder)
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    stops = tokenizer.stop_ids
    settings["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
