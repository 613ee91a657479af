"""Section ``rope_scaling`` of a model, and how a Hugging Face ``config.json`` writes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from nxdt_core.config.section import PositiveInt, Section
from nxdt_core.errors.models import HFFileDamaged, HFUnsupported

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]

_ORIGINAL = "original_max_position_embeddings"
_NEEDED: Mapping[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _ORIGINAL),
    "yarn": (_ORIGINAL,),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}
_OPTIONAL: Mapping[RopeType, tuple[str, ...]] = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
_BY_LENGTH = ("dynamic", "longrope")
_ANY = ("mscale", "mscale_all_dim", "truncate")
"""Keys that may be zero, which is as if they were missing, or false."""


class RopeScalingConfig(Section):
    """Stretches the rotary embedding beyond the context that a model was first trained on."""

    rope_type: RopeType | None = None
    """``linear`` divides all frequencies, ``llama3`` and ``yarn`` the slow ones, ``default`` none. ``longrope`` divides
    each by its own factor, ``dynamic`` raises the base: both by the length of the document."""
    type: RopeType | None = None
    """Older spelling of ``rope_type``."""
    factor: float | None = None
    """Factor by which the context becomes longer. ``yarn`` and ``longrope``: ``null`` for ``max_position_embeddings``
    divided by the original context."""
    low_freq_factor: float | None = None
    """``llama3``: wavelengths above the original context divided by this are scaled in full."""
    high_freq_factor: float | None = None
    """``llama3``: wavelengths below the original context divided by this are kept."""
    original_max_position_embeddings: PositiveInt | None = None
    """The original context in tokens; unused by ``linear``."""
    attention_factor: float | None = None
    """``yarn``, ``longrope``: multiplies queries and keys; ``null`` follows from ``factor`` as in transformers."""
    beta_fast: float | None = None
    """``yarn``: frequencies that turn more often than this within the original context are kept; ``null``: 32."""
    beta_slow: float | None = None
    """``yarn``: frequencies that turn less often than this are divided by ``factor``; ``null``: 1."""
    mscale: float | None = None
    """``yarn``: with ``mscale_all_dim``, the attention factor is the ratio of what both give for ``factor``."""
    mscale_all_dim: float | None = None
    """``yarn``: see ``mscale``."""
    truncate: bool | None = None
    """``yarn``: round the bounds between kept and divided frequencies to whole channels; ``null``: true."""
    short_factor: tuple[float, ...] | None = None
    """``longrope``: divides the frequency of each pair of channels in documents within the original context."""
    long_factor: tuple[float, ...] | None = None
    """``longrope``: the same in longer documents."""

    @property
    def kind(self) -> RopeType:
        """The type, by either spelling."""
        return self.rope_type or self.type or "default"

    @property
    def depends_on_length(self) -> bool:
        """Return whether frequencies depend on the length of the document, beyond the original context."""
        return self.kind in _BY_LENGTH

    def stretch(self, max_positions: int) -> float:
        """Return ``factor`` with its default applied; ``max_positions`` is the longest sequence."""
        if self.factor is not None or self.original_max_position_embeddings is None:
            return self.factor or 1.0
        return max_positions / self.original_max_position_embeddings

    def attention(self, max_positions: int) -> float:
        """Return the factor of cosines and sines (arXiv:2309.00071, section 3.4; that of ``longrope`` is Phi-3's)."""
        factor = self.stretch(max_positions)
        if self.kind in _OPTIONAL and self.attention_factor is not None:
            return self.attention_factor
        if self.kind not in _OPTIONAL or factor <= 1:
            return 1.0
        if self.kind == "longrope":
            assert self.original_max_position_embeddings is not None
            return math.sqrt(1 + math.log(factor) / math.log(self.original_max_position_embeddings))
        scales = (self.mscale, self.mscale_all_dim) if self.mscale and self.mscale_all_dim else (1.0, 0.0)
        above, below = (0.1 * scale * math.log(factor) + 1 for scale in scales)
        return above / below

    def refused(self, max_positions: int) -> Mapping[str, str]:
        """Return the dimension of the mesh along which frequencies cannot be computed, and why: ``refused`` of a plan.

        ``max_positions`` is the longest sequence of the model.
        """
        original = self.original_max_position_embeddings
        if not self.depends_on_length or original is None or max_positions <= original:
            return {}
        reason = (
            f"the rotary frequencies of rope_type {self.kind} follow from the length of each document, of which a rank "
            f"sees a part: it needs max_position_embeddings of at most {original}, the original context"
        )
        return {"cp": reason}

    def problems(self, *, pairs: int, theta: float) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work with ``pairs`` rotated pairs of channels in a head, and the
        base ``theta``."""
        if self.rope_type is None and self.type is None:
            *first, last = get_args(RopeType)
            yield "rope_type", f"is missing: {', '.join(first)} or {last}"
        if self.rope_type is not None and self.type is not None and self.rope_type != self.type:
            yield "type", f"is an older spelling of rope_type, which says {self.rope_type!r}"
        for key in _NEEDED[self.kind]:
            if getattr(self, key) is None:
                yield key, f"is needed by rope_type {self.kind!r}"
        for key in (*_NEEDED[self.kind], *_OPTIONAL.get(self.kind, ())):
            value = getattr(self, key)
            numbers = value if isinstance(value, tuple) else (value,)
            if key not in _ANY and not all(number is None or number > 0 for number in numbers):
                yield key, "must be above 0"
            if isinstance(value, tuple) and len(value) != pairs:
                yield key, f"must have {pairs} numbers, half of head_dim, not {len(value)}"
        if (self.kind == "dynamic" and pairs == 1) or (self.kind == "yarn" and 0 < theta <= 1):
            yield "rope_type", f"must not be {self.kind} with {2 * pairs} rotated channels and a base of {theta:g}"
        if self.kind == "longrope" and self.original_max_position_embeddings == 1:
            yield _ORIGINAL, "must be above 1"
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and low is not None and high is not None and high <= low:
            yield "high_freq_factor", f"must be above low_freq_factor ({low:g})"


def scaling_from_hf(rope: Mapping[str, Any], *, model: str, max_position_embeddings: int) -> dict[str, Any]:
    """Return the keys ``rope_scaling``, a mapping or None, and ``max_position_embeddings`` of a model's section.

    Args:
        rope: the result of :func:`rope_of`, with the keys of older files.
        model: name of the model for the error message.
        max_position_embeddings: that of the file, which is the original context where a scaling does not give one. That
            of ``dynamic`` always is: transformers reads no other.

    Raises:
        HFUnsupported: the file asks for another type, or rotates only some channels of a head.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    types = get_args(RopeType)
    if kind not in types:
        *first, last = (repr(name) for name in types)
        raise HFUnsupported(model=model, key="rope_type", found=kind, supported=f"{', '.join(first)} and {last}")
    partial = rope.get("partial_rotary_factor")
    if partial not in (1.0, None):
        raise HFUnsupported(model=model, key="partial_rotary_factor", found=partial, supported="1.0")
    longest = {"max_position_embeddings": max_position_embeddings}
    if kind == "default":
        return {"rope_scaling": None, **longest}
    keys = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    scaling = {"rope_type": kind} | {key: rope[key] for key in keys if rope.get(key) is not None}
    if kind == "dynamic":
        scaling[_ORIGINAL] = max_position_embeddings
        longest = {"max_position_embeddings": int(max_position_embeddings * number_of(rope, "factor", 1.0))}
    elif _ORIGINAL in keys:
        scaling.setdefault(_ORIGINAL, max_position_embeddings)
    return {"rope_scaling": scaling, **longest}


def scaling_to_hf(scaling: RopeScalingConfig | None) -> dict[str, Any]:
    """Return the key ``rope_scaling`` of a ``config.json``, and ``max_position_embeddings`` where theirs is another."""
    if scaling is None or scaling.kind == "default":
        return {"rope_scaling": None}
    keys = (key for key in (*_NEEDED[scaling.kind], *_OPTIONAL.get(scaling.kind, ())))
    values = {key: getattr(scaling, key) for key in keys if scaling.kind != "dynamic" or key != _ORIGINAL}
    written = {"rope_type": scaling.kind} | {key: value for key, value in values.items() if value is not None}
    longest = {"max_position_embeddings": scaling.original_max_position_embeddings}
    return {"rope_scaling": written, **(longest if scaling.kind == "dynamic" else {})}


def rope_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping that describes the rotary embedding; empty where the file has none.

    transformers 5 writes ``rope_parameters``; 4 wrote ``rope_scaling`` next to ``rope_theta``. Both versions let
    ``rope_scaling`` replace ``rope_parameters`` in a file with both: people add it to extend the context.

    Raises:
        HFFileDamaged: it is not a mapping.
    """
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf_config.get(key)
        if rope and not isinstance(rope, Mapping):
            raise HFFileDamaged(path="config.json", reason=f"{key} must be a mapping or null, and is {rope!r}")
        if rope:
            return dict(rope)
    return {}


def older_rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in which transformers 4 looks for what ``rope_parameters`` says; empty where a file has none."""
    parameters = hf_config.get("rope_parameters") or {}
    rope, local = (
        parameters.get(kind, other) or {} for kind, other in (("full_attention", parameters), ("sliding_attention", {}))
    )
    older = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if "rope_theta" in local:
        older["rope_local_base_freq"] = local["rope_theta"]
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return older
    name = "type" if kind == "longrope" else "rope_type"  # Phi-3 knows that by its first name alone
    rest = {key: value for key, value in rope.items() if key not in {"rope_type", *older, *hf_config}}
    return older | {"rope_scaling": {name: kind, **rest}}


def number_of(values: Mapping[str, Any], key: str, default: float) -> float:
    """Return the number at ``key``, or ``default`` where there is none.

    Raises:
        HFFileDamaged: it is not a finite number.
    """
    number = values.get(key, default)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise HFFileDamaged(path="config.json", reason=f"{key} must be a finite number, and is {number!r}")
    return float(number)
