"""[train] and [sft]: the optimizer step, and supervised fine-tuning."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from offbeat.config.base import EXAMPLES, Change, Section, check_number, field
from offbeat.config.training_kinds import TrainingKind

Precision = Literal["float32", "bf16_mixed"]
Recompute = Literal["off", "selective", "full"]

_EXAMPLES = """\
examples:
  offbeat sft --model HuggingFaceTB/SmolLM2-135M-Instruct --data rows.jsonl --name imitation
  offbeat sft task.toml --sft.total_steps 60 --sft.evaluate_every_steps 10
  offbeat train task.toml --model runs/imitation/export

where rows.jsonl has lines such as {"prompt": "2+2=", "answer": "4"}, or {"messages": [...]} with whole chats.
"""


class OptimizerConfig(Section):
    """AdamW with float32 state, a warm-up, a decay and a clip."""

    on_resume = Change.TOLD

    lr: float | Literal["auto"] = field(
        "auto", 'Peak learning rate, above 0 and below 10; "auto" takes it from a table by what is trained, on what, and the width of the'
        " model, or on a resumed run what it had. `offbeat config check` and the run's first lines say what it is.", basic=True)
    beta1: float = field(0.9, "AdamW's first moment decay.", ge=0, lt=1)
    beta2: float = field(0.95, "AdamW's second moment decay; 0.95 forgets stale curvature sooner than 0.999.", ge=0, lt=1)
    eps: float = field(1e-8, "AdamW's epsilon.", gt=0)
    weight_decay: float = field(0.0, "Decoupled weight decay.", ge=0)
    warmup_steps: int = field(0, "Steps of linear warm-up.", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = field("constant", "Decay after the warm-up, down to min_lr_ratio at the last step.")
    min_lr_ratio: float = field(0.1, "Final learning rate as a share of the peak.", ge=0, le=1)
    clip_norm: float = field(1.0, "Global gradient norm is clipped to this; 0 is off.", ge=0)

    @field_validator("lr", mode="plain")
    @classmethod
    def _check_rate(cls, given: Any) -> float | str:
        return given if given == "auto" else check_number(given, above=0.0, below=10.0)

    @property
    def peak(self) -> float:
        """The peak learning rate, which a run has chosen where it was left open."""
        assert self.lr != "auto", "a run chooses its learning rates before anything is started (runs.learning_rates)"
        return self.lr


class Division:
    """What follows from the numbers of ranks that divide a model, of a configuration or of a mesh."""

    if TYPE_CHECKING:
        shard: int
        tp: int
        ep: int
        cp: int

    @property
    def ranks_per_share(self) -> int:
        """Number of ranks that are given the same rows: tp * cp."""
        return self.tp * self.cp

    @property
    def divides(self) -> bool:
        """Whether ranks hold parts of a model instead of replicas."""
        return max(self.shard, self.tp, self.ep) > 1

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are dealt to ranks with different rows."""
        return self.ep > 1 and self.tp == 1


class ParallelConfig(Section, Division):
    """How the train ranks divide a model among them. The rest, train.num_ranks / (shard * tp * cp), is the number of replicas (dp)."""

    on_resume = Change.FREE

    shard: int = field(
        1, "Number of ranks that shard each parameter and gather layers as they run (FSDP2); 1 replicates the model, which is faster where"
        " it fits.", ge=1)
    tp: int = field(
        1, "Number of ranks for tensor parallelism, which compute each layer together on the same rows; keep them on one machine.", ge=1)
    ep: int = field(
        1, "Number of ranks for expert parallelism, among which the experts of a mixture are dealt: the same as tp, or with tp = 1 ranks"
        " with different rows, which send each other tokens.", ge=1)
    cp: int = field(1, "Number of ranks for context parallelism, which split each row of tokens, for long sequences.", ge=1)

    def num_replicas(self, num_ranks: int) -> int:
        """Return how many copies of the model, each divided as these settings say, `num_ranks` ranks hold.

        Raises ValueError if the ranks do not come out even.
        """
        each = self.shard * self.ranks_per_share
        if num_ranks % each:
            raise ValueError(
                f"train.num_ranks must be a multiple of train.parallel's shard * tp * cp = {each}, got {num_ranks}; start as many, or"
                " lower one of them")
        return num_ranks // each


class TrainConfig(Section):
    """The ranks that learn."""

    on_resume = Change.TOLD

    num_ranks: int = field(
        1, "Train processes; [train.parallel] says how they divide the work, by default as replicas of the model.", ge=1,
        on_resume=Change.FREE, basic=True)
    parallel: ParallelConfig = field(ParallelConfig(), "How the ranks divide a model among them.")
    devices_per_rank: int = field(
        0, "Accelerators for each train process; 0 takes one where this machine shows enough of them, else the CPU, as on a Ray cluster.",
        ge=0, le=1, on_resume=Change.FREE)
    optimizer: OptimizerConfig = field(OptimizerConfig(), "AdamW and its schedule.", read_by=("rl",))
    max_tokens_per_microbatch: int = field(
        16384, "Hard cap on tokens in one forward and backward; bounds activation memory.", ge=1, on_resume=Change.FREE, basic=True)
    share_prefix: bool = field(True, "Run a group's common prompt once per micro-batch instead of once per sample.", on_resume=Change.FREE)
    precision: Literal["auto", Precision] = field(
        "auto", 'Number format of the computation; "bf16_mixed" computes in bfloat16 and keeps weights, optimizer moments and gradient'
        ' sums in float32, which is faster above about 5M parameters; "auto" takes it where train ranks have devices that compute in it.'
        " Without shards it is torch's autocast, which is closer to float32 than shards are.")
    gradient_checkpointing: Literal["auto", Recompute] = field(
        "auto", 'Recompute activations in the backward pass to save memory; "selective" keeps the results of matrix products and'
        ' attention, "full" keeps only the inputs of layers and costs a third more computation; "auto" keeps what a device has room for,'
        " and everything on CPUs.", on_resume=Change.FREE)
    offload_optimizer: bool = field(
        False, "Keep AdamW's moments in host memory and bring them to the device part by part for each update. This frees 8 bytes of device"
        " memory per parameter of a rank, at the cost of the transfers; the numbers are the same.", on_resume=Change.FREE)
    router_aux_loss_coefficient: float = field(
        0.0, "Coefficient of the load-balancing loss of a mixture of experts' routers, added to the loss of each update of the policy or"
        " reward model; 0 trains without it, whatever router_aux_loss_coef in the model's config.json is, which is the value to try"
        " first.", ge=0)
    freeze: tuple[Literal["language", "tower", "projector", "router"], ...] = field(
        (), "Parts of a model that are not trained: of one that reads images its language part, its vision tower, or the projector between"
        " them; of a mixture of experts its routers, which then send tokens as they did before training.")
    compile: bool = field(
        False, "Compile each decoder layer with torch.compile; worthwhile on a GPU, where the first step takes a minute longer, and rarely"
        " on a CPU.", on_resume=Change.FREE)
    threads: int = field(
        0, "CPU threads per train process; 0 divides the available cores among the run's engines and train ranks.", ge=0,
        on_resume=Change.FREE)
    step_timeout_s: float = field(1800.0, "Seconds for one training step of all ranks.", gt=0, on_resume=Change.FREE)

    @property
    def computes_in(self) -> Precision:
        """Number format of the computation; float32 while `precision` is open."""
        return "float32" if self.precision == "auto" else self.precision

    @property
    def recomputes(self) -> Recompute:
        """Activations that are computed again; none while `gradient_checkpointing` is open."""
        return "off" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing


class SftConfig(Section):
    """Supervised fine-tuning: `offbeat sft`, and the quick start's warm-up."""

    on_resume = Change.TOLD
    read_by = ("sft",)
    training = TrainingKind(
        command="sft", section="sft", checkpoints="sft", lesson="supervised:Imitation", summary="fine-tune on a dataset's answers",
        description="Supervised fine-tuning; the result is in the run's folder export.", examples=_EXAMPLES,
        data="rows with answers to imitate: a file, a folder, a hub id or a built-in task",
        python=("Fine-tune a model on the answers of a data set", """\
rows = [{"prompt": "reverse abc: ", "answer": "cba"}, {"prompt": "reverse hello: ", "answer": "olleh"}]
run = offbeat.sft(model="models/small", data=rows, total_steps=20, lr=1e-4)
"""),
        word="supervised", method="supervised fine-tuning", rates="sft", imitates=True)

    total_steps: int = field(200, "Most optimizer steps.", ge=1, basic=True)
    batch_size: int = field(128, "Rows per step.", ge=1, basic=True)
    assistant_turns: Literal["all", "last"] = field(
        "all", "Which of the assistant's messages in a chat are trained on; earlier ones may be weaker than the last.")
    too_long: Literal["refuse", "drop"] = field(
        "refuse", "What happens to rows longer than the context or than train.max_tokens_per_microbatch; none is ever cut.",
        read_by=(EXAMPLES,))
    optimizer: OptimizerConfig = field(OptimizerConfig(warmup_steps=30), "AdamW and its schedule.")
    evaluate_every_steps: int = field(
        0, "Steps between evaluations on held-out prompts; 0 evaluates only at the end.", ge=0, on_resume=Change.FREE)
    stop_at_accuracy: float = field(1.0, "Stop as soon as held-out accuracy reaches this.", gt=0, le=1)
