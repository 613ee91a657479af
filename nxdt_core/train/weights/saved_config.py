"""The run that wrote a checkpoint, configured again on one process: for inference, exports and merges.

A checkpoint may come from anyone, so the configuration in it decides a closed list of keys (``_KEPT``) and nothing
else. It loads no plugin file, reads no variable of the environment, and names no address outside its own store. A
configuration that the user names decides in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import nn

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.file_names import MASTER_WEIGHT, step_name, step_of
from nxdt_core.checkpoint.format.manifest import digest
from nxdt_core.config import Origin, ResolvedConfig, load
from nxdt_core.config.huggingface import unusable
from nxdt_core.config.read import interpolations, read_part
from nxdt_core.config.section import keys_of
from nxdt_core.config.tree import Tree, dotted, walk
from nxdt_core.data.chat.templates import ChatKeys, is_template, named_template
from nxdt_core.data.files.paths import RecordFiles
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import sharded_over
from nxdt_core.engine.optim.state import stepped_once, unpacked_state
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.checkpoints import SavedConfigUnusable
from nxdt_core.errors.configuration import ConfigError, ConfigProblem
from nxdt_core.errors.training import OptimizerChanged, OptimizerStateOfShards
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice
from nxdt_core.train import build
from nxdt_core.train.weights.average import AVERAGE

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest, TrustedKeys


_KEPT: tuple[str, ...] = (
    "seed",
    "data.seq_length",
    "data.tokenizer",
    "model",
    "precision",
    "adapter",
    "plugins.prefer",
)
"""Sections and keys that the configuration of a checkpoint decides. Components are those of installed plugins."""
_HERE = ("trainer.accelerator", "parallel_engine", "plugins")
"""Sections and keys that are also taken from a configuration that the user names."""
_OF_TRAINING = ("model.optim", "model.pipeline_cuts", "model.model_config", "model.trainable")
"""Keys of the model that only training reads, and a file whose values the other keys hold."""
_OF_BEFORE = (
    *("model.encoder_seq_length", "model.weight_init_only", "model.fusions", "model.use_cpu_initialization"),
    *("model.qkv_linear", "model.fuse_qkv", "model.transpose_nki_inputs", "model.save_logits"),
    *("model.sliding_window_size", "model.apply_query_key_layer_scaling", "data.tokenizer.use_fast"),
    "adapter.merge_sharded_lora",
)
"""Second names and keys without an effect, which checkpoints hold that were written while the schema had them."""
_BASE = ("checkpoint.resume_from", "checkpoint.weight_init_only")
"""Kept where the checkpoint leaves out the weights below an adapter: they say where its run read them."""
_LONGEST = 1000
"""Entries of a list or mapping that take little time in any case; above all tokens that are added."""
_CHAT = tuple(sorted(keys_of(ChatKeys).keys() - keys_of(RecordFiles).keys()))
ONE_PROCESS: Mapping[str, Any] = {
    "name": "saved",
    "trainer": {"max_steps": 1},
    "exp_manager": {},
    "data": {"name": "none", "micro_batch_size": 1, "global_batch_size": 1},
    "model": {"optim": {"lr": 0.0}},
}
"""Sections that a run needs besides the model. They set one process, since any can load a checkpoint of any layout."""
_OTHERWISE = (
    "A checkpoint does not decide these keys. Where you trust them, name the run's configuration: --config FILE."
)
_NOT_OF_THE_FORM = {"lr", "weight_decay", "param_groups", "sched"}
"""Keys of ``model.optim`` that decide no state."""
_KINDS = (((16, 16), True), ((2, 16, 16), True), ((16, 16), False), ((16,), False))
"""Shapes of parameters that optimizers may treat differently, and whether each is a matrix of a hidden layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """Parts of a checkpoint's run that are needed to use its model."""

    config: ResolvedConfig
    """Configuration on one process, without data, optimizer, callbacks and store. It is not to be written."""
    chat_keys: ChatKeys
    """Settings by which the run's data made text of messages; the defaults if they held none."""


def named_config(path: str | None, trusted: Sequence[str] = ()) -> tuple[ResolvedConfig | None, TrustedKeys | None]:
    """Return the configuration that the user names in place of a checkpoint's, and the keys of which one must have
    signed what is read: ``trusted``, else ``checkpoint.sign.trusted`` of that configuration.

    Args:
        path: a YAML file or ``recipe:NAME``; None leaves it to the checkpoint.
        trusted: files of public keys.

    Raises:
        ConfigError: the configuration is wrong.
    """
    config = None if path is None else load(path)
    if trusted or config is None:
        return config, checkpoint.TrustedKeys(tuple(trusted)) if trusted else None
    return config, build.trusted_keys(config)


def locate(uri: str, config: ResolvedConfig | None) -> tuple[CheckpointStore, int | None]:
    """Return the store and the step of an address, reached as ``config`` says, or with defaults.

    Raises:
        NoBestCheckpoint: as :func:`~nxdt_core.checkpoint.write.retention.with_best` raises it.
    """
    from nxdt_core.checkpoint.write.retention import with_best

    return with_best(uri, checkpoint.locate if config is None else partial(build.locate, config))


def saved_run(manifest: Manifest, *, where: str, config: ResolvedConfig | None = None, base: bool = True) -> SavedRun:
    """Return the run that wrote a checkpoint.

    Args:
        manifest: the committed manifest of the checkpoint.
        where: address of the checkpoint, for messages.
        config: decides in place of the configuration that the checkpoint keeps.
        base: whether the weights that the run began with are needed, where the checkpoint leaves them out.

    Raises:
        SavedConfigUnusable: the model or the tokenizer cannot be built here, or needs what a checkpoint may not
            decide; names the keys.
    """
    without = _BASE if manifest.facts.without_base and base else ()
    try:
        if config is not None:
            return one_process_run(config, without, base_step(manifest))
        saved = _saved_tree(manifest, where)
        tree = _with_keys(saved, (*_KEPT, *without))
        keys = _checked_keys(manifest, saved, tree, where)
        return SavedRun(config=_alone(tree), chat_keys=keys)
    except ConfigError as error:
        files = None if config is not None else _saved_tree(manifest, where).get("plugins.local")
        raise _unusable(error.problems, where, files) from error


def one_process_run(config: ResolvedConfig, more: Sequence[str] = (), step: int | None = None) -> SavedRun:
    """Return the run of ``config`` on one process, as far as using its model needs it.

    Args:
        config: that the user names.
        more: keys to keep in addition.
        step: of the weights below an adapter, where ``checkpoint.resume_from`` is kept and names the root of their run.

    Raises:
        ConfigError: it cannot be used so.
    """
    whole = Tree.of(config.to_values(), Origin(kind="file", where="the configuration"))
    tree = _with_keys(whole, (*_KEPT, *_HERE, *more))
    key = "checkpoint.resume_from"
    began = tree.get(key)
    if began is not None and step is not None and locate(began, config)[1] is None:
        tree.set(key, f"{began.rstrip('/')}/{step_name(step)}", tree.origin(key))
    return SavedRun(config=_alone(tree, config.kernel), chat_keys=build.chat_keys(config))


def _with_keys(whole: Tree, paths: Sequence[str]) -> Tree:
    """Return the tree of the keys that ``paths`` name in ``whole``, without those that nothing here reads."""
    tree, origin = Tree({}, {(): whole.origins[()]}), whole.origins[()]
    for path in paths:
        if path in whole:
            tree.set(path, whole.get(path), origin)
    for path in (*_OF_TRAINING, *_OF_BEFORE):
        tree.remove(path)
    return tree


def _alone(tree: Tree, kernel: Kernel | None = None) -> ResolvedConfig:
    tree.merge(Tree.of(ONE_PROCESS, tree.origins[()]))
    return load(tree.data, kernel=kernel)


def own_run(config: ResolvedConfig) -> SavedRun:
    """Return the run of ``config`` itself, with the text of the chat template in place of its file.

    Raises:
        NxdtError: the file cannot be read.
    """
    keys = build.chat_keys(config)
    template = named_template(keys) if keys.chat_template_file is not None else None
    if template is not None:
        keys = keys.changed(chat_template=template.text, chat_template_file=None)
    return SavedRun(config=config, chat_keys=keys)


def config_to_save(config: ResolvedConfig) -> dict[str, Any]:
    """Return the configuration that a checkpoint keeps: :meth:`ResolvedConfig.to_dict` with the text of the chat
    template in place of its file, which need not be where the checkpoint is used.

    Raises:
        NxdtError: the file cannot be read.
    """
    written, keys = config.to_dict(), build.chat_keys(config)
    if keys.chat_template_file is not None and (keys := own_run(config).chat_keys).chat_template_file is None:
        written["data"] = {**written["data"], "chat_template": keys.chat_template, "chat_template_file": None}
    return written


def saved_adapter(manifest: Manifest, config: ResolvedConfig) -> Mapping[str, Any]:
    """Return the section ``adapter`` that a checkpoint keeps. A reference to the environment has the value that
    ``config`` has for the same reference; others stay as they are written."""
    saved = _saved_tree(manifest)
    for path, text in list(interpolations(saved.get("adapter"))):
        key = ("adapter", *path)
        if config.tree.shown_at(key) == text:
            saved.set(key, config.tree.get(key), saved.origin(key))
    return saved.get("adapter") or {}


def base_step(manifest: Manifest) -> int | None:
    """Return the step that ``checkpoint.resume_from`` names as the checkpoint keeps it; None where it names none."""
    began = _saved_tree(manifest).get("checkpoint.resume_from")
    return step_of(began.rstrip("/").rpartition("/")[2]) if isinstance(began, str) else None


def _saved_tree(manifest: Manifest, where: str = "the checkpoint") -> Tree:
    return Tree.of(manifest.facts.config, Origin(kind="file", where=where))


def _checked_keys(manifest: Manifest, saved: Tree, tree: Tree, where: str) -> ChatKeys:
    """Return the keys of messages that a checkpoint keeps, where neither they nor ``tree`` hold what it may not decide.

    Raises:
        SavedConfigUnusable: they do, or have wrong values, or the model is larger than its weights.
    """
    chat_values = {name: value for name in _CHAT if (value := saved.get(f"data.{name}")) is not None}
    refused = []  # values that using the checkpoint needs and that a checkpoint may not decide
    of_chats = ((("data", *path), text) for path, text in interpolations(chat_values))
    for path, text in (*interpolations(tree.data), *of_chats):
        if not (path == ("data", "chat_template") and is_template(text)):
            refused.append(f"{dotted(path)}: it is the reference {text!r}.")
    if "chat_template_file" in chat_values:
        refused.append(f"data.chat_template_file: it is the file {chat_values['chat_template_file']!r}.")
    began = tree.get("checkpoint.resume_from")
    if isinstance(began, str) and "://" in began and _store(began) not in ("file", _store(where)):
        refused.append(f"checkpoint.resume_from: it is {began!r}, in another store. Name the weights: --base {began}.")
    if refused:
        raise SavedConfigUnusable(where=where, problems=[*refused, _OTHERWISE])
    keys: ChatKeys
    keys, problems = read_part(ChatKeys, chat_values, "data")
    if problems:
        raise _unusable(problems, where)
    wrong = [f"data.{key}: {message}." for key, message in keys.check() if key in _CHAT]
    tensors = sum(map(len, manifest.tensors.values()))
    limits = {"model": (tensors, manifest.size_bytes), "adapter": None}  # whose sizes are compared when it is built
    for section, weights in limits.items():
        if reason := unusable(tree.get(section, {}), weights=weights):
            wrong.append(f"{section}.{reason}")
    rows = max((entry.shape[0] for entry in manifest.tensors.get("model", {}).values() if entry.shape), default=0)
    for path, value in walk(tree.data):
        if isinstance(value, (dict, list)) and len(value) > max(rows, _LONGEST):
            wrong.append(f"{dotted(path)}: it has more entries than a tensor has rows ({rows}).")
    if wrong:
        raise SavedConfigUnusable(where=where, problems=wrong)
    return keys


def _store(uri: str) -> str:
    """Return what two addresses of one store share: the scheme, and the bucket or the host."""
    parts = urlsplit(uri)
    return "file" if parts.scheme in ("", "file") else f"{parts.scheme}://{parts.netloc}"


def _unusable(problems: Sequence[ConfigProblem], where: str, files: Any = None) -> NxdtError:
    lines = [f"{problem.key}: {problem.what()} {problem.do()}".strip() for problem in problems]
    if files:
        lines += [f"plugins.local: its run loaded {files!r}, and no checkpoint loads plugin files.", _OTHERWISE]
    return SavedConfigUnusable(where=where, problems=lines)


def continues_optimizer(config: ResolvedConfig, manifest: Manifest, where: str) -> bool:
    """Return whether the optimizer of ``config`` continues with the state in ``manifest``, the checkpoint ``where``.

    It does where its section of the configuration is that of the checkpoint. Else names of state decide: another
    optimizer must keep exactly those that the checkpoint has, as ``adamw`` and ``adamw_8bit`` do.

    Raises:
        OptimizerChanged: it cannot, and ``checkpoint.optimizer_on_change`` is ``error``.
    """
    saved, now = _saved_tree(manifest).get("model.optim") or {}, config.to_values()["model"]["optim"]
    changed = [key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key)]
    if not set(changed) - _NOT_OF_THE_FORM:
        return True
    by_parameter: dict[str, set[str]] = {}  # names of state in the checkpoint
    for key in manifest.tensors.get("optim", {}):
        parameter, _, leaf = key.rpartition("/")
        if leaf not in (AVERAGE, MASTER_WEIGHT):
            by_parameter.setdefault(parameter, set()).add(leaf.partition("#")[0])
    before = set(map(frozenset, by_parameter.values()))
    selected = config.selected("optimizer")  # and those that it has after a step, of parameters of every kind
    parameters = [nn.Parameter(torch.ones(shape)) for shape, _ in _KINDS]
    shards = [ParameterShard(shape=shape, region=TensorSlice.whole(shape), matrix=matrix) for shape, matrix in _KINDS]
    optimizer = stepped_once(selected.component.load_target(), selected.config, parameters, shards)
    states = [unpacked_state(optimizer, parameter) for parameter in parameters]
    after = {frozenset(str(name) for name, value in state.items() if value is not None) for state in states}
    renamed = saved.get("name", now["name"]) != now["name"]
    if (before == after) if renamed else (before <= after):
        return True
    if config.run.checkpoint.optimizer_on_change == "reset":
        return False
    raise OptimizerChanged(
        where=where,
        saved=_described(saved.get("name"), before),
        found=_described(now["name"], after),
    )


def check_shared_state(
    state: Mapping[str, torch.Tensor | LocalShard],
    weights: Mapping[str, torch.Tensor | LocalShard],
    ranks: RankAgreement,
) -> None:
    """Check that state without its parameter's shape is equal on all ranks that have a shard of the parameter.

    Collective. A checkpoint holds such state once.

    Args:
        state: of the optimizer, as its ``state_dict`` returns it.
        weights: of this rank by name; DTensors or shards where they are sharded.
        ranks: for collectives over all processes of the run.

    Raises:
        OptimizerStateOfShards: some differs; the same on all ranks.
    """
    digests = {}
    for key, value in state.items():
        weight = weights.get(key.rpartition("/")[0])
        if isinstance(weight, LocalShard):
            is_shard = weight.region.shape != weight.shape
        else:
            is_shard = weight is not None and bool(sharded_over(weight))
        if is_shard and type(value) is torch.Tensor:
            value_digest = digest(value.detach().to(HOST).reshape(-1).view(torch.uint8).numpy().tobytes())
            digests[key] = (str(value.dtype), tuple(value.shape), value_digest)
    contents: dict[str, set[object]] = {}
    for of_rank in ranks.all_gather_object(digests):
        for key, content in of_rank.items():
            contents.setdefault(key, set()).add(content)
    differ = sorted(key for key, values in contents.items() if len(values) > 1)
    if differ:
        raise OptimizerStateOfShards(state=differ, problem="differs between ranks that have shards of one parameter")


def _described(name: str | None, states: Iterable[frozenset[str]]) -> str:
    names = sorted({leaf for state in states for leaf in state})
    return f"{name or 'another optimizer'} ({', '.join(names) or 'no state'})"
