"""Entry module: says what the plugin offers. It imports neither torch nor its own implementations."""

from nxdt_core.api import Component, ModelComponent, StoreComponent, hookimpl


@hookimpl
def nxdt_models() -> list[ModelComponent]:
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
def nxdt_optimizers() -> list[Component]:
    """Declare an optimizer."""
    return [
        Component(
            name="acme-lion",
            target="acme_nxdt.optimizer:Lion",
            config="acme_nxdt.config:LionConfig",
            summary="the sign of an interpolated momentum",
            capabilities=frozenset({"sharded"}),  # its update is made element by element
        )
    ]


@hookimpl
def nxdt_stores() -> list[StoreComponent]:
    """Declare a storage backend: ``checkpoint.uri: sqlite://path/to/file.db``."""
    target, summary = "acme_nxdt.store:SQLiteStore", "one SQLite file"
    return [StoreComponent(name="sqlite", target=target, summary=summary, uri_schemes=("sqlite",))]


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare a dataset."""
    config, summary = "acme_nxdt.config:SumsConfig", "sums of random numbers"
    return [Component(name="sums", target="acme_nxdt.data:Sums", config=config, summary=summary)]


@hookimpl
def nxdt_tokenizers() -> list[Component]:
    """Declare a tokenizer."""
    target, summary = "acme_nxdt.tokenizer:DigitTokenizer", "one token for each digit and sign"
    return [Component(name="digits", target=target, summary=summary)]


@hookimpl
def nxdt_schedules() -> list[Component]:
    """Declare a learning-rate schedule."""
    config = "acme_nxdt.config:InverseSqrtConfig"
    target, summary = "acme_nxdt.schedule:inverse_sqrt", "linear warm-up, then one over the square root"
    return [Component(name="inverse_sqrt", target=target, config=config, summary=summary)]


@hookimpl
def nxdt_precisions() -> list[Component]:
    """Declare a precision policy."""
    return [Component(name="fp64", target="acme_nxdt.precision:fp64", summary="everything in float64")]
