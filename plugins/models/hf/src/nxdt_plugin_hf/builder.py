"""The component ``hf``: builds a model of transformers, and says how it is sharded, initialised and exchanged.

Rules of initialisation and the names of parameters in a directory come from transformers itself: its initialisation and
its conversion are tried on small copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nxdt_core.distributed.devices import HOST, meta_device
from nxdt_core.errors import NxdtError
from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.huggingface import SCORE
from nxdt_core.models.patterns import matches
from nxdt_core.models.rope_scaling import older_rope
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.model import KeyMap, ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_plugin_hf.architecture import Architecture, read_architecture
from nxdt_plugin_hf.config import HFModelConfig
from nxdt_plugin_hf.errors import DirectoryFormUnknown
from nxdt_plugin_hf.facts import ModelFacts
from nxdt_plugin_hf.mixtures import BIAS, STACK
from nxdt_plugin_hf.modeling import CausalLM, build_model, pass_hidden_by_position, pattern_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_facts: dict[tuple[type[Any], str], ModelFacts] = {}
"""Facts by class and configuration."""


_EXPERTS = 2


class HFBuilder(ModelBuilder):
    """A :class:`~nxdt_core.protocols.model.ModelBuilder` of a model of transformers.

    Names of parameters are those of transformers, but for those of experts
    (:class:`nxdt_plugin_hf.mixtures.RoutedExperts`).
    """

    hf_architectures: ClassVar[tuple[str, ...]] = ("*ForCausalLM", "*LMHeadModel", "*ForSequenceClassification")
    hf_may_lack: ClassVar[tuple[str, ...]] = SCORE.hf_names
    hf_ignored: ClassVar[tuple[str, ...]] = ("*.rotary_emb.inv_freq", "lm_head.weight")

    def __init__(self, config: HFModelConfig) -> None:
        """Read the architecture; imports transformers.

        Raises:
            BadModelConfig: values that cannot work together.
            NxdtError: transformers has no such causal language model, or a package is missing.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model="hf", problems=problems)
        self.config = config
        self.architecture: Architecture = read_architecture(config.values, scores=config.score_head)
        self.vocab_size: int = self.architecture.config.vocab_size
        self.max_sequence_length: int | None = getattr(self.architecture.config, "max_position_embeddings", None)

    def build(self) -> CausalLM:
        """Return the whole model, of transformers' class.

        Raises:
            UnsupportedArchitecture, NotACausalLM: it does what cannot be trained here.
        """
        model = build_model(self.architecture, self.facts.calls)
        for path, module in model.named_modules():
            if pattern_of(path) in self.facts.plan.tensor_blocks and path != model.head_path:
                pass_hidden_by_position(module)
        return model

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts that were seen on the model. Builders of the same model share them: a run makes several."""
        key = (self.architecture.model_class, self.architecture.config.to_json_string(use_diff=False))
        if key not in _facts:
            _facts[key] = ModelFacts.of(self.architecture)
        return _facts[key]

    def plan(self) -> ParallelPlan:
        """Return the capabilities by transformers' own plans, as far as they were seen to work."""
        return self.facts.plan

    def init_rules(self) -> Sequence[InitRule]:
        """Return :func:`nxdt_plugin_hf.facts.init_rules` of the model."""
        return self.facts.init_rules

    def flops_per_token(self, sequence_length: int) -> float:
        """Return 6 for each weight that a token is multiplied with (embeddings are looked up), and for each layer 6 for
        each channel of query and value heads and position that is seen: PaLM's convention (arXiv:2204.02311, appendix
        B), within the window where a layer has one."""
        calls = self.facts.calls.values()
        seen = ((call, min(sequence_length, call.window or sequence_length)) for call in calls)
        attention = sum(call.heads * (call.key_width + call.value_width) * positions for call, positions in seen)
        return 6.0 * (self.facts.multiplied + attention)

    def config_to_hf(self) -> dict[str, Any]:
        """Return what transformers would write, with keys that transformers 4 calls otherwise under both names."""
        written: dict[str, Any] = json.loads(self.architecture.config.to_json_string(use_diff=True))
        written.pop("dtype", None)  # of the weights that were read; who writes some says theirs
        written["architectures"] = [self.architecture.name]
        if self.architecture.config.attribute_map.get("num_experts") in written:
            written["num_experts"] = self.architecture.config.num_experts
        if self.architecture.config.model_type.startswith("gpt_neox"):
            rope = older_rope(written)
            written |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
        return written

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return one entry per kind of parameter.

        Raises:
            DirectoryFormUnknown: the directory has some in another form.
        """
        with meta_device():
            model = self.architecture.plain()
        entries: dict[str, KeyMap] = {}
        for name in self.facts.parameters:
            pattern, experts = pattern_of(name), self.facts.experts.get(name.rpartition(".")[0])
            if pattern in entries:
                continue
            if experts is None:
                entries[pattern] = KeyMap(name=pattern, hf_names=(_written(model, name),))
            else:
                entries[pattern] = _written_experts(model, name, experts)
        return tuple(entries.values())


def _written(model: PreTrainedModel, name: str) -> str:
    owner, _, leaf = name.removesuffix(".weight").rpartition(".")
    if leaf in model.get_submodule(owner)._parameters:  # values of heads, which have a module here
        name = name.removesuffix(".weight")
    written = list(_reverted(model, name, torch.zeros(1, device=HOST)))
    if len(written) != 1:
        raise _other_form(model, name)
    return pattern_of(written[0][0])


def _written_experts(model: PreTrainedModel, name: str, experts: str) -> KeyMap:
    """Return the entry of one of our stacks: transformers has gate and up in one matrix, and writes it or its parts."""
    ours, kind = pattern_of(name), name.removeprefix(f"{experts}.{STACK}.")
    side, _, leaf = kind.partition("_")
    number, parts = {"gate": (0, 2), "up": (1, 2), "down": (0, 1)}[side]
    fused = f"{experts}.gate_up_{leaf}" if parts > 1 else f"{experts}.{kind}"
    values = torch.arange(_EXPERTS * parts, dtype=torch.float32, device=HOST).view(_EXPERTS, parts, 1)
    written = dict(_reverted(model, fused, values))
    if len(written) == 1 and torch.equal(next(iter(written.values())), values):
        theirs: Any = model.get_submodule(experts)
        transposed = "_transpose" if theirs.is_transposed and not kind.endswith(BIAS) else ""
        sections = (number, parts, int(not theirs.is_concatenated)) if parts > 1 else ()
        transform = f"part{transposed}" if parts > 1 else transposed.removeprefix("_") or "none"
        return KeyMap(name=ours, hf_names=(pattern_of(*written),), transform=transform, sections=sections)
    paths = {int(tensor): path for path, tensor in written.items() if tensor.shape == (1, 1)}
    mine = [paths.get(int(value)) for value in values[:, number, 0]]
    patterns = {pattern_of(path) for path in mine if path is not None}
    numbered = all(path is not None and f".{expert}." in path for expert, path in enumerate(mine))
    if len(patterns) != 1 or not numbered:
        raise _other_form(model, fused)
    return KeyMap(name=ours, hf_names=(patterns.pop(),), transform="stack")


def _reverted(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that transformers would write for a parameter with the value ``tensor``."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        yield from revert_weight_conversion(model, {name: tensor}).items()
    except Exception as error:  # a conversion may raise anything where another shape is expected
        raise _other_form(model, name) from error


def _other_form(model: PreTrainedModel, name: str) -> NxdtError:
    return DirectoryFormUnknown(model=type(model).__name__, parameter=name)


def measure_sharding(builder: HFBuilder, tp: int, engine: type[ParallelEngine]) -> dict[str, tuple[int, int]]:
    """Return the elements of each parameter, all and those that rank 0 of ``tp`` holds.

    ``engine`` applies the builder's plan in a process that is in no process group.

    Raises:
        LayoutRefused: the plan that the model brings names what cannot be sharded.
        HeadsDoNotDivide, ShardDoesNotDivide, TensorPlanUnusable: of the engine.
    """
    with meta_device():
        sizes = {name: parameter.numel() for name, parameter in builder.build().named_parameters()}
    local = engine.local_elements(builder, MeshSizes(tp=tp))
    return {name: (size, local[name]) for name, size in sizes.items()}


def unmatched_patterns(architecture: Architecture) -> tuple[str, ...]:
    """Return the patterns of transformers' tensor parallel plan that name nothing in the model."""
    with meta_device():
        model = architecture.plain()
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters())]
    return tuple(pattern for pattern in model.tp_plan if not any(matches(pattern, path) for path in paths))
