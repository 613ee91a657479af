"""The core's own components, registered through the same hooks as any plugin's. No torch here.

Each target is imported when a run asks for it.
"""

from __future__ import annotations

from nxdt_core.api import Component, EngineComponent, StoreComponent, hookimpl


def _components(
    targets: str, configs: str, *rows: tuple[str, ...], capabilities: frozenset[str] = frozenset()
) -> list[Component]:
    """Return a component for each row: name, target, class of its section or nothing, summary, and any aliases.

    Targets and sections are named from ``targets`` and ``configs`` on.
    """
    return [
        Component(
            name=name,
            target=targets + target,
            config=configs + config if config else None,
            summary=summary,
            aliases=tuple(aliases),
            capabilities=capabilities,
        )
        for name, target, config, summary, *aliases in rows
    ]


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader for models that are not trained."""
    summary = "no data: describes a model that is not trained, as imported checkpoints do"
    return [Component(name="none", target="nxdt_core.data.sampler:NoData", summary=summary)]


@hookimpl
def nxdt_tokenizers() -> list[Component]:
    """Declare the tokenizers of published models, and UTF-8 bytes."""
    return _components(
        "nxdt_core.data.tokenizers.",
        "nxdt_core.data.tokenizers.config:",
        ("byte", "byte:ByteTokenizer", "ByteTokenizerConfig", "UTF-8 bytes and three special tokens; needs no files"),
        (
            *("huggingface", "huggingface:HuggingFaceTokenizer", "HuggingFaceTokenizerConfig"),
            *("tokenizer.json or a pretrained directory", "hf"),
        ),
        (
            *("megatron", "huggingface:MegatronTokenizer", "MegatronTokenizerConfig"),
            "GPT-2's byte-level BPE from vocab.json and merges.txt",
        ),
        (
            *("sentencepiece", "sentencepiece:SentencePieceTokenizer", "SentencePieceTokenizerConfig"),
            "a SentencePiece model file, with tokens appended where they are asked for",
        ),
        (
            *("tiktoken", "tiktoken:TiktokenTokenizer", "TiktokenTokenizerConfig"),
            "a file of BPE ranks, such as Llama 3's tokenizer.model",
        ),
    )


@hookimpl
def nxdt_devices() -> list[Component]:
    """Declare the device types of the core's own table."""
    return _components(
        "nxdt_core.distributed.devices:",
        "",
        ("cpu", "CPU", "", "the host"),
        ("cuda", "CUDA", "", "GPUs of NVIDIA"),
        ("neuron", "NEURON", "", "AWS Trainium under torch-neuronx"),
    )


@hookimpl
def nxdt_optimizers() -> list[Component]:
    """Declare the optimizers under the names of torch and NxD Training."""
    return _components(
        "nxdt_core.train.optimizers.",
        "nxdt_core.train.optimizers.config:",
        (
            *("adamw", "elementwise:adamw", "AdamWConfig"),
            "AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), torch's fused or foreach kernels",
        ),
        (
            *("adamw_fp32OptState", "elementwise:adamw_fp32_state", "AdamWConfig"),
            "AdamW with float32 state over parameters of any dtype",
        ),
        ("adam", "elementwise:adam", "AdamConfig", "Adam (Kingma & Ba 2015, arXiv:1412.6980), torch's"),
        ("sgd", "elementwise:sgd", "SGDConfig", "gradient descent with momentum, torch's"),
        (
            *("adafactor", "whole_parameters:Adafactor", "AdafactorConfig"),
            "Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), factored over whole matrices in any layout",
        ),
        ("lion", "elementwise:Lion", "LionConfig", "Lion (Chen et al. 2023, arXiv:2302.06675)"),
        (
            *("muon", "whole_parameters:Muon", "MuonConfig"),
            "Muon (Jordan et al. 2024) for whole hidden matrices in any layout, AdamW for the rest",
        ),
        (
            *("novograd", "whole_parameters:Novograd", "NovogradConfig"),
            "NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286)",
        ),
        ("adadelta", "elementwise:adadelta", "AdadeltaConfig", "Adadelta (Zeiler 2012, arXiv:1212.5701), torch's"),
        ("adamax", "elementwise:adamax", "AdamaxConfig", "Adamax (Kingma & Ba 2015, arXiv:1412.6980), torch's"),
        ("adagrad", "elementwise:adagrad", "AdagradConfig", "Adagrad (Duchi et al. 2011), torch's"),
        ("rmsprop", "elementwise:rmsprop", "RMSpropConfig", "RMSprop (Tieleman & Hinton 2012), torch's"),
        ("rprop", "elementwise:rprop", "RpropConfig", "Rprop (Riedmiller & Braun 1993), torch's"),
        capabilities=frozenset({"sharded"}),
    )


@hookimpl
def nxdt_schedules() -> list[Component]:
    """Declare the learning-rate schedules under NeMo's and torch's names."""
    return _components(
        "nxdt_core.train.schedules:",
        "nxdt_core.train.schedules:",
        (
            *("CosineAnnealing", "cosine_annealing", "CosineAnnealingConfig"),
            *("linear warm-up, cosine to min_lr, constant_steps at min_lr", "cosine"),
        ),
        (
            *("LinearAnnealingWithWarmUp", "linear_annealing", "AnnealingConfig"),
            *("linear warm-up, then linear to min_lr", "linear", "WarmupAnnealing"),
        ),
        (
            *("PolynomialDecayAnnealing", "polynomial", "PolynomialConfig"),
            "linear warm-up, hold_steps at lr, then a power of what is left to min_lr",
            *("polynomial", "PolynomialHoldDecayAnnealing"),
        ),
        (
            *("SquareAnnealing", "square_annealing", "SquareAnnealingConfig"),
            "linear warm-up, then the square of what is left, at least min_lr",
        ),
        (
            *("SquareRootAnnealing", "square_root_annealing", "AnnealingConfig"),
            "linear warm-up, then the root of what is left of the whole run, at least min_lr",
        ),
        ("WSD", "warmup_stable_decay", "WSDConfig", "warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)", "wsd"),
        ("constant", "constant", "WarmupConfig", "linear warm-up, then constant"),
        ("WarmupPolicy", "warmup_policy", "AnnealingConfig", "linear warm-up, then lr; min_lr after max_steps"),
        (
            *("WarmupHoldPolicy", "warmup_hold", "HoldConfig"),
            *("linear warm-up, then lr, for hold_steps at least; min_lr after max_steps", "WarmupHold"),
        ),
        (
            *("InverseSquareRootAnnealing", "inverse_square_root", "AnnealingConfig"),
            "linear warm-up, then falling with the root of the step; min_lr after max_steps",
            "inverse_square_root",
        ),
        (
            *("NoamAnnealing", "noam", "NoamConfig"),
            *("the curve of Vaswani et al. 2017, arXiv:1706.03762; lr is a factor", "Noam"),
        ),
        (
            *("NoamHoldAnnealing", "noam_hold", "NoamHoldConfig"),
            "linear warm-up, hold_steps at lr, then a power of the step (Kim et al. 2022, arXiv:2206.00888)",
        ),
        ("StepLR", "stairs", "StepConfig", "torch's: gamma every step_size steps"),
        ("ExponentialLR", "exponential", "ExponentialConfig", "torch's: gamma at every step"),
    )


@hookimpl
def nxdt_precisions() -> list[Component]:
    """Declare the precisions under NxD Training's names."""
    precisions, bfloat16 = "nxdt_core.train.precision", ("bf16", "bfloat16", "bf16-mixed", "mixed")
    return [
        Component(
            name="fp32",
            target=f"{precisions}:fp32",
            summary="everything in float32",
            suggested_for=("float32", "32-true", "32", "float", "no"),
        ),
        Component(
            name="mixed_precision",
            target=f"{precisions}:mixed_precision",
            summary="bfloat16 compute; float32 masters, sums of gradients and optimizer state",
            suggested_for=(*bfloat16, "fp16", "float16", "16-mixed"),
        ),
        Component(
            name="mixed_precisionSR",
            target=f"{precisions}:mixed_precision_sr",
            summary="mixed_precision, masters rounded stochastically to the bfloat16 that is computed with",
            aliases=("mixed_precision_SR",),
        ),
        Component(
            name="bf16SR",
            target=f"{precisions}:bf16_sr",
            config=f"{precisions}:BF16SRConfig",
            summary="bfloat16 weights and gradients without masters, updates rounded stochastically",
            suggested_for=("bf16-true",),
        ),
        Component(
            name="autocast",
            target=f"{precisions}:autocast",
            summary="float32 parameters, bfloat16 compute under torch.autocast",
            suggested_for=(*bfloat16, "amp"),
        ),
        Component(
            name="manual",
            target=f"{precisions}:manual",
            config=f"{precisions}:ManualConfig",
            summary="by NxD Training's switches: master_weights, fp32_grad_acc, xla_downcast_bf16, ...",
        ),
    ]


@hookimpl
def nxdt_stores() -> list[StoreComponent]:
    """Declare the local file system."""
    return [
        StoreComponent(
            name="local",
            target="nxdt_core.checkpoint.stores.local:LocalStorage",
            config="nxdt_core.config.schema:LocalStorageConfig",
            summary="a directory; atomic rename, files and directories fsynced",
            uri_schemes=("file",),
        )
    ]


@hookimpl
def nxdt_formats() -> list[Component]:
    """Declare Hugging Face directories."""
    summary = "a Hugging Face directory with config.json and safetensors weights"
    return [Component(name="hf", target="nxdt_core.hf:HFFormat", summary=summary)]


@hookimpl
def nxdt_objectives() -> list[Component]:
    """Declare next-token prediction."""
    return [
        Component(
            name="causal_lm",
            target="nxdt_core.models.loss:CausalLM",
            config="nxdt_core.config.schema:CausalLMConfig",
            summary="cross-entropy of the next token, over labels that are not -100",
        )
    ]


@hookimpl
def nxdt_engines() -> list[EngineComponent]:
    """Declare the engine on stock torch."""
    layout = ("dp", "tp", "pp", "cp", "ep")
    step = ("adapters", "frozen_model", "recompute", "compile", "param_groups", "precision")
    return [
        EngineComponent(
            name="torch",
            target="nxdt_core.engine.engine:TorchEngine",
            summary="stock torch.distributed on any device type that torch knows",
            capabilities=frozenset((*layout, *step)),
            rules="nxdt_core.engine.layout_rules:find_impossible_layouts",
        )
    ]


@hookimpl
def nxdt_callbacks() -> list[Component]:
    """Declare the callbacks."""
    return _components(
        "nxdt_core.run.",
        "nxdt_core.run.",
        (
            *("generations", "callbacks.generations:Generations", "callbacks.config:GenerationsConfig"),
            "what the model writes behind some prompts, at each validation",
        ),
        ("tensorboard", "loggers:TensorBoard", "", "TensorBoard event files in the run's directory"),
        ("wandb", "loggers:Wandb", "loggers:WandbConfig", "Weights & Biases; needs nxdt-core[wandb]"),
        ("mlflow", "loggers:MLflow", "loggers:MLFlowConfig", "MLflow; needs nxdt-core[mlflow]"),
    )


@hookimpl
def nxdt_launchers() -> list[Component]:
    """Declare the schedulers, and the variables of processes that others have started."""
    return _components(
        "nxdt_core.launch.launchers.",
        "nxdt_core.launch.launchers.config:",
        ("slurm", "slurm:SlurmLauncher", "SlurmOptions", "write a batch job for Slurm, which starts tasks with srun"),
        (
            *("kubernetes", "kubernetes:KubernetesLauncher", "KubernetesOptions"),
            "write an indexed Job for Kubernetes, or Kubeflow's TrainJob or PyTorchJob",
        ),
        (
            *("hyperpod", "slurm:HyperPodLauncher", "HyperPodOptions"),
            "write a job for SageMaker HyperPod, with Slurm or EKS",
        ),
        ("local", "local:LocalLauncher", "LocalOptions", "run the nodes as processes of this machine"),
        (
            *("environment", "local:EnvironmentLauncher", ""),
            *("RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them", "torchrun"),
        ),
        ("mpi", "local:MPILauncher", "", "variables of mpirun: Open MPI, MVAPICH, MPICH, Intel MPI"),
    )
