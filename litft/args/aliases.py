"""Flags of transformers, TRL, PEFT, litgpt, axolotl, LLaMA-Factory and unsloth, and what they are
called here."""

import math
from collections.abc import Mapping
from typing import NamedTuple, get_args

from litft.args.grpo import Losses


class Alias(NamedTuple):
    """What a flag of another program is here, such as Alias("--train.global_batch_size {value}",
    times=("gradient_accumulation_steps",))."""

    # {value} stands for the value; empty: litft needs no flag for it
    flags: str
    note: str = ""  # where the meaning differs
    # the flags for the value false; empty: none are needed
    off: str = ""
    limit: float = math.inf  # numbers from here on do not carry over
    # the flags for some values; empty: none are needed
    values: Mapping[str, str] = {}
    # the value is multiplied by that of one of these flags, if it is given, too
    times: tuple[str, ...] = ()
    # the flags for the value null; empty: none are needed
    unset: str = ""


# former names of boolean flags: the flag that has
# taken their place, and its values for true and false
FORMER_FLAGS = {
    "data.mask_reasoning": ("data.reasoning", {"true": "mask", "false": "learn"})
}

_MICRO = (
    "it changes speed and memory, never the result: a step has --train.global_batch_size examples, "
    "16 by default"
)
_GLOBAL = (
    "the examples of a step on all devices; axolotl counts packed rows instead, of several "
    "examples each"
)
MICRO_NAMES = ("micro_batch_size", "per_device_train_batch_size", "train.micro_batch_size")
_STEPS = "an interval in steps"
_FRACTION = "a fraction of the examples, not a count"
_STRATEGY = (
    "--devices 2 starts the processes; --strategy auto picks ddp, or fsdp "
    "if the model does not fit"
)
_LOAD = "the model is a folder or a hub id"
_TEMPLATES = {"tokenizer_default": "", "tokenizer_default_fallback_chatml": ""}
_DTYPES = {
    "auto": "",
    "bfloat16": "--precision bf16",
    "float16": "--precision fp16",
    "float32": "--precision fp32",
}
_SCHEDULES = {
    "constant_with_warmup": "--train.lr_schedule constant",
    "cosine_with_min_lr": "--train.lr_schedule cosine",
    "warmup_stable_decay": "--train.lr_schedule wsd",
}
_SCHEDULE_NOTE = (
    "cosine, linear, constant or wsd; they end at a tenth of the peak, or "
    "at --train.min_lr_ratio 0"
)
_ATTENTION = Alias("", "the fastest attention is chosen")
_KERNELS = Alias("", "litft's own forms are used")
_READ = Alias("", "it is read from the model's folder")
_WORKERS = Alias("", "data is tokenized once into a cache; no workers are needed")
_LOSSES = Alias(
    "--objective {value}",
    "sft, dft, dpo, ipo, simpo, orpo or kto",
    values={
        "sigmoid": "--objective dpo",
        "nll": "--objective sft",
        "grpo": "--objective grpo",
        **{loss: f"--grpo.loss {loss}" for loss in get_args(Losses)[1:]},
    },
)
_ADDED_LOSS = Alias(
    "--preference.sft_weight {value}", "the weight of the chosen answer's loss"
)
# the rates of other programs where only one of the two is given
BETAS = {"adam_beta1": "0.9", "adam_beta2": "0.999"}
_ENDS = Alias("", "the template says how answers end, and padding needs no token")

# names have underscores in place of hyphens, and no group unless it decides the meaning
ALIASES: dict[str, Alias] = {
    # model and output
    "model": Alias("--checkpoint_dir {value}", _LOAD),
    **dict.fromkeys(
        ("model_name", "model_id", "model_path", "pretrained_model_name_or_path"),
        Alias("--checkpoint_dir {value}", _LOAD),
    ),
    "model_name_or_path": Alias("--checkpoint_dir {value}", _LOAD),
    "base_model": Alias("--checkpoint_dir {value}", _LOAD),
    "adapter_name_or_path": Alias(
        "--checkpoint_dir {value}", "an adapter folder names its base"
    ),
    **dict.fromkeys(
        ("output_dir", "save_path", "save_dir", "output", "output_path"),
        Alias("--out_dir {value}"),
    ),
    "overwrite_output_dir": Alias("--overwrite"),
    "resume_from_checkpoint": Alias(
        "--resume --out_dir RUN", "a run continues from its newest checkpoint"
    ),
    "outfile": Alias("--out_dir {value}", "a folder"),
    "run_name": Alias("--out_dir out/{value}", "W&B also reads WANDB_NAME"),
    "gpu": Alias("--accelerator cuda", "several: --devices 2"),
    "model_type": _READ,
    "tokenizer_type": _READ,
    "tokens": Alias("--data.new_tokens {value}", "added to the vocabulary and trained"),
    **dict.fromkeys(
        ("new_special_tokens", "add_tokens"), Alias("--data.new_tokens {value}")
    ),
    "special_tokens": Alias(
        "--data.new_tokens {value}",
        "tokens to add; those of the model are read from its folder",
    ),
    **dict.fromkeys(
        "flash_attention flash_attn xformers_attention sdp_attention attn_implementation".split(),
        _ATTENTION,
    ),
    **dict.fromkeys(
        "liger_rope liger_rms_norm liger_glu_activation liger_layer_norm use_liger_kernel".split(),
        _KERNELS,
    ),
    **dict.fromkeys(
        "liger_fused_linear_cross_entropy cut_cross_entropy plugins".split(), _KERNELS
    ),
    **dict.fromkeys(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel unsloth_lora_mlp unsloth_lora_qkv "
        "unsloth_lora_o".split(),
        _KERNELS,
    ),
    **dict.fromkeys("pad_token bos_token eos_token unk_token".split(), _ENDS),
    **dict.fromkeys(
        "dataset_processes dataloader_num_workers dataset_num_proc num_workers num_proc "
        "preprocessing_num_workers".split(),
        _WORKERS,
    ),
    **dict.fromkeys(
        "tokenizer_use_fast is_llama_derived_model model_config_type tokenizer_config "
        "lora_fan_in_fan_out".split(),
        _READ,
    ),
    **dict.fromkeys(
        ("base_model_name", "pretrained_model"), Alias("--checkpoint_dir {value}", _LOAD)
    ),
    **dict.fromkeys(("train_data", "training_data"), Alias("--data.path {value}")),
    **dict.fromkeys(
        ("hf_token", "hub_token", "token"),
        Alias("", "the hub's token is read from HF_TOKEN"),
    ),
    **dict.fromkeys(("gpu_ids", "gpu_id"), Alias("", "set CUDA_VISIBLE_DEVICES")),
    **dict.fromkeys(("use_lora", "use_peft"), Alias("", "finetune/lora.py trains LoRA")),
    **dict.fromkeys(
        ("do_train", "do_eval"), Alias("", "a run trains, and validates what is held out")
    ),
    **dict.fromkeys(("padding_side", "add_eos_token"), _READ),
    "use_dft_loss": Alias("--objective dft"),
    "use_qlora": Alias("--quantize nf4", "with finetune/lora.py"),
    "mask_inputs": Alias("--data.mask_prompt {value}"),
    "per_device_batch_size": Alias("--train.micro_batch_size {value}", _MICRO),
    "trust_remote_code": Alias("", "a checkpoint's code is never executed"),
    "lora_model_dir": Alias("--checkpoint_dir {value}", "an adapter folder names its base"),
    "default_system_message": Alias("", "put a system message into the records"),
    "auto_resume_from_checkpoints": Alias(
        "--resume", "the newest unfinished run continues"
    ),
    "strict": Alias("", "unknown settings are always errors"),
    "debug": Alias("--dry_run", "it shows the examples as they are learned"),
    "dataset_prepared_path": Alias("", "tokenized data is cached in XDG_CACHE_HOME"),
    # data
    "datasets": Alias(
        "--data.path {value}",
        "a list whose items may have path, format, columns, weight, ...",
    ),
    "test_datasets": Alias(
        "--data.val_path {value}", "a list whose items may have path, format, columns, ..."
    ),
    "dataset": Alias("--data.path {value}", "a file, a folder or a hub id"),
    "dataset_name": Alias("--data.path {value}", "a file, a folder or a hub id"),
    "data": Alias("--data.path {value}", "a file, a folder or a hub id"),
    "train_file": Alias("--data.path {value}"),
    # text is TRL's default, and detected here
    "dataset_text_field": Alias(
        "--data.columns text={value}",
        "TRL reads it where a record has neither messages nor a prompt",
        values={"text": ""},
    ),
    "validation_file": Alias("--data.val_path {value}"),
    "eval_dataset": Alias("--data.val_path {value}"),
    "dataset_config_name": Alias("--data.subset {value}", "of a data set of the hub"),
    "dataset_config": Alias("--data.subset {value}", "of a data set of the hub"),
    **dict.fromkeys(
        ("dataset_split", "train_split", "dataset_train_split"),
        Alias("--data.split {value}", "of a data set of the hub"),
    ),
    "dataset_test_split": Alias(
        "--data.val_path VALUE", "a split of a data set of the hub: owner/name:test"
    ),
    "show": Alias(
        "--dry_run", "it shows examples; scripts/prepare_data.py --show 5 shows more"
    ),
    "budget": Alias(
        "", "scripts/plan.py --budget 24GB chooses settings for a GPU's memory"
    ),
    "max_samples": Alias("--data.limit {value}", "the first records of each path"),
    "max_train_samples": Alias("--data.limit {value}", "the first records of each path"),
    "val_set_size": Alias("--data.val_fraction {value}", _FRACTION, limit=1),
    **dict.fromkeys(
        ("val_size", "test_size", "test_split_size"),
        Alias("--data.val_fraction {value}", _FRACTION, limit=1),
    ),
    "val_split_fraction": Alias("--data.val_fraction {value}"),
    "cutoff_len": Alias("--data.max_seq_length {value}"),
    **dict.fromkeys(
        ("max_length", "seq_len", "max_seq_len"), Alias("--data.max_seq_length {value}")
    ),
    "sequence_len": Alias("--data.max_seq_length {value}"),
    "model_max_length": Alias("--data.max_seq_length {value}"),
    "sample_packing": Alias(
        "--data.packing {value}",
        "it is on by default; packed examples do not attend to each other",
    ),
    "chat_template": Alias(
        "--data.template {value}", "the checkpoint's own is the default", values=_TEMPLATES
    ),
    "chat_template_jinja": Alias("--data.template FILE.jinja", "a file with the template"),
    "pad_to_sequence_len": Alias("", "rows are as long as the examples packed into them"),
    "excess_length_strategy": Alias("", "longer examples are cut; their number is said"),
    "group_by_length": Alias("", "examples are packed, so their lengths do not matter"),
    "dataset_exact_deduplication": Alias(
        "--data.dedup {value}",
        "near leaves out nearly equal ones, too",
        values={"true": "--data.dedup exact", "false": ""},
    ),
    "shuffle_merged_datasets": Alias("", "examples are always shuffled"),
    "prompt_style": Alias("--data.template {value}"),
    "train_on_inputs": Alias(
        "--data.mask_prompt false",
        "then prompts are learned too",
        "--data.mask_prompt true",
    ),
    "completion_only_loss": Alias("--data.mask_prompt {value}", "it is on by default"),
    "assistant_only_loss": Alias("--data.mask_prompt {value}", "it is on by default"),
    "train_on_prompt": Alias("--data.mask_prompt false", "then prompts are learned too"),
    "mask_history": Alias("--data.train_on last"),
    # steps and batches
    "num_train_epochs": Alias("--train.epochs {value}"),
    "num_epochs": Alias("--train.epochs {value}"),
    "per_device_train_batch_size": Alias("--train.micro_batch_size {value}", _MICRO),
    **dict.fromkeys(
        ("batch_size", "train_batch_size"),
        Alias("--train.global_batch_size {value}", "the examples of a step on all devices"),
    ),
    "gradient_accumulation_steps": Alias(
        "--train.global_batch_size {value}", _GLOBAL, times=MICRO_NAMES
    ),
    "gradient_accumulation_iters": Alias(
        "--train.global_batch_size {value}", _GLOBAL, times=MICRO_NAMES
    ),
    "eval_steps": Alias("--eval.interval {value}", _STEPS),
    "eval_strategy": Alias("--eval.interval N", _STEPS),
    "evals_per_epoch": Alias("--eval.interval N", _STEPS),
    "saves_per_epoch": Alias("--save.interval N", _STEPS),
    "save_steps": Alias("--save.interval {value}", _STEPS),
    "train.save_interval": Alias("--save.interval {value}", _STEPS),
    "save_strategy": Alias("--save.interval N", _STEPS),
    "save_total_limit": Alias("--save.keep_last {value}"),
    **dict.fromkeys(
        ("load_best_model", "load_best_model_at_end"),
        Alias("--save.best", "the best weights are written to best/"),
    ),
    "logging_steps": Alias("--train.log_interval {value}"),
    "early_stopping_patience": Alias(
        "--eval.patience {value}", "validations without a new lowest loss"
    ),
    "report_to": Alias("--logger {value}", values={"none": "", "all": ""}),
    "wandb_project": Alias("--logger wandb --logger_project {value}"),
    "wandb_name": Alias("", "W&B reads WANDB_NAME"),
    "wandb_entity": Alias("", "W&B reads WANDB_ENTITY"),
    "wandb_watch": Alias("", "the gradient norm is logged"),
    "wandb_log_model": Alias("", "scripts/upload.py pushes to the hub"),
    "use_wandb": Alias("--logger wandb"),
    "use_tensorboard": Alias("--logger tensorboard"),
    "use_mlflow": Alias("--logger mlflow"),
    "mlflow_experiment_name": Alias("--logger mlflow --logger_project {value}"),
    "hub_model_id": Alias("", "scripts/upload.py pushes to the hub after training"),
    "push_to_hub": Alias("", "scripts/upload.py pushes to the hub after training"),
    # optimization
    "lr": Alias("--train.learning_rate {value}"),
    **dict.fromkeys(
        ("lr_scheduler", "lr_scheduler_type", "scheduler"),
        Alias("--train.lr_schedule {value}", _SCHEDULE_NOTE, values=_SCHEDULES),
    ),
    "warmup_ratio": Alias("--train.warmup_fraction {value}"),
    **dict.fromkeys(("num_warmup_steps", "warmup"), Alias("--train.warmup_steps {value}")),
    "adam_beta1": Alias("--train.betas {value},{adam_beta2}", "both rates together"),
    "adam_beta2": Alias("--train.betas {adam_beta1},{value}", "both rates together"),
    "adam_epsilon": Alias("--train.eps {value}"),
    "cosine_min_lr_ratio": Alias("--train.min_lr_ratio {value}"),
    "min_lr_rate": Alias("--train.min_lr_ratio {value}"),
    "min_lr": Alias("--train.min_lr_ratio R", "a fraction of the peak learning rate"),
    "optim": Alias(
        "--train.optimizer {value}",
        "adamw, adamw_8bit, lion, adafactor, muon, sgd, schedule_free",
    ),
    "max_norm": Alias("--train.max_grad_norm {value}", unset="--train.max_grad_norm 0"),
    # litgpt's
    "lr_warmup_steps": Alias("--train.warmup_steps {value}"),
    "train.max_seq_length": Alias("--data.max_seq_length {value}"),
    "optimizer.init_args.weight_decay": Alias("--train.weight_decay {value}"),
    "optimizer.init_args.betas": Alias("--train.betas {value}"),
    "data.init_args.mask_prompt": Alias(
        "--data.mask_prompt true", "", "--data.mask_prompt false"
    ),
    "data.init_args.val_split_fraction": Alias("--data.val_fraction {value}"),
    "data.init_args.json_path": Alias("--data.path {value}"),
    **dict.fromkeys(
        "lora_query lora_key lora_value lora_projection lora_mlp lora_head".split(),
        Alias("--lora.targets NAMES", "q_proj,k_proj,v_proj,o_proj,*.mlp.*,lm_head"),
    ),
    "enable_thinking": Alias(
        "--data.template_args enable_thinking=true",
        "",
        "--data.template_args enable_thinking=false",
    ),
    "gradient_clipping": Alias("--train.max_grad_norm {value}"),
    **dict.fromkeys(
        ("neftune_noise_alpha", "noisy_embedding_alpha"),
        Alias("--train.neftune_alpha {value}"),
    ),
    "finetuning_type": Alias("", "the command says the method: finetune/lora.py, full.py"),
    **dict.fromkeys(
        ("freeze_vision_tower", "freeze_multi_modal_projector"),
        Alias("", "the language model alone is trained"),
    ),
    "label_smoothing_factor": Alias("--train.label_smoothing {value}"),
    "gradient_checkpointing": Alias(
        "--train.activation_checkpointing full",
        "auto recomputes no more than memory needs",
        "--train.activation_checkpointing none",
    ),
    "torch_compile": Alias("--train.compile {value}", "it is on by default on a GPU"),
    # LoRA
    "lora_rank": Alias("--lora.r {value}"),
    "lora_target": Alias(
        "--lora.targets {value}",
        "names separated by commas, or all-linear",
        values={"all": "--lora.targets all-linear"},
    ),
    "lora_target_linear": Alias("--lora.targets all-linear"),
    "peft_layers_to_transform": Alias(
        "--lora.targets NAMES", "patterns may name layers: blocks.1?.mlp.*"
    ),
    "unfrozen_parameters": Alias(
        "--train.freeze NAMES", "patterns of what is frozen instead: blocks.0.*"
    ),
    "lora_target_modules": Alias(
        "--lora.targets {value}", "names separated by commas, or all-linear"
    ),
    "target_modules": Alias(
        "--lora.targets {value}", "names separated by commas, or all-linear"
    ),
    "use_rslora": Alias("--lora.rslora"),
    "additional_target": Alias("--lora.modules_to_save {value}"),
    "use_dora": Alias("--lora.dora"),
    "peft_use_dora": Alias("--lora.dora"),
    "peft_use_rslora": Alias("--lora.rslora"),
    "rank": Alias("--lora.r {value}"),
    "adapter": Alias(
        "",
        "the command says the method: finetune/lora.py",
        values={"qlora": "--quantize nf4"},
    ),
    "pissa_init": Alias("--lora.init pissa"),
    **dict.fromkeys(
        ("init_lora_weights", "peft_init_lora_weights"),
        Alias("--lora.init {value}", "default, pissa or olora"),
    ),
    "loraplus_lr_ratio": Alias("--lora.lr_ratio {value}"),
    # precision, memory and devices
    "bf16": Alias(
        "--precision bf16",
        "the default on a GPU that has bf16 arithmetic",
        "--precision fp32",
        values={"auto": ""},
    ),
    "fp16": Alias("--precision fp16", values={"auto": ""}),
    **dict.fromkeys(
        ("dtype", "torch_dtype"),
        Alias("--precision {value}", "bf16, fp16 or fp32", values=_DTYPES),
    ),
    "bfloat16": Alias(
        "--precision bf16",
        "the default on a GPU that has bf16 arithmetic",
        "--precision fp32",
    ),
    "tf32": Alias("", "fp32 stays fp32; frozen weights are bf16"),
    "load_in_4bit": Alias("--quantize nf4"),
    **dict.fromkeys(
        "double_quantization use_bnb_nested_quant bnb_4bit_use_double_quant".split(),
        Alias("", "--quantize nf4-dq quantizes the scales, too"),
    ),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "quantization_type"), Alias("--quantize {value}")
    ),
    "load_in_8bit": Alias("--quantize int8"),
    "quantization_bit": Alias(
        "--quantize nf4-dq",
        "or int8",
        values={"4": "--quantize nf4-dq", "8": "--quantize int8"},
    ),
    "qlora": Alias("--quantize nf4"),
    "fsdp": Alias("--strategy fsdp", _STRATEGY),
    "ddp": Alias("--strategy ddp", _STRATEGY),
    "deepspeed": Alias("--strategy fsdp", _STRATEGY),
    "fsdp_version": Alias("", "it is FSDP2"),
    "fsdp_config": Alias("", "--strategy fsdp needs no settings"),
    "fsdp_offload_params": Alias("--train.cpu_offload parameters"),
    "eval_sample_packing": Alias("", "validation is packed, too"),
    "use_reentrant": Alias("", "recomputation needs no settings"),
    "mlflow_tracking_uri": Alias("", "MLflow reads MLFLOW_TRACKING_URI"),
    "wandb_run_id": Alias("", "W&B reads WANDB_RUN_ID"),
    "local_rank": Alias("", "the processes set it"),
    "ddp_timeout": Alias("", "a lost process is noticed"),
    "context_parallel_size": Alias(
        "", "sequences are not divided over devices; shorter ones fit with packing"
    ),
    "num_processes": Alias("--devices {value}"),
    **dict.fromkeys(
        ("gpus", "num_gpus", "n_gpu", "n_gpus", "nproc_per_node", "world_size"),
        Alias("--devices {value}"),
    ),
    # preferences
    "rl": Alias("--objective {value}", "dpo, ipo, simpo, orpo or kto"),
    **dict.fromkeys(
        ("pref_beta", "rl_beta", "dpo_beta", "trl.beta"), Alias("--preference.beta {value}")
    ),
    "pref_loss": _LOSSES,
    "loss_type": _LOSSES,
    "teacher_model_name_or_path": Alias("--teacher {value}"),
    "teacher_model_init_kwargs": _READ,
    "lmbda": Alias("--distill.on_policy {value}"),
    "kd_trainer": Alias("--objective distill"),
    "kd_ce_alpha": Alias("--distill.alpha {value}", "the weight of the cross-entropy"),
    "kd_alpha": Alias("", "the divergence has the weight 1 - distill.alpha"),
    "kd_temperature": Alias("--distill.temperature {value}"),
    "kd_beta": Alias("--distill.beta {value}"),
    "stage": Alias(
        "--objective VALUE", "dpo or kto", values={"sft": "", "dpo": "--objective dpo"}
    ),
    "dpo_label_smoothing": Alias("--preference.label_smoothing {value}"),
    "pref_ftx": _ADDED_LOSS,
    "rpo_alpha": _ADDED_LOSS,
    "cpo_alpha": _ADDED_LOSS,
    "orpo_alpha": Alias("--preference.orpo_lambda {value}"),
    **dict.fromkeys(
        ("kto_chosen_weight", "kto_desirable_weight"),
        Alias("--preference.desirable_weight {value}"),
    ),
    **dict.fromkeys(
        ("kto_rejected_weight", "kto_undesirable_weight"),
        Alias("--preference.undesirable_weight {value}"),
    ),
    "simpo_gamma": Alias("--preference.gamma {value}"),
    # rewards
    "num_generations": Alias("--grpo.group_size {value}"),
    "max_completion_length": Alias("--grpo.max_new_tokens {value}", "of GRPO"),
    "epsilon": Alias("--grpo.clip_low {value}"),
    "epsilon_high": Alias("--grpo.clip_high {value}"),
    "num_iterations": Alias("--grpo.updates {value}"),
    "mask_truncated_completions": Alias("--grpo.mask_truncated"),
    "reward_funcs": Alias("--reward VALUE", "names, or FILE.py:FUNCTION"),
    **dict.fromkeys(
        ("top_k", "min_p", "repetition_penalty"), Alias("", "GRPO samples without it")
    ),
    "reward_weights": Alias("--reward VALUE", "a weight is a part of it: NAME=0.3"),
    "scale_rewards": Alias(
        "",
        "--grpo.advantages says it",
        "--grpo.advantages group_mean",
        values={"group": ""},
    ),
    "precompute_ref_log_probs": Alias(
        "", "the reference is always computed before the first step"
    ),
}


# Lightning's name of a precision -> (our name in full.py, our name in the other methods); a text
# with spaces is an error
LIGHTNING: dict[str, tuple[str, str]] = {
    "32": ("fp32", "fp32"),
    "32-true": ("fp32", "fp32"),
    "bf16-mixed": (
        "bf16",
        "there is no mixed precision with frozen weights: they are bf16 as well; pass bf16",
    ),
    "bf16-true": ("bf16-true", "bf16"),  # trained parameters stay fp32
    "16-mixed": ("fp16", "fp16"),
    "16-true": (
        "there is no training of fp16 weights; pass fp16, which keeps trained weights in fp32",
        "fp16",  # trained parameters stay fp32
    ),
}


def translate_precision(value: str, is_full: bool) -> str:
    """Return our name of a precision that may be Lightning's; raise ValueError for one that has no
    counterpart."""
    # full fine-tuning has the first name of a pair, the other methods the second
    ours = LIGHTNING.get(value, (value, value))[not is_full]
    if value in LIGHTNING and " " in ours:
        raise ValueError(f"--precision {value}: {ours}")
    return ours


def hint_for_flag(
    name: str, value: str | None, given: Mapping[str, str | None] = {}
) -> str | None:
    """Return what another program's flag is here, with its value carried over; None for an unknown
    name.

    given: the values of all flags that are given together.
    """
    translation = translate_flag(name, value, given)
    if translation is None:
        return None
    flags, note = translation
    return f"--{name} does not exist; {f'here it is {flags}' if flags else 'leave it out'}{note}"


def translate_flag(
    name: str, value: str | None, given: Mapping[str, str | None] = {}
) -> tuple[str, str] | None:
    """Return (flags, note in parentheses) for another program's flag, "" for flags that are not
    needed; None if unknown."""
    # people also type a group in front, as in --train.lr
    alias = ALIASES.get(name.replace("-", "_")) or ALIASES.get(
        name.rpartition(".")[2].replace("-", "_")
    )
    if alias is None:
        return None
    # null or nothing: it was not set, and mostly needs no counterpart
    if value in ("null", "", "[]", "{}"):
        return alias.unset, ""
    # a switch that is off: the flags that turn it off here, often none
    if (value or "").lower() in ("false", "no", "off") and (
        "{value}" not in alias.flags or alias.off
    ):
        return alias.off, ""
    if value is not None and value in alias.values:
        return alias.values[value], ""
    # other programs multiply two flags to what is one number here
    if alias.times:
        factor = next((given[other] for other in alias.times if given.get(other)), None)
        if value and factor and value.isdigit() and factor.isdigit():
            value = str(int(value) * int(factor))
        else:
            value = "N"
    # a number from the limit on means a count instead of a fraction
    if value and value.replace(".", "", 1).isdigit() and float(value) >= alias.limit:
        value = None
    # both rates are one flag here, so the one that is missing gets its default there
    betas = {beta: given.get(beta) or default for beta, default in BETAS.items()}
    flags = alias.flags.format(value="VALUE" if value is None else value, **betas)
    note = f" ({alias.note})" if alias.note else ""
    return flags, note


def translate_optimizer(value: str) -> str:
    """Return our name of an optimizer that transformers also has, or the value itself."""
    return HF_OPTIMIZER_NAMES.get(value, value)


HF_OPTIMIZER_NAMES = {  # names of transformers, and ours
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
    "lion_32bit": "lion",
    "schedule_free_adamw": "schedule_free",
}
