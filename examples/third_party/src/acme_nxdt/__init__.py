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
            summary="the next token from this one alone",
            capabilities=frozenset({"tp"}),
        ),
        ModelComponent(
            name="acme-decoder",
            target="acme_nxdt.decoder:DecoderBuilder",
            config="acme_nxdt.decoder_config:DecoderConfig",
            summary="a decoder with rotary positions and a squared ReLU",
            capabilities=frozenset({"tp", "sp", "pp", "cp", "lora"}),
        ),
        ModelComponent(
            name="acme-alibi",
            target="acme_nxdt.alibi:AlibiBuilder",
            config="acme_nxdt.alibi_config:AlibiConfig",
            summary="a decoder with ALiBi",
            capabilities=frozenset({"tp", "sp", "pp"}),
        ),
    ]


@hookimpl
def nxdt_optimizers() -> list[OptimizerComponent]:
    """Declare an optimizer."""
    return [
        OptimizerComponent(
            name="acme-lion",
            target="acme_nxdt.optimizer:Lion",
            config="acme_nxdt.config:LionConfig",
            summary="the sign of an interpolated momentum",
            capabilities=frozenset({"sharded"}),  # its update is made element by element
        )
    ]


@hookimpl
def nxdt_checkpoint_storages() -> list[StorageComponent]:
    """Declare a storage backend: ``checkpoint.uri: sqlite://path/to/file.db``."""
    target, summary = "acme_nxdt.store:SQLiteStore", "one SQLite file"
    return [StorageComponent(name="sqlite", target=target, summary=summary, uri_schemes=("sqlite",))]


@hookimpl
def nxdt_dataloaders() -> list[DataloaderComponent]:
    """Declare a dataset."""
    config, summary = "acme_nxdt.config:SumsConfig", "sums of random numbers"
    return [DataloaderComponent(name="sums", target="acme_nxdt.data:Sums", config=config, summary=summary)]


@hookimpl
def nxdt_tokenizers() -> list[TokenizerComponent]:
    """Declare a tokenizer."""
    target, summary = "acme_nxdt.tokenizer:DigitTokenizer", "one token for each digit and sign"
    return [TokenizerComponent(name="digits", target=target, summary=summary)]


@hookimpl
def nxdt_lr_schedulers() -> list[LRSchedulerComponent]:
    """Declare a learning-rate schedule."""
    config = "acme_nxdt.config:InverseSqrtConfig"
    target, summary = "acme_nxdt.schedule:inverse_sqrt", "linear warm-up, then one over the square root"
    return [LRSchedulerComponent(name="inverse_sqrt", target=target, config=config, summary=summary)]


@hookimpl
def nxdt_precision_policies() -> list[PrecisionComponent]:
    """Declare a precision policy."""
    target, needs = "acme_nxdt.precision:fp64", frozenset({"dtype:float64"})
    return [PrecisionComponent(name="fp64", target=target, requires=needs, summary="everything in float64")]
