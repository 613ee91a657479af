"""The core's own components, registered through the same hooks as any plugin's. No torch here.

Each target is imported when a run asks for it.
"""

from __future__ import annotations

from nxdt_core.api import Component, EngineComponent, StoreComponent, hookimpl

_OPTIMIZERS = "nxdt_core.train.optimizers"


def _optimizer(name: str, target: str, config: str, summary: str) -> Component:
    return Component(
        name=name,
        target=f"{_OPTIMIZERS}.{target}",
        config=f"{_OPTIMIZERS}.config:{config}",
        summary=summary,
        capabilities=frozenset({"sharded"}),
    )


OPTIMIZERS = (
    _optimizer(
        "adamw",
        "elementwise:adamw",
        "AdamWConfig",
        "AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), torch's fused or foreach kernels",
    ),
    _optimizer(
        "adamw_fp32OptState",
        "elementwise:adamw_fp32_state",
        "AdamWConfig",
        "AdamW with float32 state over parameters of any dtype",
    ),
    _optimizer("adam", "elementwise:adam", "AdamConfig", "Adam (Kingma & Ba 2015, arXiv:1412.6980), torch's"),
    _optimizer("sgd", "elementwise:sgd", "SGDConfig", "gradient descent with momentum, torch's"),
    _optimizer(
        "adafactor",
        "whole_parameters:Adafactor",
        "AdafactorConfig",
        "Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), factored over whole matrices in any layout",
    ),
    _optimizer("lion", "elementwise:Lion", "LionConfig", "Lion (Chen et al. 2023, arXiv:2302.06675)"),
    _optimizer(
        "muon",
        "muon:Muon",
        "MuonConfig",
        "Muon (Jordan et al. 2024) for whole hidden matrices in any layout, AdamW for the rest",
    ),
    _optimizer(
        "novograd", "whole_parameters:Novograd", "NovogradConfig", "NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286)"
    ),
    _optimizer(
        "adadelta", "elementwise:adadelta", "AdadeltaConfig", "Adadelta (Zeiler 2012, arXiv:1212.5701), torch's"
    ),
    _optimizer("adamax", "elementwise:adamax", "AdamaxConfig", "Adamax (Kingma & Ba 2015, arXiv:1412.6980), torch's"),
    _optimizer("adagrad", "elementwise:adagrad", "AdagradConfig", "Adagrad (Duchi et al. 2011), torch's"),
    _optimizer("rmsprop", "elementwise:rmsprop", "RMSpropConfig", "RMSprop (Tieleman & Hinton 2012), torch's"),
    _optimizer("rprop", "elementwise:rprop", "RpropConfig", "Rprop (Riedmiller & Braun 1993), torch's"),
)
"""All of them, under the names of torch and NxD Training."""


_SCHEDULES = "nxdt_core.train.schedules"


def _schedule(name: str, target: str, config: str, summary: str, *aliases: str) -> Component:
    return Component(
        name=name, target=f"{_SCHEDULES}:{target}", config=f"{_SCHEDULES}:{config}", summary=summary, aliases=aliases
    )


SCHEDULES = (
    _schedule(
        "CosineAnnealing",
        "cosine_annealing",
        "CosineAnnealingConfig",
        "linear warm-up, cosine to min_lr, constant_steps at min_lr",
        "cosine",
    ),
    _schedule(
        "LinearAnnealingWithWarmUp",
        "linear_annealing",
        "AnnealingConfig",
        "linear warm-up, then linear to min_lr",
        "linear",
        "WarmupAnnealing",
    ),
    _schedule(
        "PolynomialDecayAnnealing",
        "polynomial",
        "PolynomialConfig",
        "linear warm-up, hold_steps at lr, then a power of what is left to min_lr",
        "polynomial",
        "PolynomialHoldDecayAnnealing",
    ),
    _schedule(
        "SquareAnnealing",
        "square_annealing",
        "SquareAnnealingConfig",
        "linear warm-up, then the square of what is left, at least min_lr",
    ),
    _schedule(
        "SquareRootAnnealing",
        "square_root_annealing",
        "AnnealingConfig",
        "linear warm-up, then the root of what is left of the whole run, at least min_lr",
    ),
    _schedule(
        "WSD",
        "warmup_stable_decay",
        "WSDConfig",
        "warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)",
        "wsd",
    ),
    _schedule("constant", "constant", "WarmupConfig", "linear warm-up, then constant"),
    _schedule("WarmupPolicy", "warmup_policy", "AnnealingConfig", "linear warm-up, then lr; min_lr after max_steps"),
    _schedule(
        "WarmupHoldPolicy",
        "warmup_hold",
        "HoldConfig",
        "linear warm-up, then lr, for hold_steps at least; min_lr after max_steps",
        "WarmupHold",
    ),
    _schedule(
        "InverseSquareRootAnnealing",
        "inverse_square_root",
        "AnnealingConfig",
        "linear warm-up, then falling with the root of the step; min_lr after max_steps",
        "inverse_square_root",
    ),
    _schedule(
        "NoamAnnealing",
        "noam",
        "NoamConfig",
        "the curve of Vaswani et al. 2017, arXiv:1706.03762; lr is a factor",
        "Noam",
    ),
    _schedule(
        "NoamHoldAnnealing",
        "noam_hold",
        "NoamHoldConfig",
        "linear warm-up, hold_steps at lr, then a power of the step (Kim et al. 2022, arXiv:2206.00888)",
    ),
    _schedule("StepLR", "stairs", "StepConfig", "torch's: gamma every step_size steps"),
    _schedule("ExponentialLR", "exponential", "ExponentialConfig", "torch's: gamma at every step"),
)
"""All of them, under NeMo's and torch's names."""


_PRECISIONS = "nxdt_core.train.precision"

_BFLOAT16 = ("bf16", "bfloat16", "bf16-mixed", "mixed")

POLICIES = (
    Component(
        name="fp32",
        target=f"{_PRECISIONS}:fp32",
        summary="everything in float32",
        suggested_for=("float32", "32-true", "32", "float", "no"),
    ),
    Component(
        name="mixed_precision",
        target=f"{_PRECISIONS}:mixed_precision",
        summary="bfloat16 compute; float32 masters, sums of gradients and optimizer state",
        suggested_for=(*_BFLOAT16, "fp16", "float16", "16-mixed"),
    ),
    Component(
        name="mixed_precisionSR",
        target=f"{_PRECISIONS}:mixed_precision_sr",
        summary="mixed_precision, masters rounded stochastically to the bfloat16 that is computed with",
        aliases=("mixed_precision_SR",),
    ),
    Component(
        name="bf16SR",
        target=f"{_PRECISIONS}:bf16_sr",
        config=f"{_PRECISIONS}:BF16SRConfig",
        summary="bfloat16 weights and gradients without masters, updates rounded stochastically",
        suggested_for=("bf16-true",),
    ),
    Component(
        name="autocast",
        target=f"{_PRECISIONS}:autocast",
        summary="float32 parameters, bfloat16 compute under torch.autocast",
        suggested_for=(*_BFLOAT16, "amp"),
    ),
    Component(
        name="manual",
        target=f"{_PRECISIONS}:manual",
        config=f"{_PRECISIONS}:ManualConfig",
        summary="by NxD Training's switches: master_weights, fp32_grad_acc, xla_downcast_bf16, ...",
    ),
)
"""All of them, under the names of NxD Training."""


_TABLE = "nxdt_core.distributed.devices"

DEVICE_PROFILES = (
    Component(name="cpu", target=f"{_TABLE}:CPU", summary="the host"),
    Component(name="cuda", target=f"{_TABLE}:CUDA", summary="GPUs of NVIDIA"),
    Component(name="neuron", target=f"{_TABLE}:NEURON", summary="AWS Trainium under torch-neuronx"),
)


_LAUNCHERS = "nxdt_core.launch.launchers"

LAUNCHERS = (
    Component(
        name="slurm",
        target=f"{_LAUNCHERS}.slurm:SlurmLauncher",
        config=f"{_LAUNCHERS}.config:SlurmOptions",
        summary="write a batch job for Slurm, which starts tasks with srun",
    ),
    Component(
        name="kubernetes",
        target=f"{_LAUNCHERS}.kubernetes:KubernetesLauncher",
        config=f"{_LAUNCHERS}.config:KubernetesOptions",
        summary="write an indexed Job for Kubernetes, or Kubeflow's TrainJob or PyTorchJob",
    ),
    Component(
        name="hyperpod",
        target=f"{_LAUNCHERS}.hyperpod:HyperPodLauncher",
        config=f"{_LAUNCHERS}.config:HyperPodOptions",
        summary="write a job for SageMaker HyperPod, with Slurm or EKS",
    ),
    Component(
        name="local",
        target=f"{_LAUNCHERS}.local:LocalLauncher",
        config=f"{_LAUNCHERS}.config:LocalOptions",
        summary="run the nodes as processes of this machine",
    ),
    Component(
        name="environment",
        target=f"{_LAUNCHERS}.local:EnvironmentLauncher",
        aliases=("torchrun",),
        summary="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them",
    ),
    Component(
        name="mpi",
        target=f"{_LAUNCHERS}.local:MPILauncher",
        summary="variables of mpirun: Open MPI, MVAPICH, MPICH, Intel MPI",
    ),
)


_TORCH_ENGINE = frozenset(
    {
        *("dp", "dp_replicate", "zero1", "zero2", "zero3"),
        *("tp", "sp", "sp:regather", "pad_heads"),
        *("pp", "vpp", "pp:1f1b", "pp:interleaved", "pp:zbv"),
        *("cp", "cp:ring", "cp:gather"),
        *("ep", "token_shuffle"),
        *("adapters", "frozen_model", "recompute", "compile", "param_groups"),
        *("dtype:float64", "dtype:bfloat16", "autocast", "master_weights"),
        *("gradient_dtype", "optimizer_dtype", "stochastic_rounding", "linear_product", "quantised_base"),
    }
)


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader for models that are not trained."""
    return [
        Component(
            name="none",
            target="nxdt_core.data.sampler:NoData",
            summary="no data: describes a model that is not trained, as imported checkpoints do",
        )
    ]


@hookimpl
def nxdt_tokenizers() -> list[Component]:
    """Declare the tokenizers of published models, and UTF-8 bytes."""
    return [
        Component(
            name="byte",
            target="nxdt_core.data.tokenizers.byte:ByteTokenizer",
            config="nxdt_core.data.tokenizers.config:ByteTokenizerConfig",
            summary="UTF-8 bytes and three special tokens; needs no files",
        ),
        Component(
            name="huggingface",
            target="nxdt_core.data.tokenizers.huggingface:HuggingFaceTokenizer",
            config="nxdt_core.data.tokenizers.config:HuggingFaceTokenizerConfig",
            summary="tokenizer.json or a pretrained directory",
            aliases=("hf",),
        ),
        Component(
            name="megatron",
            target="nxdt_core.data.tokenizers.huggingface:MegatronTokenizer",
            config="nxdt_core.data.tokenizers.config:MegatronTokenizerConfig",
            summary="GPT-2's byte-level BPE from vocab.json and merges.txt",
        ),
        Component(
            name="sentencepiece",
            target="nxdt_core.data.tokenizers.sentencepiece:SentencePieceTokenizer",
            config="nxdt_core.data.tokenizers.config:SentencePieceTokenizerConfig",
            summary="a SentencePiece model file, with tokens appended where they are asked for",
        ),
        Component(
            name="tiktoken",
            target="nxdt_core.data.tokenizers.tiktoken:TiktokenTokenizer",
            config="nxdt_core.data.tokenizers.config:TiktokenTokenizerConfig",
            summary="a file of BPE ranks, such as Llama 3's tokenizer.model",
        ),
    ]


@hookimpl
def nxdt_devices() -> list[Component]:
    """Declare the device types of the core's own table."""
    return [*DEVICE_PROFILES]


@hookimpl
def nxdt_optimizers() -> list[Component]:
    """Torch's, and those that look at whole parameters."""
    return [*OPTIMIZERS]


@hookimpl
def nxdt_schedules() -> list[Component]:
    """Curves under NeMo's and torch's names."""
    return [*SCHEDULES]


@hookimpl
def nxdt_precisions() -> list[Component]:
    """Declare the precisions under NxD Training's names."""
    return [*POLICIES]


@hookimpl
def nxdt_stores() -> list[StoreComponent]:
    """Declare the local file system."""
    return [
        StoreComponent(
            name="local",
            target="nxdt_core.checkpoint.stores.local:LocalStorage",
            config="nxdt_core.checkpoint.stores.config:LocalStorageConfig",
            summary="a directory; atomic rename, files and directories fsynced",
            uri_schemes=("file",),
        )
    ]


@hookimpl
def nxdt_formats() -> list[Component]:
    """Declare Hugging Face directories."""
    return [
        Component(
            name="hf",
            target="nxdt_core.hf.format:HFFormat",
            summary="a Hugging Face directory with config.json and safetensors weights",
        )
    ]


@hookimpl
def nxdt_objectives() -> list[Component]:
    """Declare next-token prediction."""
    return [
        Component(
            name="causal_lm",
            target="nxdt_core.train.step:CausalLM",
            config="nxdt_core.config.training_schema:CausalLMConfig",
            summary="cross-entropy of the next token, over labels that are not -100",
        )
    ]


@hookimpl
def nxdt_engines() -> list[EngineComponent]:
    """Declare the engine on stock torch."""
    return [
        EngineComponent(
            name="torch",
            target="nxdt_core.engine.engine:TorchEngine",
            summary="stock torch.distributed on any device type that torch knows",
            capabilities=_TORCH_ENGINE,
            rules="nxdt_core.engine.layout_rules:find_impossible_layouts",
        )
    ]


@hookimpl
def nxdt_callbacks() -> list[Component]:
    """Declare the callbacks."""
    return [
        Component(
            name="generations",
            target="nxdt_core.run.callbacks.generations:Generations",
            config="nxdt_core.run.callbacks.config:GenerationsConfig",
            summary="what the model writes behind some prompts, at each validation",
        ),
        Component(
            name="tensorboard",
            target="nxdt_core.run.loggers:TensorBoard",
            summary="TensorBoard event files in the run's directory",
        ),
        Component(
            name="wandb",
            target="nxdt_core.run.loggers:Wandb",
            config="nxdt_core.run.loggers:WandbConfig",
            summary="Weights & Biases; needs nxdt-core[wandb]",
        ),
        Component(
            name="mlflow",
            target="nxdt_core.run.loggers:MLflow",
            config="nxdt_core.run.loggers:MLFlowConfig",
            summary="MLflow; needs nxdt-core[mlflow]",
        ),
    ]


@hookimpl
def nxdt_launchers() -> list[Component]:
    """Declare the schedulers, and the variables of processes that others have started."""
    return [*LAUNCHERS]
