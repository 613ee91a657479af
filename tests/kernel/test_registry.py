"""Names lead to one component, or to an error that says what to write instead."""

from __future__ import annotations

import pytest
from nxdt_testing.errors import raises

from nxdt_core.errors.plugins import AmbiguousComponent, ComponentUnusable, UnknownComponent, UnknownKind, UnknownScheme
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.registry import offering_dist, reading_model

STORE = """
    from nxdt_core.api import StoreComponent, hookimpl

    @hookimpl
    def nxdt_stores():
        return [StoreComponent(name={name!r}, target="m:f", uri_schemes=("tape", {name!r}))]
"""


def test_a_name_or_an_alias_finds_the_component(site):
    registry = site.start().registry
    assert registry.get("schedule", "cosine") is registry.get("schedule", "CosineAnnealing")
    assert registry.get("schedule", "builtin:cosine") is registry.get("schedule", "nxdt-core:CosineAnnealing")


@pytest.fixture
def two_wolves(site):
    site.add_optimizer("nxdt-plugin-a", "wolf")
    site.add_optimizer("nxdt-plugin-b", "wolf")
    return site


def test_two_plugins_with_one_name_are_ambiguous_and_the_error_names_both_and_the_ways_out(two_wolves):
    with raises(AmbiguousComponent) as caught:
        two_wolves.start(strict=True).registry.get("optimizer", "wolf")
    assert "nxdt-plugin-a 1.0 and nxdt-plugin-b 1.0" in str(caught.value)
    assert "'a:wolf' or 'b:wolf'" in str(caught.value)
    assert "plugins.prefer" in str(caught.value)


@pytest.mark.parametrize("name", ["b:wolf", "nxdt-plugin-b:wolf", "nxdt_Plugin.B:wolf"])
def test_a_qualified_name_is_not_ambiguous(two_wolves, name):
    assert two_wolves.start().registry.get("optimizer", name).dist == "nxdt-plugin-b"


@pytest.mark.parametrize("prefer", [("b",), ("nxdt-plugin-b", "a"), ("absent", "b")])
def test_prefer_decides_in_its_order(two_wolves, prefer):
    assert two_wolves.start(prefer=prefer).registry.get("optimizer", "wolf").plugin == "b"


def test_what_is_offered_twice_is_listed_once_by_name_and_twice_in_all(two_wolves, contributed):
    kernel = two_wolves.start()
    assert kernel.registry.names("optimizer").count("wolf") == 1
    assert contributed(kernel) == ["a:wolf", "b:wolf"]


def test_nobody_overrides_a_built_in(site):
    site.add_optimizer("nxdt-plugin-a", "adamw")
    with raises(AmbiguousComponent, match="'builtin:adamw' or 'a:adamw'"):
        site.start().registry.get("optimizer", "adamw")


def test_two_distributions_with_one_plugin_name_are_told_apart_by_distribution(site):
    for dist in ("first-wolf", "second-wolf"):
        site.add_optimizer(dist, "wolf", plugins={"wolf": dist.replace("-", "_")})
    registry = site.start(strict=True).registry
    for name in ("wolf", "wolf:wolf"):
        with raises(AmbiguousComponent, match="'first-wolf:wolf' or 'second-wolf:wolf'"):
            registry.get("optimizer", name)
    assert registry.get("optimizer", "second-wolf:wolf").dist == "second-wolf"


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("novogard", "'novograd'"),
        ("NOVOGRAD", "'novograd'"),
        ("builtin:novogra", "'builtin:novograd'"),
        ("builtn:novograd", "'builtin:novograd'"),
    ],
)
def test_an_unknown_name_is_answered_with_close_ones(site, name, close):
    with pytest.raises(UnknownComponent) as caught:
        site.start().registry.get("optimizer", name)
    assert f"Did you mean {close}" in caught.value.do()
    assert "model.optim.name" in caught.value.what()
    assert "pip install" not in str(caught.value)


def test_an_unknown_name_of_a_known_plugin_is_answered_with_the_pip_command(site):
    with pytest.raises(UnknownComponent, match="pip install nxdt-plugin-mixtral"):
        site.start().registry.get("model", "Mixtral")
    with pytest.raises(UnknownComponent, match="pip install nxdt-plugin-sft-chat"):
        site.start().registry.get("dataset", "sft_chat")


@pytest.mark.parametrize(
    ("options", "policy", "words"),
    [
        ({"source": "1 / 0"}, {}, "is broken: importing 'nxdt_plugin_mixtral' raised ZeroDivisionError"),
        ({}, {"block": ("mixtral",)}, "is blocked: named in plugins.block"),
        ({"requires": ["nxdt-core>=999"]}, {}, "is incompatible: requires nxdt-core>=999"),
        ({"metadata": ""}, {}, "is corrupt: METADATA is missing"),
    ],
)
def test_an_installed_plugin_that_cannot_be_used_is_named_instead(site, options, policy, words):
    site.add("nxdt-plugin-mixtral", **options)
    site.add("nxdt-plugin-other", "raise ValueError('unrelated')")
    with pytest.raises(UnknownComponent) as caught:
        site.start(**policy).registry.get("model", "mixtral")
    assert words in caught.value.what()
    assert "unrelated" not in caught.value.what()
    assert "pip install" not in caught.value.do()


def test_a_name_that_nobody_is_known_for_lists_every_unusable_plugin(site):
    site.add("nxdt-plugin-one", "1 / 0")
    site.add("nxdt-plugin-two", "1 / 0")
    with pytest.raises(UnknownComponent) as caught:
        site.start().registry.get("model", "something")
    assert len(caught.value.unusable) == 2


@pytest.mark.parametrize(
    ("architecture", "dist"),
    [
        ("Qwen3ForCausalLM", "nxdt-plugin-llama"),
        ("Gemma3ForCausalLM", "nxdt-plugin-hf"),
        ("MixtralForCausalLM", "nxdt-plugin-mixtral"),
        ("MistralForCausalLM", "nxdt-plugin-llama"),
        ("GPT2LMHeadModel", "nxdt-plugin-gpt"),
        ("WhisperForConditionalGeneration", None),
    ],
)
def test_an_architecture_that_nobody_reads_is_answered_with_the_distribution_to_install(site, architecture, dist):
    assert site.start().registry.readers([architecture]) == ()
    assert site.start().registry.reading_dists([architecture]) == (dist, ())


def test_a_reader_that_is_blocked_is_named_instead(site):
    site.add("nxdt-plugin-hf")
    install, (sentence,) = site.start(block=("nxdt-plugin-hf",)).registry.reading_dists(["Gemma3ForCausalLM"])
    assert install is None
    assert "nxdt-plugin-hf 1.0) is blocked" in sentence


def test_what_is_known_of_readers_is_what_the_plugins_say():
    for component in Kernel.start().registry.all("model"):
        for architecture in component.record.hf_architectures:
            if offering_dist("model", component.record.name):
                assert reading_model(architecture.replace("*", "Any")) == component.record.name


def test_an_unknown_kind_is_answered_with_the_kinds(site):
    registry = site.start().registry
    for call in (lambda: registry.get("optimiser", "adamw"), lambda: registry.names("optimiser")):
        with raises(UnknownKind, match="Did you mean 'optimizer'"):
            call()


def test_a_scheme_finds_its_store(site):
    site.add("nxdt-plugin-tape", STORE.format(name="reel"))
    registry = site.start(strict=True).registry
    assert registry.storage_for_scheme("tape") is registry.get("store", "tape:reel")
    assert registry.storage_for_scheme("TAPE").record.name == "reel"
    assert registry.storage_for_scheme("file").record.name == "local"


def test_a_scheme_of_two_stores_is_ambiguous_unless_preferred(site):
    site.add("nxdt-plugin-a", STORE.format(name="one"))
    site.add("nxdt-plugin-b", STORE.format(name="two"))
    with raises(AmbiguousComponent, match="'a:one' or 'b:two'"):
        site.start().registry.storage_for_scheme("tape")
    assert site.start(prefer=("b",)).registry.storage_for_scheme("tape").record.name == "two"


def test_an_unknown_scheme_is_answered_with_the_known_ones_and_the_pip_command(site):
    with raises(UnknownScheme) as caught:
        site.start().registry.storage_for_scheme("s3")
    assert "pip install nxdt-plugin-s3" in caught.value.do()
    assert "file://" in caught.value.do()
    site.add("nxdt-plugin-s3", "1 / 0")
    with raises(UnknownScheme, match=r"'s3' \(nxdt-plugin-s3 1\.0\) is broken"):
        site.start().registry.storage_for_scheme("s3")


def test_an_error_survives_the_way_between_processes(two_wolves):
    import pickle

    with raises(AmbiguousComponent) as caught:
        two_wolves.start().registry.get("optimizer", "wolf")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [({"block": ("tape",)}, "Take it out of plugins.block."), ({"allow": ()}, "Name it in plugins.allow.")],
)
def test_a_blocked_plugin_is_let_in_by_the_key_that_blocks_it(site, policy, remedy):
    site.add("nxdt-plugin-tape", "")
    with pytest.raises(UnknownComponent) as caught:
        site.start(**policy).registry.get("adapter", "tape")
    assert caught.value.do() == remedy


LOCAL_LION = """
from nxdt_core.api import Component, hookimpl

@hookimpl
def nxdt_optimizers():
    return [Component(name="wolf", target="absent_module:build")]
"""


def test_local_files_with_one_name_are_ambiguous_by_their_files(site, tmp_path):
    files = (tmp_path / "one.py", tmp_path / "two.py")
    for file in files:
        file.write_text(LOCAL_LION)
    with raises(AmbiguousComponent, match=r"by several plugins: the local file one\.py and the local file two"):
        site.start(local=files).registry.get("optimizer", "wolf")


def test_a_target_that_a_local_file_names_wrongly_is_answered_with_its_own_name(site, tmp_path):
    file = tmp_path / "one.py"
    file.write_text(LOCAL_LION)
    with pytest.raises(ComponentUnusable) as caught:
        site.start(local=(file,)).registry.get("optimizer", "wolf").load_target()
    assert caught.value.do() == (
        "In a local plugin file write target=f'{__name__}:Name'; its record gives target='absent_module:build'."
    )
