"""Facts a sweep cannot change: the model, the cluster, the training job and the software stack.

Field names of `ModelShape` are Megatron-Core 0.19 `TransformerConfig` fields where one exists. A missing fact
is an error (pydantic: required, unknown fields forbidden), never a silent default.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class Noun(BaseModel):
    """Base of every datum that crosses a folder or a process: frozen, and unknown fields are an error."""

    # "strings": a NaN loss is written as "NaN" and read back; the default writes null, which is no float.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class ModelShape(Noun):
    """One MoE decoder. Sizes are counts of elements, not bytes."""

    name: str
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    kv_channels: PositiveInt
    ffn_hidden_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    num_moe_experts: PositiveInt
    moe_router_topk: PositiveInt
    moe_ffn_hidden_size: PositiveInt
    first_dense_layers: int = Field(0, ge=0, description="leading layers with a dense MLP")
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = True
    rotary_base: PositiveInt = 10_000
    layernorm_epsilon: float = 1e-6
    multi_latent_attention: bool = False
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    qk_head_dim: PositiveInt | None = None
    qk_pos_emb_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    # Not under Megatron's names (mtp_num_layers, window_size): the worker trains without them, and rules read those as
    # knobs. For the FLOPs of the published model only (`search_spaces.flops`).
    predicted_ahead: PositiveInt | None = Field(None, description="layers of multi-token prediction; None: none")
    attention_window: PositiveInt | None = Field(
        None, description="tokens that every second layer attends to (GPT-OSS); None: all layers attend to all"
    )

    @model_validator(mode="after")
    def _divisible(self) -> "ModelShape":
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by "
                f"num_query_groups {self.num_query_groups}"
            )
        if self.multi_latent_attention and self.num_query_groups != self.num_attention_heads:
            raise ValueError(  # each head has keys of its own; with fewer groups Megatron's first forward fails
                f"latent attention has no query groups: num_query_groups {self.num_query_groups} must be "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(f"moe_router_topk {self.moe_router_topk} exceeds num_moe_experts {self.num_moe_experts}")
        if self.first_dense_layers >= self.num_layers:
            raise ValueError("first_dense_layers leaves no MoE layer")
        return self


class ClusterShape(Noun):
    """The workers. `workers_per_trial` is the gang one trial needs: its world size (ranks)."""

    device: Literal["cpu", "cuda"]
    workers: PositiveInt = Field(description="ranks the whole cluster can run at once")
    workers_per_trial: PositiveInt
    workers_per_node: PositiveInt
    gpu_arch: str | None = Field(None, description='GPU name and compute capability, such as "H100 sm_90"')
    memory_bytes: PositiveInt | None = Field(
        None, description="memory one worker may use; on cpu enforced as a data-segment limit of the rank process"
    )

    @model_validator(mode="after")
    def _fits(self) -> "ClusterShape":
        if self.workers_per_trial > self.workers:
            raise ValueError(f"workers_per_trial {self.workers_per_trial} exceeds workers {self.workers}")
        return self

    @property
    def slots(self) -> int:
        """How many trials can run at once."""
        return self.workers // self.workers_per_trial


Routing = Literal["natural", "forced"]
UNTRAINED = frozenset({"predicted_ahead", "attention_window"})  # facts of a model that no trial depends on
LEAST_STEPS = 3  # a standard error of two steps is no better than a guess


class TrainingShape(Noun):
    """The training job every candidate runs: the same tokens, optimizer and step counts."""

    sequence_length: PositiveInt = Field(description="tokens per sequence")
    global_batch_size: PositiveInt = Field(description="sequences per optimizer step, over all ranks")
    warmup_steps: PositiveInt = Field(2, description="steps run first and never measured")
    measured_steps: PositiveInt = Field(8, description="steps timed after warm-up, at most")
    min_measured_steps: int | None = Field(
        None, ge=LEAST_STEPS, description="steps timed before a trial may stop early; None: all measured_steps run"
    )
    target_relative_error: float | None = Field(
        None, gt=0, lt=1, description="a trial stops early where the standard error of its steps is at most this share"
    )
    params_dtype: Literal["fp32", "bf16"] = "bf16"
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(1e-4, gt=0)
    learning_rate_warmup_steps: int = Field(
        0, ge=0, description="updates over which the learning rate rises from zero, as Megatron-LM's; 0: it is constant"
    )
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "seq_aux_loss"
    moe_aux_loss_coeff: float = Field(1e-3, ge=0)
    routing: Routing = Field("natural", description="forced: moe_router_force_load_balancing")
    layout_independent_init: bool = Field(
        True, description="weights depend on the seed and the parameter's name only, so layouts share one loss curve"
    )

    @model_validator(mode="after")
    def _stops(self) -> "TrainingShape":
        least, target = self.min_measured_steps, self.target_relative_error
        if target is not None and least is None:
            raise ValueError("target_relative_error needs min_measured_steps: from which step on a trial may stop")
        if least is not None and target is None:
            raise ValueError("min_measured_steps needs target_relative_error: the precision at which a trial may stop")
        if least is not None and least > self.measured_steps:
            raise ValueError(f"min_measured_steps {least} exceeds the cap, measured_steps {self.measured_steps}")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.global_batch_size

    @property
    def least_steps(self) -> int:
        """Steps that every trial runs, warm-up included: what two trials can be compared over."""
        return self.warmup_steps + (self.min_measured_steps or self.measured_steps)


STACK_ADDED_LATER = ("apex",)  # fields of the stack that came after digests of it were first kept


class StackVersions(Noun):
    """Versions of the software on the *target* workers, which need not be the controller's. None: not installed."""

    megatron_core: str
    torch: str
    transformer_engine: str | None = None
    nccl: str | None = None
    cuda: str | None = None
    deep_ep: str | None = None
    hybrid_ep: str | None = None
    apex: str | None = Field(None, description="Apex, or another build of its fused_weight_gradient_mlp_cuda")
    megatron_lm: str | None = Field(None, description="the launcher, where one is used")
    megatron_bridge: str | None = Field(None, description="the launcher, where one is used")
