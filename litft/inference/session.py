"""What the commands that generate work with: a model, its tokenizer, and settings from flags and generation_config.json."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from litft import run_dir
from litft.args import ModelArgs, Sampling, SpeculativeArgs
from litft.args.processes import started_by
from litft.args.sampling import USUAL
from litft.data.tokenizer import Tokenizer
from litft.distributed.device_map import DeviceMap
from litft.distributed.devices import check_devices, limit_threads, pick_accelerator, pick_precision
from litft.inference.decoder import Decoder
from litft.inference.fused_linears import fuse_linears, pack_weights
from litft.inference.generation import Completion, Request, whole_answers
from litft.inference.speculative import Drafter, DraftModel, PromptLookup
from litft.inference.tp_decoding import TensorParallelDecoder, join_team
from litft.methods import disabled
from litft.model.config import read_object
from litft.model.placement import UNSHARDED, WeightPlacement
from litft.model.transformer import GPT
from litft.pretrained import PretrainedFolder, load_models, resolve

MAX_NEW_TOKENS = 256
# what generation_config.json says too, and the types that it may have
KINDS = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float))
KINDS |= {"top_k": (int,), "max_new_tokens": (int,)}


class Session(NamedTuple):
    """What a command works with."""

    model: GPT
    tokenizer: Tokenizer
    sampling: Sampling
    max_new_tokens: int
    stop: list[str]
    compiled: bool
    team: TensorParallelDecoder | None = None  # the processes that have parts of the model; None: there is this one alone

    def decoder(self, rows: int, capacity: int, compiled: bool | None = None) -> Decoder:
        """To read and continue texts with the model; compiled: default as asked for."""
        compiled = self.compiled if compiled is None else compiled
        make = Decoder if self.team is None else self.team.decoder
        return make(self.model, rows, capacity, compiled)

    def limit_threads(self, rows: int) -> None:
        """For a process that only decodes so many texts at once: use no more threads than pay for a model of this size."""
        limit_threads(self.model, rows)

    def generate(self, requests: list[Request], rows: int, says: str, quiet: bool | None = None) -> list[Completion]:
        """Whole answers, of which so many are made at once. quiet: no bar, which `says` what it is; None: in a terminal."""
        capacity = max((len(request.ids) + request.max_new_tokens for request in requests), default=1)
        decoder = self.decoder(max(1, min(rows, len(requests))), capacity)
        with tqdm(total=len(requests), desc=says, disable=quiet) as bar:
            return whole_answers(decoder, self.tokenizer, requests, done=bar.update)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Inside, the model computes without its adapter."""
        with disabled(self.model) if self.team is None else self.team.disabled(self.model):
            yield

    def request(self, ids: list[int], number: int = 0, trimmed: bool = True) -> Request:
        """To answer a prompt; of many with one seed each has another. trimmed: of an answer in a template."""
        seed = None if self.sampling.seed is None else self.sampling.seed + number
        sampling = replace(self.sampling, seed=seed)
        return Request(ids, self.max_new_tokens, sampling, self.tokenizer.stop_ids, self.stop, trimmed=trimmed)


def open_session(args: ModelArgs) -> Session:
    """The model that a command names, or that of the newest finished run; flags win over its generation_config.json.

    Of several processes it returns in the first one.
    """
    source = source_of(args)
    device, placement, team = _devices(args, source)
    session = _open_all(args, [source], device, placement, team)[0]
    fuse_linears(session.model, pack=not session.compiled)
    if team:
        team.begin(session.model)
    return session


def open_sessions(args: ModelArgs, adapters: Sequence[str]) -> list[Session]:
    """The same, and adapters over its base, whose weights are there once; ValueError for a folder that is none."""
    if not adapters:
        return [open_session(args)]
    source = source_of(args)
    others = [resolve(folder, source.base) for folder in adapters]
    if plain := [str(other.folder) for other in others if other.adapter is None]:
        raise ValueError(
            f"--adapters {', '.join(plain)}: no adapter; name folders with an adapter_config.json, or their runs"
        )
    device, placement, _ = _devices(args, source)
    found = _open_all(args, [source, *others], device, placement, None)
    if not found[0].compiled:
        pack_weights([session.model for session in found])
    return found


def source_of(args: ModelArgs) -> PretrainedFolder:
    """The folder that a command names, or the newest finished run's."""
    return resolve(args.checkpoint_dir or run_dir.newest_finished(), args.base_dir)


def _open_all(
    args: ModelArgs,
    sources: list[PretrainedFolder],
    device: torch.device,
    placement: WeightPlacement,
    team: TensorParallelDecoder | None,
) -> list[Session]:
    """What commands work with of folders that have one base."""
    settings, tokenizers = [_settings(args, source) for source in sources], [_tokenizer(source) for source in sources]
    for source in sources:
        warning = source.another_quantization(source.quantization(args.quantize))
        if warning and not (team and team.rank):
            print(warning, file=sys.stderr)
    models = load_models(sources, pick_precision(args.precision, device), device, args.quantize, placement)
    places = Counter(map(str, models[0].block_devices))
    if args.layers_per_device:
        print("layers: " + ", ".join(f"{count} on {place}" for place, count in places.items()), file=sys.stderr)
    compiled = args.compile == "true" or (args.compile == "auto" and device.type == "cuda" and len(places) == 1)
    found = []
    for model, tokenizer, given in zip(models, tokenizers, settings, strict=True):
        sampling = Sampling(**{item.name: given[item.name] for item in fields(Sampling) if item.name in given})
        _check_bias(sampling, model.config.vocab_size)
        most = given.get("max_new_tokens", MAX_NEW_TOKENS)
        found.append(Session(model.requires_grad_(False), tokenizer, sampling, most, given["stop"], compiled, team))
    return found


def _devices(
    args: ModelArgs, source: PretrainedFolder
) -> tuple[torch.device, WeightPlacement, TensorParallelDecoder | None]:
    """Where texts are given to the network, what this process holds of it, and the processes, where there are several."""
    first = torch.device(pick_accelerator(args.accelerator))
    if args.layers_per_device is None:
        team = join_team(args.devices, args.accelerator, source)
        return (team.device, team.slices, team) if team else (first, UNSHARDED, None)
    if (started := started_by()) is not None:
        raise ValueError(f"--layers_per_device: one process uses all devices, and {started[0]} has started several")
    check_devices(first.type, args.devices)
    devices = [torch.device("cuda", index) if first.type == "cuda" else first for index in range(args.devices)]
    counts = None if args.layers_per_device == "auto" else [int(count) for count in args.layers_per_device.split(",")]
    return devices[0], DeviceMap(devices, counts), None


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    """ValueError where tokens are biased that do not exist, or none is left."""
    if len([value for value in sampling.logit_bias.values() if value == -math.inf]) >= vocab_size:
        raise ValueError("generation_config.json's suppress_tokens leave no token to say; mend the file")
    if outside := [token for token in sampling.logit_bias if token >= vocab_size]:
        raise ValueError(f"--logit_bias {outside[0]}: the model's vocabulary has {vocab_size} tokens")


def _tokenizer(source: PretrainedFolder) -> Tokenizer:
    if (tokenizer := source.tokenizer()) is None:
        raise ValueError(f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
    return tokenizer


def _settings(args: ModelArgs, source: PretrainedFolder) -> dict[str, Any]:
    """What the folder's generation_config.json says, as transformers would go by it, and the flags above it."""
    found = _stored(source)
    banned = {token: -math.inf for token in found.pop("suppress_tokens") if token < source.config.vocab_size}
    flags = {name: getattr(args, name) for name in (*KINDS, "presence_penalty", "frequency_penalty", "seed")}
    bias = {int(token): float(value) for token, value in json.loads(args.logit_bias or "{}").items()}
    found |= {name: value for name, value in flags.items() if value is not None}
    if (most := found.get("max_new_tokens", MAX_NEW_TOKENS)) < 1:
        raise ValueError(f"max_new_tokens {most}, of generation_config.json: must be at least 1; give --max_new_tokens")
    return found | {"stop": args.stop or found["stop_strings"], "logit_bias": banned | bias}


def _stored(source: PretrainedFolder) -> dict[str, Any]:
    """What generation_config.json says of sampling, stop texts and tokens that are never said; ValueError for nonsense."""
    files = (folder / "generation_config.json" for folder in (source.folder, source.base))
    path = next((file for file in files if file.is_file()), None)
    stored = read_object(path) if path else {}
    found = {name: stored[name] for name in KINDS if stored.get(name) is not None}
    odd = [f"{name} {value!r}" for name, value in found.items() if type(value) not in KINDS[name]]
    for name, kind in (("stop_strings", str), ("suppress_tokens", int)):
        value = stored.get(name) or []
        found[name] = [value] if isinstance(value, kind) else value
        fits = isinstance(found[name], list) and all(type(item) is kind and item != "" for item in found[name])
        if not fits or any(isinstance(item, int) and item < 0 for item in found[name]):
            odd.append(f"{name} {value!r}")
    if odd:
        raise ValueError(f"{path}: {', '.join(odd)[:200]} cannot be; mend the file, or leave that out")
    if stored.get("do_sample") is False:
        found["temperature"] = 0.0
    elif stored.get("do_sample"):  # what it leaves out is transformers' own then
        found = {"top_k": 50} | found
    elif not found.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        found |= USUAL
    found["top_k"] = found.get("top_k") or None  # 0: all
    sampled = {item.name: found[item.name] for item in fields(Sampling) if item.name in found}
    if problems := Sampling(**sampled).problems():
        raise ValueError(f"{path}: {'; '.join(problems).replace('--', '')}; mend the file, or leave that out")
    return found


def make_drafter(args: SpeculativeArgs, session: Session, capacity: int) -> Drafter | None:
    """What guesses ahead, where that is asked for; ValueError for a draft model with other tokens."""
    if args.lookup:
        return PromptLookup()
    if args.draft_dir is None:
        return None
    device = session.model.device
    source = resolve(args.draft_dir)
    if _tokenizer(source).vocabulary() != session.tokenizer.vocabulary():
        raise ValueError(
            f"--draft_dir {args.draft_dir}: it has other tokens than the model; name a model of the same family"
        )
    model = source.model(pick_precision(args.precision, device), device, "none").requires_grad_(False)
    fuse_linears(model, pack=not session.compiled)
    return DraftModel(Decoder(model, 1, capacity, session.compiled), session.model.config.vocab_size)
