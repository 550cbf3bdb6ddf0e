"""Which objective a configuration file of another program has, and its settings that mean
something else with it."""

from collections.abc import Mapping
from typing import Any

from litft.args.grpo import GrpoArgs
from litft.args.preference import DATA_KINDS

# settings of TRL that only one of its trainers has
SETTINGS_OF: dict[str, frozenset[str]] = {
    # generalized knowledge distillation
    "distill": frozenset({"teacher_model_name_or_path", "lmbda", "seq_kd"}),
    "grpo": frozenset(
        "num_generations reward_funcs reward_weights num_iterations scale_rewards epsilon_high "
        "mask_truncated_completions importance_sampling_level normalize_advantages "
        "reward_clip_range".split()
    ),
    "kto": frozenset({"desirable_weight", "undesirable_weight"}),
    "dpo": frozenset({"rpo_alpha"}),
}
# of GRPO: TRL's name of a setting, and ours
OF_GRPO = {"temperature": "grpo.temperature", "top_p": "grpo.top_p"}
# flags that count updates in TRL, and steps, of --grpo.updates each, here
COUNTED_IN_STEPS = (
    "train.max_steps",
    "train.warmup_steps",
    "train.log_interval",
    "eval.interval",
    "save.interval",
)
# settings of TRL's RLOO alone
OF_RLOO = frozenset({"normalize_advantages", "reward_clip_range"})
# TRL's defaults of GRPO that differ from ours
GRPO_DEFAULTS: dict[str, Any] = {"grpo.loss": "dapo", "grpo.max_new_tokens": 512}


def set_objective(
    given: dict[str, Any], entries: Mapping[str, Any], is_trl: bool, notes: list[str]
) -> None:
    """Set the objective, and give settings the name that they have with it.

    given: the values by litft's flags; entries: those of the file. is_trl: whether the file is
    TRL's.
    """
    # LLaMA-Factory names the stage, and TRL's files have settings of one trainer
    stage = entries.get("stage")
    if "objective" not in given and stage in DATA_KINDS:
        given["objective"] = stage
    # some have been given the group of our flag
    names = {name.rpartition(".")[2] for name in entries}
    for objective, settings in SETTINGS_OF.items():
        # TRL's files may name the loss of supervised data, which its GKD has, too
        is_open = given.get("objective", "sft") == "sft"
        if is_open and not settings.isdisjoint(names):
            given["objective"] = objective
    # settings that other trainers have, too
    shared = None
    if "preference.beta" in given:
        shared = "beta"
    elif "precompute_ref_log_probs" in names:
        shared = "precompute_ref_log_probs"
    if "objective" not in given and shared is not None:
        given["objective"] = "dpo"
        notes.append(
            f"{shared}: read as that of DPO; other objectives have it, "
            "too: for these set --objective orpo, kto or grpo"
        )

    objective = given.get("objective")
    if "cpo_alpha" in names and objective != "simpo":
        notes.append(
            "cpo_alpha: TRL's CPO has no reference model, and no counterpart here; DPO's loss, "
            "which is set, differs"
        )
    if objective == "distill" and not SETTINGS_OF["distill"].isdisjoint(names):
        _settle_gkd(given, entries)
    if objective == "grpo":
        _settle_grpo(given, entries, is_trl, notes)
    # the weight of the odds ratio is called beta elsewhere
    if objective == "orpo" and "preference.beta" in given:
        given["preference.orpo_lambda"] = given.pop("preference.beta")


def _settle_gkd(given: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Set the flags of TRL's GKD with its defaults: its loss has no cross-entropy, and its beta and
    length have names that mean something else here."""
    given["distill.alpha"] = 0.0
    given["distill.beta"] = given.pop("preference.beta", 0.5)
    given["distill.temperature"] = entries.get("temperature", 0.9)
    given.setdefault("distill.on_policy", 0.5)
    given["distill.max_new_tokens"] = given.pop("eval.max_new_tokens", 128)


def prompts_of(completions: int, given: Mapping[str, Any]) -> int:
    """Return the prompts of a batch of GRPO with so many completions, the size that we count."""
    return max(1, completions // given.get("grpo.group_size", GrpoArgs.group_size))


def _advantages(scale_rewards: str) -> str:
    """Return --grpo.advantages for TRL's setting, a switch or text."""
    if scale_rewards in ("false", "none"):
        return "group_mean"
    if scale_rewards == "batch":
        return "batch"
    return "group"


def _settle_grpo(
    given: dict[str, Any], entries: Mapping[str, Any], is_trl: bool, notes: list[str]
) -> None:
    """Set the flags of GRPO, whose beta, loss and temperature other objectives have, too."""
    # axolotl has them in a group
    settings = {name.rpartition(".")[2]: value for name, value in entries.items()}
    if "preference.beta" in given:
        given["grpo.beta"] = given.pop("preference.beta")
    for name, flag in OF_GRPO.items():
        if settings.get(name) is not None:
            given[flag] = settings[name]
    # TRL's RLOO has defaults of its own
    is_rloo = not OF_RLOO.isdisjoint(settings)
    if is_rloo:
        given.setdefault("grpo.beta", 0.05)
        given.setdefault("grpo.group_size", 2)
    # other programs count completions in a batch
    batch = given.get("train.global_batch_size")
    if isinstance(batch, int) and "train.global_batch_size" not in entries:
        given["train.global_batch_size"] = prompts_of(batch, given)
    # TRL's default holds for all losses
    scaling = settings.get("scale_rewards", "group" if is_trl else None)
    if scaling is not None and "grpo.advantages" not in entries:
        given["grpo.advantages"] = _advantages(str(scaling).lower())
    # one number for both limits
    if "grpo.clip_low" in given:
        given.setdefault("grpo.clip_high", given["grpo.clip_low"])
    if "reward" not in given:
        notes.append(
            "reward_funcs: name the functions with --reward, such as FILE.py:FUNCTION"
        )
    if not is_trl:
        return
    # the objective and its loss have one name
    if settings.get("loss_type") == "grpo":
        given["grpo.loss"] = "grpo"
    if settings.get("importance_sampling_level") == "sequence":
        given["grpo.loss"] = "gspo"
    for flag, value in GRPO_DEFAULTS.items():
        given.setdefault(flag, value)
    # the limit itself, where ours is its distance from 1
    if given["grpo.loss"] == "cispo" and isinstance(
        settings.get("epsilon_high"), int | float
    ):
        given["grpo.clip_high"] = settings["epsilon_high"] - 1
    if is_rloo:
        given["grpo.loss"] = "rloo"
        given.pop("grpo.advantages", None)
        notes.append(
            "RLOO: rewards are neither clipped nor normalized here; each is compared with the "
            "others of its prompt"
        )
    _count_in_steps(given, notes)


def _count_in_steps(given: dict[str, Any], notes: list[str]) -> None:
    """Divide what counts updates by the updates of a step."""
    updates = given.get("grpo.updates", 1)
    if not isinstance(updates, int) or updates < 2:
        return
    for flag in COUNTED_IN_STEPS:
        value = given.get(flag)
        if isinstance(value, int) and value > 0:
            given[flag] = max(1, round(value / updates))
    notes.append(
        f"num_iterations: steps are counted in updates there; here a step has {updates} of them, "
        "and numbers of steps are divided by it"
    )
