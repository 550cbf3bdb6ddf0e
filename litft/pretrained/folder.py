"""Load models and tokenizers from folders of base models, adapters and runs, or from the Hugging
Face hub."""

import hashlib
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from litft import run_dir
from litft.checkpoints.adapter_reader import (
    ADAPTER_CONFIG,
    adapter_digest,
    read_adapter_config,
)
from litft.checkpoints.base_folder import (
    find_base,
    gguf_remedy,
    local_folder,
    read_config_json,
)
from litft.checkpoints.conversion import TensorMapping, mappings_from_hf, untransposed
from litft.checkpoints.hub import HubId, downloaded_from
from litft.checkpoints.peft_module_names import TEXT_NAMES, ModuleNames
from litft.checkpoints.rules import Rule, match_name
from litft.checkpoints.stored_formats import QUANTIZED_FORMATS, check_method
from litft.checkpoints.weight_files import Checkpoint, check_weights
from litft.data.digests import file_hash
from litft.data.tokenizer import NAMED_TEMPLATES, TEMPLATE_FILE, Tokenizer
from litft.distributed.devices import DTYPES
from litft.families import (
    COMMON_ARCHITECTURES,
    as_transformers_opens,
    families,
    family,
    peft_rules,
    read_config,
    text_config,
    with_model_type,
    wrapper_names,
)
from litft.families.wrappers import wrapped_rules
from litft.methods import Method, read_method
from litft.model.config import Config
from litft.model.config_file import read_object
from litft.model.placement import SINGLE_DEVICE, WeightPlacement
from litft.model.transformer import GPT, default_dtype

# the kind of `fingerprint`
FINGERPRINT = "places:"
# files, other than the weights, that decide what a model computes and how it reads text
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
)
# fields of config.json that say whether head and embedding are one tensor; LFM2 has the second
TIE_FIELDS = {"tie_word_embeddings", "tie_embedding"}
DEMO = Path(__file__).parent.parent / "demo"


@dataclass(frozen=True)
class PretrainedFolder:
    """The contents of a model or adapter folder; weights are only read on demand."""

    # of the model or adapter; has the tokenizer
    folder: Path
    # of the base model; has config.json and the weights
    base: Path
    adapter: Path | None
    # contents of config.json; the language model's part of a multimodal one
    hf: dict[str, Any]
    config: Config
    # whether adapters for a multimodal base have the names of the text model alone
    text_names: bool = False

    @property
    def name(self) -> str:
        """The display name: the folder's name, or the run's name for the result of a run."""
        folder = self.folder.resolve()
        if folder.name in ("final", "best"):
            return folder.parent.name
        return folder.name

    @cached_property
    def multimodal(self) -> dict[str, Any] | None:
        """The content of config.json if the base is a multimodal model, of which `hf` is the text
        part; otherwise None."""
        if (path := self.base / "config.json").is_file():
            content = read_object(path)
        else:
            content = {}
        is_text_model = text_config(content) is content
        return None if is_text_model else content

    @property
    def weight_files(self) -> list[Path]:
        """The files with the weights of the base."""
        return self.checkpoint.files

    @property
    def rules(self) -> list[Rule]:
        """The rules for the tensor names and layouts of this model family."""
        rules = self.text_rules
        if self.multimodal is None:
            return rules
        model_type = self.multimodal["model_type"]
        return wrapped_rules(model_type, rules, self.config, self._stored_shape)

    @cached_property
    def rules_of_files(self) -> list[Rule]:
        """`rules`, with those first that match names in the weight files: a family may know two
        layouts, of which the first is written."""
        found = []
        others = []
        names = self.checkpoint.names
        for rule in self.rules:
            if any(match_name(rule.hf_name, name) for name in names):
                found.append(rule)
            else:
                others.append(rule)
        return [*found, *others]

    def _stored_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor in the weight files; None without it, or without files."""
        try:
            return tuple(self.checkpoint.meta(name).shape)
        except (ValueError, KeyError):
            return None

    @property
    def text_rules(self) -> list[Rule]:
        """The rules for the folder of the language model alone."""
        return family(self.config.model_type).rules(self.config)

    @property
    def stored_rules(self) -> list[Rule]:
        """The rules for the weights in this folder, which may be quantized."""
        packed = self.checkpoint.packed_names
        if packed:
            return untransposed(self.rules, packed)
        return self.rules

    @property
    def adapter_rules(self) -> list[Rule]:
        """The rules for adapter files: PEFT's own names first, then those of the family."""
        return [*peft_rules(self.config), *self.rules]

    @property
    def adapter_names(self) -> ModuleNames:
        """The names of modules in the class that opens the base folder, for adapter files."""
        if self.text_names or not self.multimodal:
            return TEXT_NAMES
        return wrapper_names(self.multimodal)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weight files, with only their headers read."""
        return Checkpoint(self.base, self.hf.get("quantization_config"))

    @property
    def record(self) -> dict[str, Any]:
        """litft's record of the training run in the adapter's config; empty for other folders."""
        if self.adapter:
            return read_adapter_config(self.adapter).get("litft", {})
        return {}

    def quantization_warning(self, kind: str | None) -> str | None:
        """Return a warning if the adapter was trained with another quantization of the base than
        `kind`."""
        trained_with = self.record.get("quantize")
        current = kind or "none"
        if trained_with in (None, current):
            return None
        used = (
            f"but is used with --quantize {current}; --quantize {trained_with} gives what was "
            "trained"
        )
        return f"warning: {self.adapter} was trained with --quantize {trained_with}, {used}"

    def tokenizer(self) -> Tokenizer | None:
        """Return the adapter's tokenizer, else that of the base model; None if neither exists."""
        for folder in (self.folder, self.base):
            if any(
                (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")
            ):
                tokenizer = Tokenizer(folder, self.base)
                # an adapter's folder may have a template alone
                if folder == self.base != self.folder:
                    tokenizer.take_templates(self.folder)
                return tokenizer
        return None

    def dtype(self, precision: str | None) -> torch.dtype:
        """Return the dtype of `precision`, or the folder's dtype if it is None."""
        if precision is None:
            # the embedding's dtype stands for all weights, some of which may be quantized
            for mapping in self.mappings:
                if mapping.targets == ("embed.weight",):
                    return self.checkpoint.meta(mapping.sources[0]).dtype
            return self.checkpoint.meta(self.checkpoint.names[0]).dtype
        if precision not in DTYPES:
            raise ValueError(
                f"precision {precision!r} is not supported; use {', '.join(DTYPES)}"
            )
        return DTYPES[precision]

    def meta_model(
        self, dtype: torch.dtype = torch.float32, placement: WeightPlacement = SINGLE_DEVICE
    ) -> GPT:
        """Create the unquantized network on the meta device."""
        with torch.device("meta"), default_dtype(dtype):
            return placement.build_network(self.config)

    @cached_property
    def outline(self) -> GPT:
        """The unquantized network on the meta device, for names and shapes.

        It must not be changed.
        """
        return self.meta_model()

    def check_length(self, flag: str, tokens: int | None) -> None:
        """Raise ValueError if the model has learned positions, but not for so many tokens."""
        max_positions = self.config.max_positions
        if self.config.learned_positions and tokens and tokens > max_positions:
            raise ValueError(
                f"{flag} {tokens}: this model has only {max_positions} learned positions; lower it"
            )

    def check(self) -> None:
        """Compare names and shapes in the weight files with the config, without reading data."""
        _ = self.checked_mappings

    @cached_property
    def checked_mappings(self) -> list[TensorMapping]:
        """`mappings`, after checking that they fill the network."""
        return check_weights(self.outline, self.checkpoint, self.stored_rules)

    @cached_property
    def mappings(self) -> list[TensorMapping]:
        """The mappings from the tensors of the weight files to litft tensors."""
        return mappings_from_hf(self.stored_rules, self.checkpoint.names)[0]

    def tensor(self, name: str) -> torch.Tensor:
        """Read the base model's tensor by its litft name, in the dtype of the file."""
        # a fused tensor has several targets
        mapping = next(mapping for mapping in self.mappings if name in mapping.targets)
        return mapping.convert(
            [self.checkpoint.read(source) for source in mapping.sources]
        )[mapping.targets.index(name)]

    def quantization(self, requested: str | None = None) -> str | None:
        """Return the quantization as requested or as stored in the folder; raise ValueError if the
        two differ."""
        requested = None if requested == "none" else requested
        settings = self.hf.get("quantization_config") or {}
        # other formats are dequantized when they are read
        if settings.get("quant_method") != "bitsandbytes":
            return requested
        suffix = "-dq" if settings.get("bnb_4bit_use_double_quant") else ""
        if settings.get("load_in_4bit"):
            stored = f"{settings.get('bnb_4bit_quant_type', 'fp4')}{suffix}"
        else:
            stored = "int8"
        if requested not in (None, stored):
            raise ValueError(
                f"{self.base} is already quantized as {stored}; omit --quantize {requested}"
            )
        return stored

    def check_text_names(self, flag: str) -> None:
        """Raise ValueError if transformers has no class that adapters with the names of the text
        model alone apply to."""
        model_type = self.config.model_type
        if self.multimodal and not family(model_type).has_text_class:
            reason = (
                f"transformers opens {self.multimodal['model_type']} with the multimodal class "
                "alone, where such an adapter does nothing"
            )
            raise ValueError(f"{flag}: {reason}; leave it out")

    def check_base_dir(self, base_dir: str | Path | None) -> None:
        """Raise ValueError if a base model is named, but this folder is no adapter, which would
        have one."""
        if base_dir and self.adapter is None:
            reason = (
                f"{self.folder} is no adapter, so it has no base model; leave the flag out"
            )
            raise ValueError(f"--base_dir {base_dir}: {reason}")

    def read_adapter(self) -> tuple[Method, dict[str, torch.Tensor]] | None:
        """Return the method and the trained values of an adapter folder; None for other folders."""
        if self.adapter:
            return read_method(self.adapter, self)
        return None


def resolve(
    folder: str | Path, base_dir: str | Path | None = None, family: str | None = None
) -> PretrainedFolder:
    """Identify a folder or a hub model; raise ValueError with a remedy if it cannot be opened.

    family: the model_type to read config.json as, instead of its own.
    """
    folder = local_folder(folder)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is a file; {gguf_remedy([folder]) or 'name the folder that contains it'}"
        )

    # the folder of a run stands for its result, once there is one
    if run_dir.is_run(folder) and not run_dir.finished(folder):
        if not run_dir.checkpoints(folder):
            reason = "is a run that has not finished, and it has no checkpoint yet"
            raise ValueError(
                f"{folder} {reason}; if it has ended, start it again, in another --out_dir or with "
                "--overwrite"
            )
        export = f"{run_dir.command('scripts/convert_to_hf.py')} --checkpoint_dir {folder}"
        raise ValueError(
            f"{folder} is a run that has not finished; continue it with --resume --out_dir "
            f"{folder}, or write its newest state as it is: {export}"
        )
    if (folder / "final").is_dir() and not (folder / "config.json").is_file():
        folder = folder / "final"  # the folder of a run means its result

    # the base, and the network that its config.json describes
    adapter = folder if (folder / ADAPTER_CONFIG).is_file() else None
    base = find_base(folder, base_dir) if adapter else folder
    hf = text_config(as_transformers_opens(read_config_json(base)))
    hf = _with_used_quantization(hf)
    if family is None and str(hf.get("model_type")) not in families():
        _refuse_unknown(base, hf)
    hf = hf if family is None else with_model_type(hf, family)
    source = _with_own_head(PretrainedFolder(folder, base, adapter, hf, read_config(hf)))
    _check_quantization(base, hf.get("quantization_config") or {})
    if adapter:
        _check_fingerprint(source)
    return source


def _with_used_quantization(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json without a quantization_config of bitsandbytes with both kinds switched
    off, which quantizes nothing in transformers."""
    settings = hf.get("quantization_config") or {}
    if settings.get("quant_method") != "bitsandbytes":
        return hf
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return hf
    return {name: value for name, value in hf.items() if name != "quantization_config"}


def _with_own_head(source: PretrainedFolder) -> PretrainedFolder:
    """Return the source untied if its files have a head with other values than the embedding, as
    transformers reads them.

    Programs that train the head of a tied model alone leave such folders, with a config.json that
    still says tied.
    """
    if not source.config.tied:
        return source
    try:
        checkpoint = source.checkpoint
    except ValueError:
        # without weights there may still be a plan; what reads them says what is wrong
        return source
    untied_hf = source.hf | dict.fromkeys(
        TIE_FIELDS & source.hf.keys() | {"tie_word_embeddings"}, False
    )
    untied = replace(source, hf=untied_hf, config=replace(source.config, tied=False))
    # tensors of layers cannot be head or embedding, and there are many
    outside = []  # of the layers
    for name in checkpoint.names:
        if not re.search(r"\.\d+\.", name):
            outside.append(name)
    names = {}
    for mapping in mappings_from_hf(untied.stored_rules, outside)[0]:
        names[mapping.targets] = mapping.sources[0]
    head = names.get(("lm_head.weight",))
    embedding = names.get(("embed.weight",))
    if (
        head is None
        or embedding is None
        or checkpoint.meta(head).shape != checkpoint.meta(embedding).shape
    ):
        return source
    # the same values, stored twice
    if checkpoint.equal(head, embedding):
        return source
    return untied


def _refuse_unknown(base: Path, hf: dict[str, Any]) -> None:
    """Raise ValueError for an unknown model_type, naming the families whose networks have the same
    tensors."""
    fitting = []

    # families for which the tensors would fit
    for model_type in COMMON_ARCHITECTURES:
        try:
            renamed = with_model_type(hf, model_type)
            PretrainedFolder(base, base, None, renamed, read_config(renamed)).check()
            fitting.append(model_type)
        except (ValueError, TypeError):
            continue
    # raises the error that names the model_type
    try:
        read_config(hf)
    except ValueError as error:
        if not fitting:
            raise
        command = (
            f"python scripts/convert_hf_checkpoint.py --family {fitting[0]} --checkpoint_dir "
            f"{base} --out_dir ..."
        )
        remedy = (
            f"its tensors have the names and shapes of {', '.join(fitting)}; if it is that "
            f"network, convert it: {command}"
        )
        raise ValueError(f"{error}\n{remedy}") from None


def _check_quantization(base: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError if the weights are quantized in a way that cannot be read."""
    supported = ("mxfp4", "bitsandbytes", *QUANTIZED_FORMATS)
    kind = settings.get("quant_method")
    if kind not in (None, *supported):
        reason = f"its weights are quantized ({kind}), but litft only reads {', '.join(supported)}"
        raise ValueError(f"{base}: {reason}; download the unquantized model")
    try:
        check_method(settings)
    except ValueError as error:
        raise ValueError(f"{base}: {error}") from None


def _check_fingerprint(source: PretrainedFolder) -> None:
    recorded = str(source.record.get("base_fingerprint") or "")
    # an earlier litft has recorded another kind
    if recorded.startswith(FINGERPRINT) and recorded != (
        actual := fingerprint(source.checkpoint)
    ):
        raise ValueError(
            f"{source.adapter} was trained on another base than {source.base} (fingerprint "
            f"{recorded[:20]}, found {actual[:20]}); pass --base_dir with the folder it was "
            "trained on"
        )


def fingerprint(checkpoint: Checkpoint) -> str:
    """Identify weights by a hash over the name, shape and dtype of every tensor, and values at
    several places of it (takes milliseconds)."""
    digest = hashlib.sha256()
    # fewer places where there are very many tensors
    places = max(2, min(8, 20_000 // max(1, len(checkpoint.names))))
    for name in checkpoint.names:
        meta = checkpoint.meta(name)
        digest.update(f"{name} {tuple(meta.shape)} {meta.dtype}".encode())
        for values in checkpoint.sample(name, places, 64):
            digest.update(values.float().numpy().tobytes())
    return f"{FINGERPRINT}{digest.hexdigest()}"


def model_digest(source: PretrainedFolder) -> str:
    """Return the hash of what decides how a folder's model computes and reads text: its weights, by
    their fingerprint, and the other files."""
    digest = hashlib.sha256(fingerprint(source.checkpoint).encode())
    for folder in dict.fromkeys((source.base, source.folder)):
        paths = [folder / name for name in MODEL_FILES]
        paths += sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
        for path in paths:
            if path.is_file():
                digest.update(f"{path.name} {file_hash(path)}".encode())
    if source.adapter is not None:
        digest.update(adapter_digest(source.adapter).encode())
    return digest.hexdigest()


def base_record(source: PretrainedFolder, folder: Path) -> dict[str, Any]:
    """Return the config fields about the base model for an adapter written to `folder`: PEFT's and
    litft's own."""
    base = os.path.realpath(source.base)
    record = {
        "base_path": os.path.relpath(base, os.path.realpath(folder)),
        "base_fingerprint": fingerprint(source.checkpoint),
    }
    repo = downloaded_from(source.base) or HubId(str(base))
    return {
        "base_model_name_or_path": repo.name,
        "revision": repo.revision,
        "litft": record,
    }
