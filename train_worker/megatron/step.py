"""One optimizer step: Megatron's pipeline schedule forward and backward, gradient reduction, optimizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from search_spaces.shapes import TrainingShape
from train_worker.job import TrialJob
from train_worker.megatron.config import MegatronConfigs
from train_worker.megatron.data import TokenSource, indices_of_rank, micro_batches
from train_worker.megatron.model import Built

NEVER = 2**62  # steps
TEXT = "text"  # a micro-batch, as the schedule hands it over: int64 [micro_batch_size, sequence_length + 1]


@dataclass
class Trainer:
    """Runs steps on one rank. `seen` are the sizes of the micro-batches of the last step, as actually run; `planned`:
    its schedule asked for plans, to interleave two of them. A step that a CUDA graph replays runs what was captured.

    `schedule` is Megatron's for this layout, unless something is put around it before the first step.
    """

    job: TrialJob
    configs: MegatronConfigs
    built: Built
    indices: list[list[int]]
    device: torch.device
    scheduler: OptimizerParamScheduler
    seen: list[int] = field(default_factory=list)
    planned: bool = False
    schedule: Callable[..., Any] = field(default_factory=get_forward_backward_func)

    def batches(self, step: int) -> list[list[torch.Tensor]]:
        """Tokens of step `step` on the device, one equal list for each model chunk (each reads its own copy)."""
        job = self.job
        source = TokenSource(job.seed, job.model.vocab_size, job.training.sequence_length)
        tokens = [batch.to(self.device) for batch in micro_batches(source, step, self.indices)]
        return [tokens for _ in self.built.chunks]

    def step(self, batches: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], float]:
        """Train on one global batch, or on its first micro-batches. Returns their losses (none but on the last stage)
        and the grad norm."""
        before = self.seen, self.planned
        self.seen, self.planned = [], False
        for chunk in self.built.chunks:
            chunk.zero_grad_buffer()
        self.built.optimizer.zero_grad()
        self._fill_shared_buffers()
        # Dictionaries, since that is what a capture of the whole iteration copies (full_cuda_graph.py:122).
        iterators = [iter([{TEXT: tokens} for tokens in each]) for each in batches]
        losses = self.schedule(
            forward_step_func=self._forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.built.chunks,
            num_microbatches=len(batches[0]),
            seq_length=self.job.training.sequence_length,
            micro_batch_size=self.configs.micro_batch_size,
            forward_only=False,
        )
        if not self.seen:  # no Python ran: a graph of the whole iteration was replayed
            self.seen, self.planned = before
        _, grad_norm, _ = self.built.optimizer.step()
        self.scheduler.step(increment=1)
        return [found["loss"] for found in losses], float("nan") if grad_norm is None else float(grad_norm)

    def _fill_shared_buffers(self) -> None:
        """MXFP8 weights that are gathered in the buffer of the gradients: zeroing these has emptied it
        (training/training.py:2377). The hooks that gather are on from the first step here."""
        ddp = self.configs.ddp
        if not (ddp.reuse_grad_buf_for_mxfp8_param_ag and ddp.overlap_param_gather):
            return
        for part in getattr(self.built.optimizer, "chained_optimizers", [self.built.optimizer]):
            if isinstance(part, DistributedOptimizer):
                part._copy_main_params_to_param_buffer()

    def _forward(
        self, iterator: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        """Megatron's forward_step_func: output of the chunk and the function that makes a loss of the last one's.

        With overlap_moe_expert_parallel_comm the schedule asks for a plan instead, to interleave two micro-batches.
        """
        text = next(iterator)[TEXT]
        self.seen.append(text.shape[0])
        self.planned = self.planned or return_schedule_plan
        length = text.shape[1] - 1
        batch = {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": torch.arange(length, device=text.device).expand(text.shape[0], length),
        }
        batch = of_this_context_rank(batch)
        forward = model.build_schedule_plan if return_schedule_plan else model
        return forward(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), _mean_loss


def of_this_context_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rank's part of each sequence, two of 2 x CP pieces; (batch, sequence) in and out.

    Not told the group, Megatron's function cuts by all ranks of the world: TP 2 with CP 2 would train on half the
    tokens, and ranks of one TP group on other ones.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return batch
    group = parallel_state.get_context_parallel_group()
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group))


def _mean_loss(per_token: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum, tokens, and what is reported: the schedule divides in place, by the tokens of this rank.

    A plain mean would be multiplied by the context-parallel size (schedules.py:340), and the gradient with it. The
    number of tokens is filled in on the device: a copy from the host cannot be captured.
    """
    total = per_token.float().sum()
    tokens = torch.full((), per_token.numel(), dtype=torch.int, device=per_token.device)
    return total, tokens, {"loss": total.detach() / per_token.numel()}


def trainer_of(job: TrialJob, configs: MegatronConfigs, built: Built, device: torch.device) -> Trainer:
    """Split the global batch. Raises ValueError where micro-batch x data-parallel size does not divide it."""
    ranks = parallel_state.get_data_parallel_world_size()
    total, size = job.training.global_batch_size, configs.micro_batch_size
    if total % (ranks * size):
        raise ValueError(f"global_batch_size {total} is not divisible by micro_batch_size {size} x {ranks} data ranks")
    indices = indices_of_rank(total // (ranks * size), size, ranks, parallel_state.get_data_parallel_rank())
    return Trainer(job, configs, built, indices, device, _scheduler(job.training, built))


def _scheduler(training: TrainingShape, built: Built) -> OptimizerParamScheduler:
    """Learning rate and weight decay of the next update. A warm-up begins at zero: the first update changes nothing,
    and delayed FP8 has its scales before one that does."""
    return OptimizerParamScheduler(
        built.optimizer, init_lr=0.0, max_lr=training.learning_rate, min_lr=0.0,
        lr_warmup_steps=training.learning_rate_warmup_steps, lr_decay_steps=NEVER, lr_decay_style="constant",
        start_wd=training.weight_decay, end_wd=training.weight_decay, wd_incr_steps=NEVER, wd_incr_style="constant",
    )  # fmt: skip


def exchange(
    losses: list[torch.Tensor], grad_norm: float, times_s: list[float], device: torch.device
) -> tuple[float, float, list[float]]:
    """Mean loss of the global batch, grad norm, and each of `times_s` of its slowest rank: equal on every rank, so that
    all decide alike. NaN or inf on one reaches all. Collective: one sum, in which each rank has places of its own for
    its times (a step has ended when its last rank has; a second collective for the largest would cost as much again).
    """
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    last_stage_ranks = world // parallel_state.get_pipeline_model_parallel_world_size()
    mine = torch.stack(losses).double().mean().item() / last_stage_ranks if losses else 0.0
    sent = torch.zeros(2 + world * len(times_s), dtype=torch.float64)
    sent[0], sent[1] = mine, grad_norm / world
    sent[2:].view(world, -1)[rank] = torch.tensor(times_s, dtype=torch.float64)
    summed = sent.to(device)
    torch.distributed.all_reduce(summed)
    found = summed.cpu()
    return float(found[0]), float(found[1]), found[2:].view(world, -1).amax(dim=0).tolist()
