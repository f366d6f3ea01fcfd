"""The configuration of a learner: one table of a TOML file for each class here, one key for each field.

``trainer_node.commands.learn`` makes options of the fields, and the reader of ``--config`` files checks them.
Underscores of a name become dashes of a key.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints

from p2pcast.cli.settings import setting
from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.overlong import Overlong
from p2pcast.rollouts.probe_set import MAX_SEQUENCES
from p2pcast.sparse.budget_guard import FLOOR, TARGET, GuardOptions
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.trained_weights import Masters, OptimizerOptions


@dataclass(frozen=True, slots=True)
class ModelTable:
    path: Path | None = setting(None, "Folder of the Hugging Face causal LM that training begins with. Required.")
    compute: Literal["published", "float32"] = setting(
        "published",
        "Dtype of forward and backward passes. published: the folder's; float32: the published words, in fp32.",
    )
    recompute: bool = setting(False, "Activations computed again in the backward pass, to save memory.")
    threads: int = setting(0, "Number of threads of torch on the CPU; 0: one for each core.", 0, 4096)


@dataclass(frozen=True, slots=True)
class HubTable:
    address: str = setting("127.0.0.1:7077", "Address HOST:PORT of the hub that broadcasts the versions.")
    token_file: Path | None = setting(None, "File with a join token of the role trainer, or P2PCAST_TOKEN.")
    plaintext: bool = setting(False, "Links without encryption, for a hub that was started with --plaintext.")
    previous: Literal["gpu", "pinned"] = setting("gpu", "Memory for the version before, of tensors on a GPU.")


@dataclass(frozen=True, slots=True)
class LedgerTable:
    url: str = setting("http://127.0.0.1:7079", "URL of the ledger; https for one on another machine.")
    bearer_file: Path | None = setting(None, "File with the bearer of a ledger on this machine: its STATE/http.token.")


@dataclass(frozen=True, slots=True)
class TrainTable:
    publish_every: int = setting(
        0, "Learner steps from one published version to the next (κ), at most S + 1; 0: max(1, S - 1).", 0, 1001
    )
    micro_batch_tokens: int = setting(8192, "Most tokens of one forward pass on one rank.", 1, 1 << 24)
    packing: Literal["packed", "padded"] = setting(
        "packed", "Rows of a micro-batch in one sequence without padding, or one below the other with padding."
    )
    minibatches: int = setting(1, "Optimiser updates from one batch.", 1, 1024)
    overlong: Overlong = setting(
        "keep", "Rollouts cut at their token limit. keep: as others; mask: not learnt from; zero: their reward is 0."
    )
    router_replay: Literal["off", "on"] = setting(
        "off",
        "Experts of a token. off: the learner's own choice; on: the experts that the engine returned with the rollout,"
        " where there are any.",
    )
    seed: int = setting(0, "Seed of everything random in the learner.", 0, (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class AdvantageTable:
    kind: Literal["grpo", "dr_grpo", "leave_one_out"] = setting(
        "grpo",
        "Advantage of a reward in its group. grpo: divided by the standard deviation; dr_grpo: not divided;"
        " leave_one_out: against the mean of the others.",
    )
    eps: float = setting(1e-4, "Number added to the standard deviation.", 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class LossTable:
    kind: Literal["clip", "tis"] = setting(
        "clip",
        "Objective. clip: ratio of learner to sampler, clipped; tis: ratio within the step, clipped and weighted by"
        " the truncated ratio of learner to sampler.",
    )
    clip_low: float = setting(0.2, "Distance below 1 at which the ratio is clipped.", 0.0, 1.0)
    clip_high: float = setting(0.28, "Distance above 1 at which the ratio is clipped.", 0.0, 100.0)
    ratio_cap: float = setting(4.0, "Largest ratio of learner to sampler, for clip.", 1.0, 1e6)
    tis_cap: float = setting(2.0, "Largest weight of learner to sampler, for tis.", 1.0, 1e6)
    kl_weight: float = setting(0.0, "Weight of the divergence from the reference, which is the model's folder.", 0.0)
    length: Literal["token", "sequence"] = setting(
        "token", "Mean of the loss: over the batch's tokens, or over rows of each row's mean."
    )

    def options(self) -> LossOptions:
        return LossOptions(**asdict(self))


@dataclass(frozen=True, slots=True)
class OptimizerTable:
    lr: float = setting(1e-6, "Learning rate of AdamW.", 0.0, 1.0)
    warmup_steps: int = setting(0, "Learner steps over which the learning rate rises.", 0)
    beta1: float = setting(0.9, "AdamW's decay of the gradient's mean.", 0.0, 1.0)
    beta2: float = setting(0.99, "AdamW's decay of the gradient's square.", 0.0, 1.0)
    eps: float = setting(1e-8, "AdamW's epsilon.", 0.0, 1.0)
    weight_decay: float = setting(0.0, "Decoupled weight decay.", 0.0, 1.0)
    grad_clip: float = setting(1.0, "Largest norm of the gradient.", 0.0, 1e9)
    masters: Masters = setting(
        "fp32",
        "Weights that the optimiser updates. fp32: masters beside the published words; kahan, stochastic: the bf16"
        " words alone, by compensated or by stochastic rounding.",
    )

    def options(self) -> OptimizerOptions:
        return OptimizerOptions(
            self.lr, self.warmup_steps, (self.beta1, self.beta2), self.eps, self.weight_decay, self.grad_clip,
            self.masters,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DistillTable:
    rank: int = setting(
        0, "Rank of a LoRA adapter for rollouts alone, which makes sparse attention nearer to dense; 0: none.", 0, 4096
    )
    alpha: float = setting(16.0, "Scale of the adapter: its product is multiplied by alpha / rank.", 0.0, 65536.0)
    kl_weight: float = setting(
        0.001, "Weight of the divergence from the policy's dense log-probabilities in the adapter's loss.", 0.0
    )
    candidates: int = setting(
        64, "Most probable tokens of the dense policy that the divergence counts; all others count as one.", 1, 4096
    )
    ppo_weight: float = setting(1.0, "Weight of the policy's objective in it; 0: distillation alone.", 0.0)
    lr: float = setting(1e-4, "Learning rate of the adapter's AdamW.", 0.0, 1.0)
    warmup_steps: int = setting(0, "Learner steps over which this rate rises.", 0)
    grad_clip: float = setting(1.0, "Largest norm of the adapter's gradient.", 0.0, 1e9)
    page_tokens: int = setting(
        16, "Tokens of a page of the engines' caches: their --block-size, at least 32 on vLLM's CPU build.", 1, 65536
    )

    def options(self) -> OptimizerOptions:
        return OptimizerOptions(self.lr, self.warmup_steps, grad_clip=self.grad_clip)


@dataclass(frozen=True, slots=True)
class CheckpointTable:
    folder: Path = setting(Path("learner"), "Folder for checkpoints, metrics and plots of the run.")
    every: int = setting(20, "Learner steps between two checkpoints.", 1)
    keep: int = setting(2, "Checkpoints kept.", 1, 10000)


@dataclass(frozen=True, slots=True)
class ExportTable:
    every: int = setting(
        0, "Learner steps between two Hugging Face folders of the weights, and one at the end of the run; 0: none.", 0
    )
    folder: Path | None = setting(None, "Folder for these folders; default: exports, in the folder of the checkpoints.")
    keep: int = setting(2, "Hugging Face folders kept.", 1, 10000)


@dataclass(frozen=True, slots=True)
class SftTable:
    steps: int = setting(0, "Supervised steps on the task's demonstrations before the first rollout; 0: none.", 0)
    batch: int = setting(64, "Demonstrations of one supervised step.", 1, 65536)
    lr: float = setting(1e-3, "Learning rate of the supervised steps.", 0.0, 1.0)
    warmup_steps: int = setting(20, "Supervised steps over which the learning rate rises.", 0)


@dataclass(frozen=True, slots=True)
class TaskTable:
    name: str = setting(
        "", "Task with settings, NAME,KEY=VALUE, as of the ledger; for [sft], [evaluation] and [probe]. Empty: no task."
    )


@dataclass(frozen=True, slots=True)
class EvaluationTable:
    every: int = setting(0, "Learner steps between two evaluations on held-out problems; 0: none.", 0)
    problems: int = setting(100, "Held-out problems of one evaluation.", 1, 4096)
    hold: float = setting(
        30.0, "Longest time in seconds for which an evaluation delays the next publication.", 0.0, 86400.0
    )


@dataclass(frozen=True, slots=True)
class ProbeTable:
    prompts: int = setting(
        16,
        "Prompts of [task] that learner and engines score with each version, to compare their weights; 0: none.",
        0,
        MAX_SEQUENCES,
    )


@dataclass(frozen=True, slots=True)
class WatchTable:
    tensorboard: bool = setting(False, "Scalars for TensorBoard in the run's folder; needs the extra tensorboard.")
    live_share: float = setting(0.9, "Share of engines that serve a version when its broadcast counts as over.", 0, 1)
    live_limit: float = setting(120.0, "Longest wait in seconds for engines to serve a version.", 0.1, 86400.0)


@dataclass(frozen=True, slots=True)
class SparseTable:
    schedule: Path | None = setting(
        None, "File of the schedule of sparse attention that engines follow: sparse_attention.json. Default: dense."
    )
    target: float = setting(
        TARGET,
        "Least 5th percentile of the acceptance rate in a bin of positions, below which the guard doubles the bin's"
        " pages; 0: the percentile is logged alone.",
        0.0,
        0.999,
    )
    floor: float = setting(FLOOR, "5th percentile below which the guard makes a bin dense at once.", 0.0, 0.999)
    staleness: int = setting(
        1, "Learner steps that a version may lie behind for the guard to count its tokens.", 0, 1000
    )

    def guard(self) -> GuardOptions:
        return GuardOptions(self.target, min(self.floor, self.target))


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """One field a table. Raises UsageError by ``checked``."""

    model: ModelTable = field(default_factory=ModelTable)
    hub: HubTable = field(default_factory=HubTable)
    ledger: LedgerTable = field(default_factory=LedgerTable)
    train: TrainTable = field(default_factory=TrainTable)
    advantage: AdvantageTable = field(default_factory=AdvantageTable)
    loss: LossTable = field(default_factory=LossTable)
    optimizer: OptimizerTable = field(default_factory=OptimizerTable)
    distill: DistillTable = field(default_factory=DistillTable)
    checkpoint: CheckpointTable = field(default_factory=CheckpointTable)
    export: ExportTable = field(default_factory=ExportTable)
    task: TaskTable = field(default_factory=TaskTable)
    sft: SftTable = field(default_factory=SftTable)
    evaluation: EvaluationTable = field(default_factory=EvaluationTable)
    probe: ProbeTable = field(default_factory=ProbeTable)
    sparse: SparseTable = field(default_factory=SparseTable)
    watch: WatchTable = field(default_factory=WatchTable)

    def checked(self) -> LearnerConfig:
        """Return self. Raises UsageError if a setting is missing, or contradicts another."""
        if self.model.path is None:
            raise UsageError("[model] path is missing: the folder of a Hugging Face causal LM")
        for table, wanted in (("sft", self.sft.steps), ("evaluation", self.evaluation.every)):
            if wanted and not self.task.name:
                raise UsageError(f"[{table}] needs [task] name: the ledger's --task")
        if self.distill.rank and self.sparse.schedule is None:
            raise UsageError("[distill] rank above 0 needs [sparse] schedule: the adapter is for sparse attention")
        if self.loss.kind == "clip" and self.train.minibatches > 1 and self.loss.ratio_cap < 1 + self.loss.clip_high:
            raise UsageError("[loss] ratio-cap lies below 1 + clip-high, so no ratio would ever be clipped")
        return self

    def document(self) -> dict[str, dict[str, Any]]:
        """Return plain values, for checkpoints and ``--print-config``."""
        return {
            table.name: {
                key.replace("_", "-"): str(value) if isinstance(value, Path) else value
                for key, value in asdict(getattr(self, table.name)).items()
            }
            for table in fields(self)
        }


TABLES: Final[dict[str, type[Any]]] = dict(get_type_hints(LearnerConfig))
"""Table → its class."""
