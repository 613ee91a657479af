"""``base``: files that build on other files and on recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.errors.configuration import ConfigError


def write(**files):
    for name, text in files.items():
        path = Path(name.replace("__", "/") + ".yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_a_file_says_only_in_what_it_differs(load, good):
    write(common=good)
    resolved = load("base: common.yaml\ntrainer:\n  devices: 4\nmodel:\n  optim:\n    lr: 0.5\n")
    assert (resolved.run.trainer.devices, resolved.run.trainer.max_steps) == (4, 100)
    assert resolved.run.model.optim.lr == 0.5
    assert str(resolved.origins["trainer.devices"]) == "run.yaml:3"
    assert str(resolved.origins["trainer.max_steps"]) == f"{Path('common.yaml').absolute()}:3"
    assert resolved.run.base is None


def test_bases_have_bases_and_the_nearest_wins(load, good):
    write(lowest=good, middle="base: lowest.yaml\ntrainer: {max_steps: 7, devices: 2}\n")
    resolved = load("base: middle.yaml\ntrainer: {max_steps: 8}\n", "seed=3")
    assert (resolved.run.trainer.max_steps, resolved.run.trainer.devices, resolved.run.seed) == (8, 2, 3)


def test_a_null_takes_a_value_of_the_base_back(load, good):
    write(common=good + "compiler_cache_url: /graphs\n")
    assert load("base: common.yaml\ncompiler_cache_url: null\n").run.compiler_cache_url is None


def test_a_section_whose_lines_are_commented_out_is_that_of_the_base(load, good):
    write(common=good + "checkpoint: {resume_if_exists: true}\n")
    base = load("base: common.yaml\nname: run\n")
    assert load("base: common.yaml\nname: run\ncheckpoint:\n  # max_to_keep: 1\nmodel:\n  optim:\n").run == base.run
    assert base.run.checkpoint.resume_if_exists
    assert not load("base: common.yaml\nname: run\ncheckpoint: null\n").run.checkpoint.resume_if_exists


def test_a_resolved_configuration_stands_alone(load, good, kernel):
    write(common=good)
    resolved = load("base: common.yaml\n")
    Path("common.yaml").unlink()
    assert config.load(resolved.to_dict(), kernel=kernel) == resolved


def test_relative_paths_start_at_the_file_that_names_them(load, good):
    write(sub__common=good.replace("seq_length", "files: [here.txt]\n  seq_length"))
    above, here = load("base: sub/common.yaml\n"), load("base: sub/common.yaml\ndata: {files: [here.txt]}\n")
    assert above.selected("dataset").config.files == (Path("sub/here.txt").absolute(),)
    assert here.selected("dataset").config.files == (Path("here.txt").absolute(),)


def test_a_path_that_follows_another_key_starts_where_that_key_was_set(load, good):
    files = "files: ['${checkpoint.resume_from}', '${checkpoint.resume_from}/more.txt']\n  seq_length"
    write(sub__common=good.replace("seq_length", files) + "checkpoint: {resume_from: runs/a}\n")
    for overrides, where in (((), "sub/runs/a"), (("checkpoint.resume_from=b",), "b")):
        found = load("base: sub/common.yaml\n", *overrides).selected("dataset").config.files
        assert found == (Path(where).absolute(), Path(where, "more.txt").absolute())


def test_addresses_to_read_from_start_there_too(load, good):
    sign = "sign: {key: own.pem, trusted: [a.pem, ~/b.pem]}"
    write(sub__common=good + f"checkpoint: {{resume_from: runs/a, {sign}}}\nexp_manager: {{files_to_copy: [n.txt]}}\n")
    resolved = load("base: sub/common.yaml\n")
    kept, sub = resolved.run.checkpoint, Path("sub").absolute()
    assert (kept.resume_from, kept.sign.key) == (f"{sub}/runs/a", f"{sub}/own.pem")
    assert kept.sign.trusted == (f"{sub}/a.pem", str(Path("~/b.pem").expanduser()))
    assert resolved.run.exp_manager.files_to_copy == (f"{sub}/n.txt",)
    there = load("base: sub/common.yaml\n", "checkpoint.resume_from=here", "checkpoint.sign.key=s3://b/k")
    assert there.run.checkpoint.resume_from == str(Path("here").absolute())
    assert there.run.checkpoint.sign.key == "s3://b/k"


def test_a_mapping_has_a_base_too(load, good, kernel):
    write(common=good)
    load(good)  # goes to the directory of the file
    assert config.load({"base": "common.yaml", "seed": 5}, kernel=kernel).run.seed == 5


def test_a_recipe_is_a_base():
    resolved = config.load({"base": "recipe:llama-tiny", "name": "mine"})
    assert resolved.run.name == "mine"
    assert str(resolved.origins["trainer.max_steps"]).startswith("recipe:llama-tiny:")


def test_a_file_without_a_name_is_called_after_itself_and_not_after_its_base(load, good, kernel):
    bare = good.replace("name: run\n", "")
    assert "name: run" in good
    write(common=bare, named=good.replace("name: run", "name: theirs"))
    for text, name in (
        (bare, "run"),
        ("base: common.yaml\n", "run"),
        ("base: named.yaml\n", "theirs"),
    ):
        resolved = load(text)
        assert resolved.run.name == resolved.run.exp_manager.name == name
    assert str(load(bare).origins["name"]) == "default of the file's name"
    assert config.load(resolved.to_dict(), kernel=kernel).run.name == "theirs"


def test_a_mapping_without_a_name_is_called_after_its_base_or_refused(good, load, kernel):
    assert config.load({"base": "recipe:llama-tiny"}).run.name == "llama-tiny"
    mapping = load(good).to_dict()
    del mapping["name"]
    (problem,) = [each for each in config.check(mapping, kernel=kernel) if each.key == "name"]
    assert "name" in problem.row()


def test_the_policy_of_a_file_decides_who_brings_its_base():
    (problem,) = config.check({"base": "recipe:llama-tiny", "plugins": {"block": ["nxdt-plugin-llama"]}})
    assert problem.row().startswith(
        "mapping: base: the recipe 'llama-tiny' belongs to a plugin that is not used: 'llama'"
    )
    assert "is blocked: named in plugins.block. " in problem.row()
    assert "Change plugins.block or plugins.allow to use it." in problem.row()
    for named in ("recipe:llama:llama-tiny", "recipe:llama-tiny"):
        (problem,) = config.check({"base": named, "plugins": {"allow": ["nxdt-plugin-text"]}})
        assert "is blocked: " in problem.row()


SCHEDULE = "model: {optim: {sched: {name: cosine, warmup_steps: 3, min_lr: 0.001, constant_steps: 2}}}\n"


def test_another_component_takes_the_keys_of_the_first_with_it(load, good):
    write(common=good, middle=f"base: common.yaml\n{SCHEDULE}")
    resolved = load("base: middle.yaml\nmodel: {optim: {sched: {name: constant}}}\n")
    assert resolved.selected("schedule").component.record.name == "constant"
    assert "model.optim.sched.min_lr" not in resolved.origins
    assert resolved.selected("schedule").config.warmup_steps == 3, "both have it"
    (note,) = [note for note in resolved.notes if "replaces" in note]
    assert note == (
        "model.optim.sched.name: 'constant' replaces 'cosine', whose keys are left out: min_lr, constant_steps"
    )


def test_so_does_one_that_an_override_names(load, good):
    write(common=good, middle=f"base: common.yaml\n{SCHEDULE}")
    resolved = load("base: middle.yaml\n", "model.optim.sched.name=constant", "model.optim.sched.warmup_steps=1")
    assert "model.optim.sched.min_lr" not in resolved.origins
    assert resolved.selected("schedule").config.warmup_steps == 1


def test_null_takes_a_key_back_that_the_component_of_the_base_had(load, good):
    write(common=good, middle=f"base: common.yaml\n{SCHEDULE}")
    resolved = load("base: middle.yaml\nmodel: {optim: {sched: {name: constant, min_lr: null}}}\n")
    assert "model.optim.sched.min_lr" not in resolved.origins


def test_another_store_takes_the_keys_of_the_first_with_it_even_where_the_address_chooses_it(load, good):
    write(common=good + "checkpoint: {uri: memory://a, storage: {parts: 2}}\n")
    resolved = load("base: common.yaml\ncheckpoint: {uri: here}\n")
    assert resolved.selected("store").component.record.name == "local"
    assert "checkpoint.storage.parts" not in resolved.origins


def test_a_key_that_is_given_together_with_the_component_must_be_one_of_its_keys(report, good):
    write(common=good, middle=f"base: common.yaml\n{SCHEDULE}")
    rows = report("base: middle.yaml\nmodel: {optim: {sched: {name: constant, min_lr: 0.1}}}\n")
    assert [row for row in rows if "model.optim.sched.min_lr" in row]


def test_a_key_of_nobody_stays_an_unknown_key(report, good):
    write(common=good, middle="base: common.yaml\nmodel: {optim: {sched: {name: cosine, top: 3}}}\n")
    rows = report("base: middle.yaml\nmodel: {optim: {sched: {name: constant}}}\n")
    assert [row for row in rows if "model.optim.sched.top: unknown key" in row]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("base: comon.yaml\n", "run.yaml:1: base: no file '{here}/comon.yaml'. Did you mean '{here}/common.yaml'"),
        ("base: recipe:no\n", "run.yaml:1: base: no plugin has a recipe of that name. 'nxdt recipes list' shows all."),
        (
            "base: package://nobody/x.yaml\n",
            "run.yaml:1: base: found 'package://nobody/x.yaml', but no package 'nobody'",
        ),
        ("base: [common.yaml]\n", "run.yaml:1: base: found ['common.yaml'] (a list); allowed: the path of a YAML file"),
        ("base: around.yaml\n", "{here}/around.yaml:1: base: found 'around.yaml', which is itself based on this file"),
        ("base: broken.yaml\n", "{here}/broken.yaml:2: not valid YAML"),
    ],
)
def test_a_base_that_cannot_be_had_is_told(report, text, row):
    write(common="name: a\n", around="base: around.yaml\n", broken="a: [\n")
    (found,) = report(text)
    assert found.startswith(row.format(here=Path.cwd()))


def test_files_that_are_based_on_one_another_are_told(load):
    write(one="base: two.yaml\n", two="base: one.yaml\n")
    with pytest.raises(ConfigError, match="itself based on this file"):
        load("base: one.yaml\n")


def test_a_mistake_in_a_base_is_told_where_it_stands(report, good):
    write(common=good.replace("max_steps", "max_stepz"))
    rows = report("base: common.yaml\n")
    assert any(row.startswith(f"{Path('common.yaml').absolute()}:3: trainer.max_stepz: unknown key") for row in rows)


def test_an_override_names_no_base(report, good):
    (row,) = report(good, "base=common.yaml")
    assert row.startswith("command line: base: found 'common.yaml' (text); a base is read with the file that names")
