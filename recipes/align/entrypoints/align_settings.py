"""Define the settings of dpo, orpo, kto, reward and grpo, and check them before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ekiben_tasks.models.lora import Lora, check_lora
from ekiben_tasks.task import trackers
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Settings:
    """Define the settings that all of these tasks have."""

    NAME: ClassVar[str] = ""
    DATA: ClassVar[Literal["pairs", "labels", "prompts"]] = "pairs"

    model: str = option("cyberagent/open-calm-3b", "base model: a hub id, ID@REVISION, or a local folder")
    method: Literal["lora", "full"] = option("lora", "trained weights: an adapter, or all")
    data: object = option("sample", "hub data sets, folders or files; sample: the recipe's own; --data")
    lora: Lora = field(default_factory=Lora)
    bits: Literal[16, 8, 4] = option(
        16, "bits of a frozen weight under an adapter; 8 and 4, by bitsandbytes, need a GPU"
    )
    epochs: float = option(1.0, "times through the data; 0.5: half of it")
    max_steps: int = option(0, "stop after this number of steps; 0: at the end of the epochs")
    batch_size: int = option(16, "examples (grpo: completions) of one step, over all GPUs")
    micro_batch: int = option(2, "examples (grpo: completions) at a time on each GPU")
    learning_rate: float = option(1e-5, "highest learning rate")
    schedule: Literal["linear", "cosine", "constant"] = option("linear", "decay of the learning rate after the warm-up")
    warmup_steps: int = option(0, "steps until the highest learning rate")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    max_grad_norm: float = option(1.0, "gradients of a larger norm are clipped to this")
    max_length: int = option(1024, "tokens of prompt and completion; what is longer is cut at the end, and counted")
    gradient_checkpointing: bool = option(True, "compute activations twice, and keep few of them")
    save_steps: int = option(100, "steps between checkpoints")
    save_total_limit: int = option(2, "number of newest checkpoints to keep")
    log_steps: int = option(1, "steps between lines of metrics.jsonl")
    tracker: str | tuple[str, ...] = option("none", trackers.HELP)
    seed: int = option(42, "seed of the order of the examples and of new weights")
    model_checksum: bool = option(True, "record the SHA-256 of a local model's files")
    hang_minutes: float = option(30, "longest time of a step in minutes, after which the run ends; 0: an hour")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU; cpu: the CPU, which is slow")

    def trl_options(self) -> dict[str, Any]:
        """Return the arguments of TRL's configuration that this method alone has."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """Return what is wrong with the settings of this method alone."""
        return []


@dataclass(frozen=True)
class DpoSettings(Settings):
    """Define the settings of `dpo`."""

    NAME = "dpo"

    beta: float = option(0.1, "weight of the distance from the first model; larger: it stays closer")
    loss_type: tuple[str, ...] = option(("sigmoid",), "TRL's losses: sigmoid, ipo, hinge, robust, …; several are added")
    label_smoothing: float = option(0.0, "share of pairs that may be the wrong way round")

    def trl_options(self) -> dict[str, Any]:
        """Return beta, loss_type and label_smoothing."""
        return {"beta": self.beta, "loss_type": list(self.loss_type), "label_smoothing": self.label_smoothing}


@dataclass(frozen=True)
class OrpoSettings(Settings):
    """Define the settings of `orpo`."""

    NAME = "orpo"

    beta: float = option(0.1, "weight of the odds ratio beside the likelihood of the chosen answer")

    def trl_options(self) -> dict[str, Any]:
        """Return beta."""
        return {"beta": self.beta}


@dataclass(frozen=True)
class KtoSettings(Settings):
    """Define the settings of `kto`."""

    NAME = "kto"
    DATA = "labels"

    beta: float = option(0.1, "weight of the distance from the first model; larger: it stays closer")
    desirable_weight: float = option(1.0, "weight of examples with label true")
    undesirable_weight: float = option(1.0, "weight of examples with label false")

    def trl_options(self) -> dict[str, Any]:
        """Return beta and the two weights."""
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        return {"beta": self.beta, **weights}

    def problems(self) -> list[str]:
        """Return a problem for micro-batches of one: each completion is compared with another one's prompt."""
        return [] if self.micro_batch > 1 else ["setting micro_batch: must be at least 2 for kto"]


@dataclass(frozen=True)
class RewardSettings(Settings):
    """Define the settings of `reward`."""

    NAME = "reward"

    center_rewards: float = option(0.0, "weight of a term that keeps the mean reward near 0")

    def trl_options(self) -> dict[str, Any]:
        """Return center_rewards as TRL names it."""
        return {"center_rewards_coefficient": self.center_rewards or None}


@dataclass(frozen=True)
class GrpoSettings(Settings):
    """Define the settings of `grpo`."""

    NAME = "grpo"
    DATA = "prompts"

    rewards: tuple[str, ...] = option(
        ("sample",), "each FILE.py:FUNCTION, as TRL calls it, or a reward model; sample: the recipe's own function"
    )
    reward_weights: tuple[float, ...] = option((), "a weight for each reward; empty: all the same")
    num_generations: int = option(8, "completions of each prompt, which are compared")
    max_new_tokens: int = option(256, "tokens of the longest completion")
    temperature: float = option(1.0, "sampling temperature")
    beta: float = option(0.0, "weight of the distance from the first model; 0: none, and no second model")

    def trl_options(self) -> dict[str, Any]:
        """Return the settings of the generation and of the loss."""
        return {
            "num_generations": self.num_generations,
            "max_completion_length": self.max_new_tokens,
            "temperature": self.temperature,
            "beta": self.beta,
            "reward_weights": list(self.reward_weights) or None,
        }

    def problems(self) -> list[str]:
        """Return what is wrong with the rewards, and with the completions of a step."""
        problems = []
        if self.num_generations < 2:
            problems.append(f"setting num_generations: must be at least 2, not {self.num_generations}")
        elif self.batch_size % self.num_generations:
            problems.append(
                f"setting batch_size: {self.batch_size} completions are no multiple of num_generations"
                f" ({self.num_generations})"
            )
        if not self.temperature > 0:
            problems.append(f"setting temperature: must be above 0, not {self.temperature}")
        if self.max_new_tokens < 1:
            problems.append(f"setting max_new_tokens: must be at least 1, not {self.max_new_tokens}")
        if not self.rewards:
            problems.append("setting rewards: names none; write FILE.py:FUNCTION or a reward model")
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            problems.append("setting reward_weights: must be as many as rewards")
        return problems + [problem for reward in self.rewards if (problem := _reward_problem(reward))]


def is_function(reward: str) -> bool:
    """Return whether a reward is FILE.py:FUNCTION."""
    return reward.partition(":")[0].endswith(".py")


def _reward_problem(reward: str) -> str | None:
    file, _, function = reward.partition(":")
    if not is_function(reward):
        return None
    if not Path(file).expanduser().is_file():
        return f"setting rewards: {Path(file).absolute()}: no such file"
    return None if function.isidentifier() else f"setting rewards: {reward}: names no function; write {file}:FUNCTION"


def check(settings: Settings, processes: int) -> None:
    """Check the settings of a run of so many ``processes``.

    Raises:
        SettingError: some are wrong; the message has all problems.
    """
    limits = (
        ("micro_batch", settings.micro_batch, 1),
        ("batch_size", settings.batch_size, 1),
        ("max_steps", settings.max_steps, 0),
        ("warmup_steps", settings.warmup_steps, 0),
        ("max_length", settings.max_length, 2),
        ("save_steps", settings.save_steps, 1),
        ("save_total_limit", settings.save_total_limit, 1),
        ("log_steps", settings.log_steps, 1),
        ("hang_minutes", settings.hang_minutes, 0),
    )
    below = [limit for limit in limits if not limit[1] >= limit[2]]
    problems = [f"setting {name}: must be at least {minimum}, not {value}" for name, value, minimum in below]
    positive = (("epochs", settings.epochs), ("learning_rate", settings.learning_rate))
    problems += [f"setting {name}: must be above 0, not {value}" for name, value in positive if not value > 0]
    if settings.micro_batch > 0 and settings.batch_size % (settings.micro_batch * processes):
        problems.append(
            f"setting batch_size: {settings.batch_size} is not a multiple of micro_batch times processes"
            f" ({settings.micro_batch} x {processes})"
        )
    if settings.bits != 16 and settings.method == "full":
        problems.append(f"setting bits={settings.bits}: not together with method=full; use method=lora")
    problems += [*check_lora(settings.lora), *trackers.tracker_problems(settings.tracker), *settings.problems()]
    if problems:
        raise SettingError("\n".join(problems))
