"""Entry module: says what the plugin offers. It imports neither torch nor its own implementations."""

from nxdt_core.api import (
    DataloaderComponent,
    LRSchedulerComponent,
    ModelComponent,
    OptimizerComponent,
    PrecisionComponent,
    StorageComponent,
    TokenizerComponent,
    hookimpl,
)


@hookimpl
def nxdt_model_builders() -> list[ModelComponent]:
    """Declare two models from scratch, and one that is made of parts of the core."""
    return [
        ModelComponent(
            name="bigram",
            target="acme_nxdt.model:BigramBuilder",
            config="acme_nxdt.config:BigramConfig",
            capabilities=frozenset({"tp"}),
        ),
        ModelComponent(
            name="acme-decoder",
            target="acme_nxdt.decoder:DecoderBuilder",
            config="acme_nxdt.decoder_config:DecoderConfig",
            capabilities=frozenset({"tp", "sp", "pp", "cp", "lora"}),
        ),
        ModelComponent(
            name="acme-alibi",
            target="acme_nxdt.alibi:AlibiBuilder",
            config="acme_nxdt.alibi_config:AlibiConfig",
            capabilities=frozenset({"tp", "sp", "pp"}),
        ),
    ]


@hookimpl
def nxdt_optimizers() -> list[OptimizerComponent]:
    """Declare an optimizer."""
    config = "acme_nxdt.config:LionConfig"
    target, can = "acme_nxdt.optimizer:Lion", frozenset({"sharded"})  # its update is made element by element
    return [OptimizerComponent(name="acme-lion", target=target, config=config, capabilities=can)]


@hookimpl
def nxdt_checkpoint_storages() -> list[StorageComponent]:
    """Declare a storage backend: ``checkpoint.uri: sqlite://path/to/file.db``."""
    return [StorageComponent(name="sqlite", target="acme_nxdt.store:SQLiteStore", uri_schemes=("sqlite",))]


@hookimpl
def nxdt_dataloaders() -> list[DataloaderComponent]:
    """Declare a dataset."""
    config = "acme_nxdt.config:SumsConfig"
    return [DataloaderComponent(name="sums", target="acme_nxdt.data:Sums", config=config)]


@hookimpl
def nxdt_tokenizers() -> list[TokenizerComponent]:
    """Declare a tokenizer."""
    return [TokenizerComponent(name="digits", target="acme_nxdt.tokenizer:DigitTokenizer")]


@hookimpl
def nxdt_lr_schedulers() -> list[LRSchedulerComponent]:
    """Declare a learning-rate schedule."""
    config = "acme_nxdt.config:InverseSqrtConfig"
    target = "acme_nxdt.schedule:inverse_sqrt"
    return [LRSchedulerComponent(name="inverse_sqrt", target=target, config=config)]


@hookimpl
def nxdt_precision_policies() -> list[PrecisionComponent]:
    """Declare a precision policy."""
    needs = frozenset({"dtype:float64"})
    return [PrecisionComponent(name="fp64", target="acme_nxdt.precision:fp64", requires=needs)]
