"""The kernel's own components, registered through the same hooks as any plugin's. No torch here.

Each target is in its own module of this package and is imported when a run asks for it.
"""

from __future__ import annotations

from nxdt_core.api import Component, EngineComponent, StoreComponent, hookimpl
from nxdt_core.train.records import OPTIMIZERS, POLICIES, SCHEDULES

__all__ = ["DEVICE_PROFILES", "LAUNCHERS"]

_TABLE = "nxdt_core.distributed.devices"

DEVICE_PROFILES = (
    Component(name="cpu", target=f"{_TABLE}:CPU", summary="the host"),
    Component(name="cuda", target=f"{_TABLE}:CUDA", summary="GPUs of NVIDIA"),
    Component(name="neuron", target=f"{_TABLE}:NEURON", summary="AWS Trainium under torch-neuronx"),
)


_LAUNCHERS = "nxdt_core.launch.launchers"
_JOIN, _SUBMIT = frozenset({"join"}), frozenset({"submit"})

LAUNCHERS = (
    Component(
        name="slurm",
        target=f"{_LAUNCHERS}.slurm:SlurmLauncher",
        config=f"{_LAUNCHERS}.config:SlurmOptions",
        capabilities=_JOIN | _SUBMIT,
        summary="batch jobs of Slurm, and tasks of srun",
    ),
    Component(
        name="kubernetes",
        target=f"{_LAUNCHERS}.kubernetes:KubernetesLauncher",
        config=f"{_LAUNCHERS}.config:KubernetesOptions",
        capabilities=_SUBMIT,
        summary="Kubernetes: indexed Job, or Kubeflow's TrainJob and PyTorchJob",
    ),
    Component(
        name="hyperpod",
        target=f"{_LAUNCHERS}.hyperpod:HyperPodLauncher",
        config=f"{_LAUNCHERS}.config:HyperPodOptions",
        capabilities=_JOIN | _SUBMIT,
        summary="SageMaker HyperPod with Slurm or EKS",
    ),
    Component(
        name="local",
        target=f"{_LAUNCHERS}.local:LocalLauncher",
        config=f"{_LAUNCHERS}.config:LocalOptions",
        capabilities=_SUBMIT,
        summary="nodes as processes of this machine",
    ),
    Component(
        name="environment",
        target=f"{_LAUNCHERS}.local:EnvironmentLauncher",
        aliases=("torchrun",),
        capabilities=_JOIN,
        summary="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them",
    ),
    Component(
        name="mpi",
        target=f"{_LAUNCHERS}.local:MPILauncher",
        capabilities=_JOIN,
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
        *("adapters", "reference", "recompute", "compile", "param_groups"),
        *("dtype:float64", "dtype:bfloat16", "autocast", "master_weights"),
        *("gradient_dtype", "optimizer_dtype", "stochastic_rounding", "linear_product"),
    }
)


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader for models that are not trained."""
    return [
        Component(
            name="none",
            target="nxdt_core.data.limits:NoData",
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
            target="nxdt_core.checkpoint.hf.source:HFFormat",
            summary="a Hugging Face directory with config.json and safetensors weights",
        )
    ]


@hookimpl
def nxdt_objectives() -> list[Component]:
    """Declare next-token prediction."""
    return [
        Component(
            name="causal_lm",
            target="nxdt_core.train.causal_lm:CausalLM",
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
            target="nxdt_core.train.callbacks.generations:Generations",
            config="nxdt_core.train.callbacks.config:GenerationsConfig",
            summary="what the model writes behind some prompts, at each validation",
        ),
        Component(
            name="tensorboard",
            target="nxdt_core.train.loggers:TensorBoard",
            summary="TensorBoard event files in the run's directory",
        ),
        Component(
            name="wandb",
            target="nxdt_core.train.loggers:Wandb",
            config="nxdt_core.train.loggers:WandbConfig",
            summary="Weights & Biases; needs nxdt-core[wandb]",
        ),
        Component(
            name="mlflow",
            target="nxdt_core.train.loggers:MLflow",
            config="nxdt_core.train.loggers:MLFlowConfig",
            summary="MLflow; needs nxdt-core[mlflow]",
        ),
    ]


@hookimpl
def nxdt_launchers() -> list[Component]:
    """Declare the schedulers, and the variables of processes that others have started."""
    return [*LAUNCHERS]
