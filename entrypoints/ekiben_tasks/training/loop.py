"""Run the training loop: steps, evaluation, checkpoints. The strategy determines the trained weights and the GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ekiben_tasks.data.tokenize import Example
from ekiben_tasks.distributed import failures
from ekiben_tasks.distributed.context import REQUEUE, Stop, check_grace_period
from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase
from ekiben_tasks.distributed.strategy import ParallelStrategy
from ekiben_tasks.models.description import find_blocks
from ekiben_tasks.models.device import Device
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.run_metadata import Metrics
from ekiben_tasks.training.batches import Batches
from ekiben_tasks.training.checkpoint import Checkpoints
from ekiben_tasks.training.class_scores import ClassScores
from ekiben_tasks.training.progress import Progress, is_due
from ekiben_tasks.training.samples import Samples


class TrainerCallback:
    """Receive the events of the loop, in every process. The methods do nothing: override those you need."""

    def on_train_begin(self, run: Run) -> None:
        """Handle the start, before the first step; ``run.first_step`` is above 0 after a checkpoint was loaded."""

    def on_evaluate_begin(self, run: Run) -> None:
        """Handle the moment before an evaluation at ``run.step``."""

    def on_evaluate(self, run: Run) -> bool:
        """Handle the end of an evaluation, with ``run.last_eval_loss``. Return whether training ends here."""
        return False


@dataclass(frozen=True, slots=True)
class Due:
    """Record which actions are due after a step, by the main process's clock."""

    save: bool
    log: bool


def count_alloc_retries(device: Device) -> int:
    """Return how often PyTorch's allocator ran out of GPU memory and had to free its cache."""
    if not device.is_gpu:
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device.torch_device)["num_alloc_retries"])


class Run:
    """Run the training loop, step by step."""

    def __init__(
        self,
        strategy: ParallelStrategy,
        batches: Batches,
        progress: Progress,
        checkpoints: Checkpoints,
        device: Device,
        stop: Stop,
    ) -> None:
        self.strategy, self.batches, self.progress, self.checkpoints = strategy, batches, progress, checkpoints
        self.device, self.stop = device, stop
        self.callback, self.heartbeat = TrainerCallback(), Heartbeat(0)
        self.samples: Samples | None = None
        self.loss_module, self.plan, self.world = strategy.loss_module, batches.plan, batches.world
        self.settings, self.steps, self.checkpointed = self.plan.settings, progress.steps, self.plan.checkpointed
        self.saved = self.reported = 0.0  # when, by this process's clock
        self.slowest_save = 0.0  # seconds

    # ------------------------------------------------------------------ the loop

    def fit(self, callback: TrainerCallback | None = None, heartbeat: Heartbeat | None = None) -> int | None:
        """Train to the end, or until a signal.

        callback: is called at the run's events. heartbeat: gets the run's position.

        Returns:
            None at the end, or the exit code after a signal: 75 or 130.

        Raises:
            TaskError: a loss or weight is not finite, the GPU's memory is too small, or a checkpoint cannot be read or
                written.
        """
        self.callback, self.heartbeat = callback or self.callback, heartbeat or self.heartbeat
        progress = self.progress
        if state := self.checkpoints.load(self.strategy.load):
            progress.restore(state)
            self.checkpoints.say_resumed(progress.step, self.steps)
            if self.world.is_main_process and state.get("steps", self.steps) != self.steps:
                print(
                    f"note        {self.steps} steps instead of {state['steps']}: the learning rate follows the"
                    " schedule of a run of that length"
                )
        progress.begin()
        self.stop.saves = True
        self.loss_module.train()
        self.saved = self.reported = time.monotonic()
        self.callback.on_train_begin(self)
        reached = False
        while self.step < self.steps and not reached:
            due = self._step()
            if due is None:
                return self._leave()
            epoch_ends = self.step % progress.steps_per_epoch == 0
            saves = self.step == self.steps or epoch_ends or due.save
            saves = saves or is_due(self.step, self.settings.save_steps)
            evaluates = self.step == self.steps or is_due(self.step, self.settings.eval_every)
            first = self.step == self.first_step + 1
            if saves or evaluates or first or due.log:
                progress.flush()
                progress.meter.lap() if first else progress.meter.keep()
                progress.report()
                self.reported = time.monotonic()
            if evaluates:
                reached = self._evaluate()
                saves = saves or (self.settings.load_best_model_at_end and progress.best_step == self.step)
            if saves or reached:
                self._save()
                self.saved = time.monotonic()
            if saves or evaluates:
                progress.meter.lap()
        if self.settings.load_best_model_at_end and progress.best_step not in (0, self.step):
            self.checkpoints.load_best(progress.best_step, self.strategy)
        return None

    @property
    def step(self) -> int:
        """Return how many steps are done, earlier starts included."""
        return self.progress.step

    @property
    def first_step(self) -> int:
        """Return how many steps were done when this process started: above 0 after a checkpoint was loaded."""
        return self.progress.first_step

    @property
    def last_eval_loss(self) -> float:
        """Return the loss of the last evaluation in nats per target token, NaN before the first one."""
        return self.progress.last_eval_loss

    # ------------------------------------------------------------------ one step

    def _step(self) -> Due | None:
        """Run one step of the optimizer; None when a signal came: then nothing has changed since the last step."""
        self._beat(Phase.READ)
        rows = self.batches.rows_of(self.step)
        # Each step seeds itself, so that a resumed run drops out the same units without keeping a generator's state.
        torch.manual_seed((self.settings.seed * 1_000_003 + self.step) * 1021 + self.world.rank)
        num_target_tokens = sum(row.num_target_tokens for row in rows)
        lengths, retries = [len(row.ids) for row in rows], count_alloc_retries(self.device)
        total = self._gradients(rows, num_target_tokens)
        if total is None:
            return None
        total, due = self._agree(total, is_short=count_alloc_retries(self.device) > retries, longest=max(lengths))
        if due is None:
            self.strategy.zero_grad()
            return None
        rate = self.plan.rate(self.step, self.steps)
        self._beat(Phase.UPDATE)
        norm = self.strategy.step(rate)
        self.progress.add_step(lengths, num_target_tokens, total, norm, rate)
        return due

    def _beat(self, phase: Phase, micro_batch: int = 0) -> None:
        """Record the position within the current step.

        The first one after a start compiles, and every process waits for the slowest.
        """
        self.heartbeat.beat(phase, self.step + 1, micro_batch=micro_batch, long=self.step == self.first_step)

    def _agree(self, total: torch.Tensor, *, is_short: bool, longest: int) -> tuple[torch.Tensor, Due | None]:
        """Sum the loss over the processes, and decide with them what follows this step; None: stop before it.

        Clocks differ, and so does the moment at which a signal arrives. Processes that decided alone would enter
        different collectives and deadlock. Any process may stop the run, the main one alone
        reads the clock, and the answers travel with the loss: one reduction, as without them.

        is_short: of memory in this step, in this process. Where all have to run the model equally often, all take
        smaller micro-batches.
        """
        now = time.monotonic()
        main = self.world.is_main_process
        votes = [
            float(self.stop.exit_code is not None),
            float(main and now - self.saved > 60 * self.settings.save_minutes),
            float(main and now - self.reported > self.settings.log_seconds),
            float(is_short),
        ]
        self._beat(Phase.WAIT)
        if self.world.size > 1:
            shared = torch.cat([total[None], total.new_tensor(votes)])
            self.world.all_reduce(shared)
            total, votes = shared[0], shared[1:].tolist()
        stop, save, log, short = (vote > 0 for vote in votes)
        if short and self.strategy.collective and self.world.size > 1:
            self._halve_micro_batches(longest)
        if stop and self.world.size > 1:  # a single process handles a signal between two micro-batches
            self.stop.exit_code = self.stop.exit_code or REQUEUE
            return total, None
        return total, Due(save=save, log=log)

    def _gradients(self, rows: Sequence[Example], num_target_tokens: int) -> torch.Tensor | None:
        """The summed loss over this process's share of ``rows``, gradients gathered; None when a signal came.

        Out of memory: smaller micro-batches, then checkpointing; those done so far are done again.
        """
        while True:
            try:
                return self._accumulate(self.batches.share(rows, training=True), num_target_tokens)
            except RuntimeError as error:
                if not failures.is_retryable(error):
                    raise
                self._make_room(max(len(row.ids) for row in rows))

    def _accumulate(self, micro_batches: list[list[Example]], num_target_tokens: int) -> torch.Tensor | None:
        """Return the summed loss of the micro-batches, gradients accumulated; None when a signal came."""
        total = torch.zeros((), device=self.device.torch_device)
        for index, rows in enumerate(micro_batches):
            if self.stop.exit_code is not None and self.world.size == 1:
                self.strategy.zero_grad()
                return None
            self._beat(Phase.COMPUTE, index)
            loss = self.strategy.loss(self.batches.collate(rows))
            factor = 1.0 / max(num_target_tokens, 1) if rows else 0.0
            self.strategy.backward(loss, factor, last=index == len(micro_batches) - 1)
            if rows:
                total += loss.detach()
        return total

    def _halve_micro_batches(self, longest: int) -> None:
        """Halve the micro-batches of later steps, in every process alike, before one of them runs out of memory."""
        batches = self.batches
        if batches.max_tokens > 2 * longest:
            batches.max_tokens = min(batches.max_tokens, self.plan.step_tokens(longest, self.world.size)) // 2
            if self.world.is_main_process:
                print(
                    f"little GPU memory left: continuing with packs of at most {batches.max_tokens:,} tokens",
                    flush=True,
                )

    def _make_room(self, longest: int) -> None:
        self.strategy.zero_grad()
        torch.cuda.empty_cache()
        layers = len(find_blocks(self.loss_module.body))
        batches = self.batches
        if not self.strategy.collective and batches.max_tokens > 2 * longest:
            batches.max_tokens = min(batches.max_tokens, self.plan.step_tokens(longest, self.world.size)) // 2
            print(f"out of GPU memory: continuing with packs of at most {batches.max_tokens:,} tokens", flush=True)
        elif not self.strategy.collective and self.checkpointed < layers:
            self.checkpointed = layers
            self.loss_module.checkpoint_activations(layers)
            print("out of GPU memory: continuing with gradient checkpointing", flush=True)
        else:
            # Processes that wait for each other cannot change their plans one by one.
            raise TaskError(
                f"{failures.name_process()}: out of GPU memory with packs of {batches.max_tokens:,} tokens, the longest"
                f" row {longest:,}, {self.checkpointed} of {layers} blocks checkpointed, on {self.device.name}; try"
                f" --set gradient_checkpointing=true --set micro_batch=1, --set max_length={longest // 2}, more GPUs,"
                " or GPUs without other users"
            )

    # ------------------------------------------------------------------ around the steps

    def _save(self) -> None:
        """Save the state after the last step. flush() has checked its losses and gradients.

        Raises:
            TaskError: a weight is not a number; the checkpoints stay as they are.
        """
        self.heartbeat.beat(Phase.SAVE, self.step, long=True)
        if not self.world.minimum(int(self.strategy.is_finite()), self.device.torch_device):
            raise TaskError(f"a weight is not finite after step {self.step}: {self.progress.advise()}")
        started = time.monotonic()
        self.checkpoints.save(self.step, self.progress.state(), self.strategy)
        seconds = time.monotonic() - started
        if self.world.is_main_process and seconds > self.slowest_save and (note := check_grace_period(seconds)):
            print(note, flush=True)
        self.slowest_save = max(seconds, self.slowest_save)

    def _leave(self) -> int:
        self.progress.flush()
        if self.step > self.first_step:
            self._save()
            if self.world.is_main_process:
                print(f"saved step {self.step} of {self.steps}; the same command continues from here", flush=True)
        elif self.world.is_main_process:
            print("nothing to save: no step was finished since the start", flush=True)
        assert self.stop.exit_code is not None
        return self.stop.exit_code

    def _evaluate(self) -> bool:
        """Evaluate, and return whether training ends here: by the callback, or by early stopping."""
        test = self.batches.data.test
        if not test:
            return False
        self.callback.on_evaluate_begin(self)
        self.loss_module.eval()
        # Compiling for evaluation would take longer than it saves.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            total, scores = self._score(test) if self.batches.data.labels else (self._sum_losses(test), None)
        if self.samples and (self.strategy.collective or self.world.is_main_process):
            self._answer(self.samples)
        self.loss_module.train()
        self.progress.add_test(total / sum(row.num_target_tokens for row in test), scores)
        ends_early = self.progress.evals_since_best >= self.settings.early_stopping_patience > 0
        if ends_early and self.world.is_main_process:
            since = f"since step {self.progress.best_step}"
            print(
                f"stopped     {self.progress.evals_since_best} evaluations have had no lower loss {since}", flush=True
            )
        return bool(self.world.broadcast(self.callback.on_evaluate(self))) or ends_early

    def _sum_losses(self, test: Sequence[Example]) -> float:
        """Return the summed loss of ``test``, of all processes together."""
        total = torch.zeros((), device=self.device.torch_device)
        for index, examples in enumerate(self.batches.share(test, training=False)):
            self.heartbeat.beat(Phase.EVALUATE, self.step, micro_batch=index)
            loss = self.strategy.loss(self.batches.collate(examples))
            total += loss if examples else 0.0
        self.world.all_reduce(total)
        return float(total)

    def _score(self, test: Sequence[Example]) -> tuple[float, dict[str, float]]:
        """Return a classifier's summed loss of ``test`` and its scores, of all processes together."""
        scores = ClassScores(len(self.batches.data.labels), self.device.torch_device)
        for index, examples in enumerate(self.batches.share(test, training=False)):
            self.heartbeat.beat(Phase.EVALUATE, self.step, micro_batch=index)
            batch = self.batches.collate(examples)
            logits = self.strategy.loss(batch.ask())
            if examples:
                scores.add(logits, batch.labels)
        self.world.all_reduce(scores.sums)
        return scores.results()

    def _answer(self, samples: Samples) -> None:
        """Print and record answers to a few rows. The model is in evaluation."""
        answers = samples.answer(self.strategy, self.batches.collate)
        if self.progress.metrics and answers:
            Metrics(self.progress.output / "samples.jsonl", self.step - 1).add(
                [{"step": self.step, **answer} for answer in answers]
            )
            for each in answers:
                print(f"sample      {each['prompt'][-60:]!r} -> {each['answer']!r}", flush=True)
