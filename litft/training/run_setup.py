"""What a run is, resolved once from its flags and its model folder."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from litft.args import FinetuneArgs
from litft.checkpoints.adapter_reader import adapter_digest
from litft.data.dataset import DataSplits
from litft.data.digests import file_hash
from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import pick_full_precision, pick_precision
from litft.evaluation.rewards.reward import Reward
from litft.families import fits_fp16
from litft.methods import AdapterTensors, Method, method_of
from litft.methods.base import pattern_matches
from litft.methods.new_tokens import untrained_ids
from litft.model.config import Config
from litft.model.mlp import CONSTANTS
from litft.pretrained.folder import PretrainedFolder, fingerprint, resolve
from litft.training.objectives import Objective, objective_of
from litft.training.usual_rates import default_lora_rate


@dataclass(frozen=True)
class RunSetup:
    """What a run is: its flags, model folder, tokenizer, method and objective.

    `resolve_setup` makes it, and nothing changes it later: what is known only then makes a copy
    (`with_tokenizer_of`, and `_train` of commands/finetune.py where a launcher restarts the run).

    Flags that the user left open are decided by those who know enough: the learning rate and beta
    here; the length of samples by `load_data`; epochs and the rows of a micro-batch by `Schedule`;
    strategy, precision and recomputation by `plan_run`, which writes them into `DeviceSettings`;
    intervals of validations, checkpoints and lines by `Trainer`.
    """

    args: FinetuneArgs
    source: PretrainedFolder
    objective: Objective
    tokenizer: Tokenizer
    # a new one, or that of the adapter that training continues from
    method: Method
    # the values of that adapter
    initial_values: AdapterTensors | None
    quantize: str  # the kind, or "none"
    teacher: PretrainedFolder | None = None  # of --objective distill

    def with_tokenizer_of(self, data: DataSplits) -> "RunSetup":
        """Return the setup with the tokenizer and the date of the data."""
        args = self.args
        # a resumed run keeps the date of its first day
        if data.tokenizer.day:
            args = dataclasses.replace(
                args, data=dataclasses.replace(args.data, date=data.tokenizer.day)
            )
        return dataclasses.replace(self, args=args, tokenizer=data.tokenizer)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the method's parameters, by name."""
        parameters = _meta_parameters(self.method, self.source)
        return {name: tuple(parameter.shape) for name, parameter in parameters.items()}

    def precision(self, device: torch.device, shards: int = 1) -> str:
        """Return --precision; for `auto`, of full fine-tuning, bf16 if its fp32 weights fit on one
        device of `shards`, else bf16-true."""
        in_range = self.fp16_problem(sharded=shards > 1) is None
        if not self.method.saves_full_model:
            return pick_precision(self.args.precision, device, in_range)
        size = sum(p.numel() for p in self.source.outline.parameters())
        return pick_full_precision(self.args.precision, device, size // shards, in_range)

    def fp16_problem(self, sharded: bool) -> str | None:
        """Return why this run does not work in fp16, of which `auto` takes account; None if it
        does. sharded: whether each device holds a part of the weights."""
        models = [self.source] if self.teacher is None else [self.source, self.teacher]
        for model in models:
            if not fits_fp16(model.config):
                model_type = model.config.model_type
                return f"activations of {model_type} models are beyond the range of fp16"
        if self.args.train.optimizer_in_backward:
            return (
                "--train.optimizer_in_backward steps weights before all gradients are known"
            )
        if sharded:
            return "sharded weights (FSDP) would skip updates on some of the devices alone"
        return None

    def untrained_tokens(self, special: set[int]) -> list[str]:
        """Return the texts of special tokens of the data whose embedding is untrained in the base,
        and is not trained now.

        special: the special tokens that occur in the data.
        """
        base_tokens = special - self.method.tokens.keys()
        trains_embedding = (
            "embed.weight" in self.shapes() and "embed.weight" not in self.method.frozen
        )
        if trains_embedding or not base_tokens:
            return []
        table = self.source.tensor("embed.weight")
        return [
            self.tokenizer.decode([token], skip_special=False)
            for token in untrained_ids(table, base_tokens)
        ]

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of one prompt share its computation in a training pass."""
        is_plain = not self.args.train.neftune_alpha
        return (
            self.args.objective == "grpo"
            and is_plain
            and self.source.config.can_share_prompts
        )

    @cached_property
    def identity_of_folders(self) -> dict[str, str | None]:
        """What identifies the model folders, read once, since every checkpoint has it."""
        adapter = self.source.adapter
        facts = {
            "base model": fingerprint(self.source.checkpoint),
            "config.json of the base": _config_hash(self.source),
            "adapter": adapter_digest(adapter) if adapter else None,
        }
        if self.teacher is not None:
            facts["teacher"] = fingerprint(self.teacher.checkpoint)
            facts["config.json of the teacher"] = _config_hash(self.teacher)
            if self.teacher.adapter:
                facts["teacher's adapter"] = adapter_digest(self.teacher.adapter)
        return facts


def _config_hash(source: PretrainedFolder) -> str | None:
    """Return the hash of a base's config.json; None if there is no file."""
    path = source.base / "config.json"
    if path.is_file():
        return file_hash(path)
    return None


def resolve_setup(
    args: FinetuneArgs, source: PretrainedFolder, rewards: Sequence[Reward] = ()
) -> RunSetup:
    """Return what the flags and the model's folder stand for; raise ValueError for combinations
    that cannot be. rewards: functions in place of those of --reward."""
    quantize = source.quantization(args.quantize) or "none"
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it"
        )

    # the method, with its tokens, and what of it is not trained
    method, initial_values = _method(args, source)
    if initial_values is None:
        method.tokens = tokenizer.add_tokens(args.data.new_tokens)
        method.check_tokens()
        _check_per_layer_table(source.config, method)
    else:
        _check_tokens_of_adapter(args, tokenizer, method)
    method.frozen = _frozen(args, source, method)
    teacher = _teacher(args, tokenizer)
    if teacher is not None:
        args = _with_top_k(
            args, method.vocab_size(source.config), teacher.config.vocab_size
        )
    objective = objective_of(args, rewards)
    args = _with_defaults(args, objective, source)
    if method.saves_full_model and quantize != "none":
        raise ValueError(
            f"{source.base} is quantized, and full fine-tuning changes every weight; use "
            "finetune/lora.py"
        )
    return RunSetup(
        args=args,
        source=source,
        objective=objective,
        tokenizer=tokenizer,
        method=method,
        initial_values=initial_values,
        quantize=quantize,
        teacher=teacher,
    )


def _with_top_k(args: FinetuneArgs, *vocab_sizes: int) -> FinetuneArgs:
    """Return the flags with as many tokens of a teacher as teacher and student have."""
    top_k = min(args.distill.top_k, *vocab_sizes)
    return dataclasses.replace(args, distill=dataclasses.replace(args.distill, top_k=top_k))


def _teacher(args: FinetuneArgs, tokenizer: Tokenizer) -> PretrainedFolder | None:
    """Return the folder of the teacher; raise ValueError if its vocabulary is another one. None
    without --teacher."""
    if args.teacher is None:
        return None
    try:
        teacher = resolve(args.teacher, args.distill.teacher_base_dir)
    except ValueError as error:
        raise ValueError(
            str(error).replace("--base_dir", "--distill.teacher_base_dir")
        ) from None
    teacher.check()
    own = teacher.tokenizer()
    if own is None:
        raise ValueError(
            f"--teacher {args.teacher} has no tokenizer, so its vocabulary cannot be compared; "
            "copy tokenizer.json into it"
        )
    others = own.vocabulary()
    for text, token in tokenizer.vocabulary().items():
        if others.get(text) != token:
            of_teacher = "no token" if text not in others else f"token {others[text]}"
            raise ValueError(
                f"--teacher {args.teacher}: its vocabulary differs from the student's: {text!r} is "
                f"token {token} of the student and {of_teacher} of the teacher; name a teacher of "
                "the same family"
            )
    return teacher


def default_rate(
    args: FinetuneArgs, objective: Objective, source: PretrainedFolder
) -> float:
    """Return the learning rate of a run without --train.learning_rate."""
    method = method_of(args).name
    if method == "lora":
        by_width = default_lora_rate(args, source.config)
        if by_width is not None:
            return by_width
    return objective.learning_rate(method, args.default_learning_rate)


def _with_defaults(
    args: FinetuneArgs, objective: Objective, source: PretrainedFolder
) -> FinetuneArgs:
    """Return the flags with the defaults that depend on objective, method and model."""
    if args.train.learning_rate is None:
        rate = default_rate(args, objective, source)
        args = dataclasses.replace(
            args, train=dataclasses.replace(args.train, learning_rate=rate)
        )
    return dataclasses.replace(
        args, preference=dataclasses.replace(args.preference, beta=objective.beta_or_none)
    )


def _method(
    args: FinetuneArgs, source: PretrainedFolder
) -> tuple[Method, AdapterTensors | None]:
    """Return the method, and the values of the adapter that training continues from."""
    method = method_of(args)

    # a new method
    adapter = source.read_adapter()
    if adapter is None:
        method.select_targets(source.outline, source.adapter_rules)
        return method, None
    saved_method, values = adapter

    # the method of the adapter that training continues from
    if type(saved_method) is not type(method):
        reason = f"{source.adapter} is an adapter of another method ({saved_method.title})"
        remedy = _merge_remedy(source, saved_method, values)
        raise ValueError(f"{reason}, which {method.title} cannot go on with; {remedy}")
    # values that the adapter's tensors have fixed
    default = type(method.args)()
    fixed = []
    for item in dataclasses.fields(method.args):
        is_changed = getattr(method.args, item.name) != getattr(default, item.name)
        if is_changed and item.name not in method.changeable:
            fixed.append(f"--{method.name}.{item.name}")
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)}: an adapter goes on with its own; leave them out, or merge it "
            "first"
        )
    saved_method.update_args(method.args)
    return adapter


def _merge_remedy(source: PretrainedFolder, method: Method, values: AdapterTensors) -> str:
    """Return the advice for a user who wants another method on top of this adapter."""
    try:
        method.check_merge([name for name, _ in source.outline.named_parameters()], values)
    except ValueError:
        return f"it cannot be merged, so begin with its base, {source.base}"
    return f"merge it first: python scripts/merge_lora.py --checkpoint_dir {source.adapter}"


def _check_per_layer_table(config: Config, method: Method) -> None:
    """Raise ValueError for new tokens that a table of per-layer embeddings lacks: other programs
    extend it with values of their own."""
    is_beyond = any(token >= config.per_layer_vocab_size for token in method.tokens)
    if config.per_layer_dim and is_beyond:
        reason = (
            f"{config.model_type} has a second table of {config.per_layer_vocab_size:,} tokens, to "
            "which other programs add rows of their own, so the result would differ there"
        )
        raise ValueError(
            f"--data.new_tokens: {reason}; write the tokens as text, or name unused ones of the "
            "tokenizer"
        )


def _check_tokens_of_adapter(
    args: FinetuneArgs, tokenizer: Tokenizer, method: Method
) -> None:
    """Raise ValueError for new tokens that an adapter does not have: it keeps its own, and takes no
    others."""
    for text in args.data.new_tokens:
        if tokenizer.token_id(text) not in method.tokens:
            reason = "an adapter goes on with the tokens that it has"
            raise ValueError(
                f"--data.new_tokens {text!r}: {reason}; merge it first to add others"
            )


def _frozen(args: FinetuneArgs, source: PretrainedFolder, method: Method) -> set[str]:
    """Return the parameters that --train.freeze names, and constants, which are parameters of the
    network only because its files have them; raise ValueError for a pattern that matches none."""
    parameters = _meta_parameters(method, source)
    names = []
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            names.append(name)
    constants = set()
    for name in parameters:
        if name.endswith(CONSTANTS):
            constants.add(name)
    if not args.train.freeze:
        return constants

    # patterns of the user, on top of the constants
    stored_names = _stored_names(source)
    frozen: set[str] = set()
    for pattern in args.train.freeze:
        matches = set()
        for name in names:
            if _is_named(name, pattern, stored_names):
                matches.add(name)
        if not matches:
            raise ValueError(
                f"--train.freeze {pattern}: nothing that is trained has that name, such as "
                f"{names[0]}"
            )
        frozen |= matches
    if frozen == set(names):
        raise ValueError(
            f"--train.freeze {','.join(args.train.freeze)}: nothing is left to train"
        )
    return frozen | constants


def _is_named(name: str, pattern: str, stored_names: Mapping[str, list[str]]) -> bool:
    """Return whether a pattern matches a parameter's name, in litft or in the checkpoint."""
    module, _, leaf = name.rpartition(".")
    if pattern_matches(pattern, name, module):
        return True
    for stored_module in stored_names.get(module, []):
        if pattern_matches(pattern, f"{stored_module}.{leaf}", stored_module):
            return True
    return False


def _stored_names(source: PretrainedFolder) -> dict[str, list[str]]:
    """Return the names in the checkpoint of each module of the base with a weight, and of those
    that only contain others, such as attention, to which a method may add parameters."""
    names: dict[str, list[str]] = {}
    of_parents: dict[str, list[str]] = {}
    for mapping in source.checked_mappings:
        modules = [stored.rpartition(".")[0] for stored in mapping.sources]
        parents = [module.rpartition(".")[0] for module in modules]
        for target in mapping.targets:
            module, _, leaf = target.rpartition(".")
            if leaf != "weight":
                continue
            names.setdefault(module, []).extend(modules)
            of_parents.setdefault(module.rpartition(".")[0], []).extend(parents)
    return of_parents | names


def _meta_parameters(method: Method, source: PretrainedFolder) -> dict[str, nn.Parameter]:
    """Return the method's parameters by name, on the meta device."""
    model = source.meta_model()
    method.attach(model)
    return method.parameters(model)
