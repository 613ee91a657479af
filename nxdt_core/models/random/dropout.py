"""Dropout (Srivastava et al. 2014) by position: which elements of a token's features are kept depends only on the run's
seed, the step, the module, the row of the global batch and the position in the sequence. No layout changes it.

The mask of a row is drawn whole, [sequence, features], and each process takes its part. A process that holds only a
part of the row draws more than it needs, and drawing needs a byte per element. A function of each element, as for
initial weights, would cost more than the layer after the dropout.

For ``torch.compile``, drawing is one operator. It depends on tensors on the host, so that neither a step nor a layer
needs a separate graph.

Rows of experts have masks that are a function of each element, as for stochastic rounding: of the run's seed, the step,
the module, the token's place in the global batch, the expert and the feature. Rows reach an expert in an order that
depends on the layout, and often from other processes, so each row brings the number of its token. A dispatcher moves
these numbers as it moves hidden states: :func:`run_numbered` lets it run once more before, without gradients, over
tokens of eight features that spell them.

Masks of attention probabilities depend on the layout, by salts: every rank of a run has the same global generator, so
that all that is drawn from it agrees. A module with a ``salt`` draws one number there and combines it with its salt, so
that masks differ where an engine sets different salts. Recomputation and a resumed run repeat the masks, since both
restore the generator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import AttentionSemantics, CausalAttention
from nxdt_core.models.random.rounding import noise, rounding_key
from nxdt_core.models.step_boundary import at_step_boundary, step_of
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.step_context import StepContext

_NAME_BYTES = 128
"""Names of modules fill up to a multiple of this, so that those of all layers are tensors of one shape."""

_BYTES = 8
"""Features of a spelled number. Each is a byte, which every dtype of activations holds exactly."""
_LEVELS = 1 << 16
"""Different values of :func:`noise`: probabilities are rounded to this share."""
_SEEDS = 2**62
"""Seeds are a salt and one draw of the global generator below this, on the host."""


def whole_sequence(length: int) -> Sequence[int]:
    """Return :attr:`MaskPart.runs` of a process that holds whole sequences."""
    return 0, length


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPart:
    """A process's part of the mask of one row, for one module; filled by engines."""

    name: torch.Tensor
    """:func:`encoded_name` of the module in the whole model."""
    shards: int = 1
    """Processes that share each sequence in equal parts."""
    runs: Callable[[int], Sequence[int]] = whole_sequence
    """Takes the length of the whole sequence. Returns the runs of neighbouring tokens that this process holds between
    tensor blocks' collectives: beginnings and ends, in one list."""
    sequence_parts: tuple[int, int] = (0, 1)
    """Index of this process's part of these tokens under sequence parallelism, and the number of parts."""
    features: tuple[int, int] | None = None
    """First feature of this process, and the number of features of the whole; None where ``feature_parts`` applies."""
    feature_parts: tuple[int, int] = (0, 1)
    """Index of its part of the features, and the number of equal parts; used where ``features`` is None."""

    def draw(self, hidden: torch.Tensor, p: float | None, step: StepContext) -> torch.Tensor | None:
        """Return what dropout of ``p`` keeps of ``hidden`` [rows, tokens, features], of its shape; for None numbers of
        even probability within ±1, float32. None where no row is known."""
        numbers, ids = step.numbers, step.ids
        if numbers is None or ids is None or hidden.is_meta or hidden.dim() != 3:
            return None
        part, parts = self.sequence_parts
        (rows, tokens), width = ids.shape, hidden.shape[2]
        if hidden.shape[0] != rows or hidden.shape[1] not in (tokens, tokens // parts):
            return None
        length = tokens * self.shards
        feature_part, feature_parts = self.feature_parts
        first_feature, features = self.features or (feature_part * width, feature_parts * width)
        first_token = 0 if hidden.shape[1] == tokens else part * hidden.shape[1]
        kept_share = None if p is None else 1 - p
        place = (list(hidden.shape), [length, features], list(self.runs(length)), first_token, first_feature)
        drawn: torch.Tensor = _position_draw(numbers, self.name, *place, kept_share, hidden.device)
        return drawn


def step_numbers(seed: int, step: int, batch: Batch) -> torch.Tensor | None:
    """Return :attr:`StepContext.numbers` of a micro-batch; None where its place in the global batch is unknown."""
    return None if batch.first_row is None else torch.tensor((seed, step, batch.first_row), device=HOST)


def encoded_name(name: str) -> torch.Tensor:
    """Return the bytes of ``name`` and zeros behind them, on the host."""
    encoded = name.encode()
    return torch.tensor([*encoded, *bytes(-len(encoded) % _NAME_BYTES)], dtype=torch.uint8, device=HOST)


def _decoded_name(name: torch.Tensor) -> str:
    return bytes(name.tolist()).rstrip(b"\0").decode()


@torch.library.custom_op("nxdt::position_draw", mutates_args=())
def _position_draw(
    numbers: torch.Tensor,
    name: torch.Tensor,
    shape: Sequence[int],
    whole: Sequence[int],
    runs: Sequence[int],
    first_token: int,
    first_feature: int,
    kept_share: float | None,
    device: torch.device,
) -> torch.Tensor:
    """Draw for ``shape`` [rows, tokens, features], out of what is drawn for ``whole`` [sequence, features] in each row.

    Args:
        numbers: seed, step and first row.
        name: encoded.
        shape: shape of the result, [rows, tokens, features].
        whole: shape of what is drawn for a row, [sequence, features].
        runs: as :attr:`MaskPart.runs` gives them.
        first_token: index among the tokens of ``runs`` at which the result begins.
        first_feature: index of the result's first feature.
        kept_share: probability with which an element is kept, for a mask (bool); None for uniform numbers within ±1
            (float32).
        device: on which the result is needed.
    """
    seed, step, first_row = numbers.tolist()
    module = _decoded_name(name)
    rows, tokens, width = shape
    drawing = HOST if profile_of(device).host_random else device
    generator = torch.Generator(drawing)
    dtype = torch.float32 if kept_share is None else torch.bool
    out = torch.full(tuple(shape), 0 if kept_share is None else 1, dtype=dtype, device=drawing)
    in_place = [tokens, width] == list(whole)
    for row in range(rows):
        digest = hashlib.blake2b(f"{seed}\0{step}\0{module}\0{first_row + row}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = out[row] if in_place else torch.empty(tuple(whole), dtype=out.dtype, device=drawing)
        if kept_share is None:
            drawn.uniform_(-1.0, 1.0, generator=generator)
        else:
            drawn.bernoulli_(kept_share, generator=generator)
        if not in_place:
            parts = [drawn[begin:end] for begin, end in zip(runs[::2], runs[1::2], strict=True)]
            local = (parts[0] if len(parts) == 1 else torch.cat(parts)).narrow(0, first_token, tokens)
            local = local[:, first_feature : first_feature + width]
            out[row, :, : local.shape[1]] = local  # features that only fill a dimension up get no noise
    return out.to(device)


@_position_draw.register_fake
def _(
    numbers: torch.Tensor, name: torch.Tensor, shape: Sequence[int], whole: Any, runs: Any, *rest: Any
) -> torch.Tensor:
    *_, kept_share, device = rest
    return torch.empty(tuple(shape), dtype=torch.float32 if kept_share is None else torch.bool, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """Numbers of a process's tokens in the global batch; engines put them into dispatchers."""

    shards: int = 1
    """Processes that share each sequence in equal parts; ``runs`` is as in :class:`MaskPart`."""
    runs: Callable[[int], Sequence[int]] = whole_sequence

    def of(self, tokens: int, device: torch.device, step: StepContext) -> torch.Tensor | None:
        """Return int64 [tokens]; None where the rows of the micro-batch are unknown, or it has other tokens."""
        numbers, ids = step.numbers, step.ids
        if numbers is None or ids is None or ids.numel() != tokens or ids.is_meta:
            return None
        rows, columns = ids.shape
        length = columns * self.shards
        runs = self.runs(length)
        places = [torch.arange(begin, end, device=device) for begin, end in zip(runs[::2], runs[1::2], strict=True)]
        row = torch.arange(rows, device=device).unsqueeze(1) + numbers[2]
        return (row * length + torch.cat(places)).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """The masks of one module's rows; filled by engines."""

    name: torch.Tensor
    """:func:`~nxdt_core.models.random.dropout.encoded_name` of the module in the whole model."""
    feature_part: int = 0
    """Index of the part of the features that this process holds; all parts are equal."""

    def draw(self, rows: torch.Tensor, p: float, step: StepContext) -> torch.Tensor | None:
        """Return what dropout of ``p`` keeps of ``rows`` [..., features], of its shape; None where their tokens are
        unknown."""
        numbers, keys = step.numbers, step.expert_rows
        if numbers is None or keys is None or rows.is_meta:
            return None
        width = rows.shape[-1]
        mask: torch.Tensor = _row_mask(numbers, self.name, keys, width, self.feature_part * width, p)
        return mask.view(rows.shape)


def run_numbered(
    run: Callable[[torch.Tensor, Any], torch.Tensor],
    hidden: torch.Tensor,
    experts: Callable[..., torch.Tensor],
    *,
    step: StepContext,
    numbers: torch.Tensor,
    count: int,
    rank: int,
) -> torch.Tensor:
    """Return ``run(hidden, experts)``, within which the dropouts of ``experts`` know the token of each row.

    Args:
        run: moves tokens [..., features] to experts and back; called twice.
        hidden: [..., features], the tokens.
        experts: called with rows, and perhaps with their groups.
        step: of the micro-batch; experts get it at the border, since dispatchers call them with rows alone.
        numbers: int64 [tokens], of :class:`TokenNumbers`.
        count: experts of the whole model.
        rank: which of equal parts of the experts this process has.
    """
    keys: list[torch.Tensor] = []
    shifts = torch.arange(0, 8 * _BYTES, 8, device=numbers.device)

    def spell(rows: torch.Tensor, groups: Any = None) -> torch.Tensor:
        """Keep a number for each row, of its token and its expert: int64 of the shape of ``rows`` without features."""
        tokens = (rows.to(torch.int64) << shifts).sum(-1)
        if groups is None:  # [experts, rows of each]
            local = torch.arange(len(rows), device=rows.device)
            of_rows = local.unsqueeze(1)
        else:
            local = torch.arange(len(groups.counts), device=rows.device)
            of_rows = local.repeat_interleave(groups.counts, output_size=len(rows))
        keys.append(tokens * count + of_rows + rank * len(local))
        return rows

    digits = (numbers.unsqueeze(-1) >> shifts).bitwise_and_(255)
    with torch.no_grad():
        run(digits.to(hidden.dtype).view(*hidden.shape[:-1], _BYTES), spell)
    remaining = iter(keys)

    def numbered(rows: torch.Tensor, *groups: Any) -> torch.Tensor:
        with at_step_boundary(replace(step, expert_rows=next(remaining))):
            return experts(rows, *groups)

    return run(hidden, numbered)


@torch.library.custom_op("nxdt::row_mask", mutates_args=())
def _row_mask(
    numbers: torch.Tensor, name: torch.Tensor, keys: torch.Tensor, width: int, first_feature: int, p: float
) -> torch.Tensor:
    """Draw the mask [*keys, width]. Each row gets two separate words, so that no two rows have shifted masks."""
    seed, step, _ = numbers.tolist()
    module = _decoded_name(name)
    words = [
        torch.tensor(rounding_key(seed, f"{step}\0{module}\0{part}"), dtype=torch.int32, device=keys.device)
        for part in ("token", "step", "feature")
    ]
    low = keys.bitwise_and(0xFFFF_FFFF).to(torch.int32)
    high = (keys >> 32).to(torch.int32)
    start, stride = (_word(low, high, word).unsqueeze(-1) for word in words[:2])
    features = torch.arange(first_feature, first_feature + width, dtype=torch.int32, device=keys.device)
    return noise(start + features * (stride | 1), words[2]) >= round(p * _LEVELS)


@_row_mask.register_fake
def _(
    numbers: torch.Tensor, name: torch.Tensor, keys: torch.Tensor, width: int, first_feature: int, p: float
) -> torch.Tensor:
    return torch.empty(*keys.shape, width, dtype=torch.bool, device=keys.device)


def _word(low: torch.Tensor, high: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each row."""
    upper = noise(low + high * 0x3779B1, key)
    return (upper << 16) | noise(low ^ (upper * 0x5BD1E9), key)


class Salt:
    """A number by which random numbers differ from other modules' and other processes'; None where there is none.

    Held as a tensor on the host: layers that differ in a plain number would each be compiled for themselves.
    """

    def __get__(self, module: Any, owner: type[nn.Module]) -> int | None:
        """Return the salt as an int."""
        return None if module._salt is None else int(module._salt)

    def __set__(self, module: Any, salt: int | None) -> None:
        """Set the salt, from 0 to 2⁶² - 1."""
        module._salt = None if salt is None else torch.tensor(salt, device=HOST)


class Dropout(nn.Module):
    """Zeroes elements with probability ``p`` while training and scales the others by ``1 / (1 - p)``.

    Under an engine the mask of hidden states [rows, sequence, features] is that of their positions
    (:mod:`nxdt_core.models.random.dropout`), the same in every layout.
    """

    salt = Salt()
    """A slot: engines fill it where several ranks run the model."""

    def __init__(self, p: float, *, dispatched: bool = False) -> None:
        """``dispatched``: the inputs are rows of experts, whose order is that of no sequence."""
        super().__init__()
        self.p = p
        self.dispatched = dispatched
        self.part: MaskPart | RowPart | None = None
        """A slot: engines say which part of the masks by position is this process's."""
        self._salt: torch.Tensor | None = None
        self.whole = False
        """A slot: whether tensor parallel ranks hold the same values, though it is in a tensor block."""
        self.features: tuple[int, int] | None = None
        """A slot: where this process's features begin, and how many the whole has, where an engine knows."""

    def forward(self, hidden: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
        """Return ``hidden`` with elements dropped while training; of any shape."""
        if not self.training or self.p == 0:
            return hidden
        mask = None if self.part is None else self.part.draw(hidden, self.p, step_of(step))
        if mask is None:
            if self._salt is None or hidden.is_meta:
                return _dropped(hidden, self.p)
            mask = _seeded_mask(
                torch.randint(_SEEDS, (), device=HOST) ^ self._salt, list(hidden.shape), self.p, hidden.device
            )
        return torch.where(mask, hidden / (1 - self.p), 0)

    def extra_repr(self) -> str:
        """Return the probability, for ``print(model)``."""
        return f"p={self.p}"


class EmbeddingNoise(Dropout):
    """Adds uniform noise within ±``alpha`` / √(tokens · features) to embeddings while training (NEFTune, Jain et al.
    2023, arXiv:2310.05914). Tokens are those of a sequence, padding included; noise is by position, as masks are."""

    def __init__(self, alpha: float) -> None:
        super().__init__(0.0)
        self.alpha = alpha

    def forward(self, hidden: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
        """Return ``hidden`` [rows, tokens, features] with elements dropped while training."""
        if not self.training:
            return hidden
        part, ids, noise, shards = self.part, step_of(step).ids, None, 1
        if isinstance(part, MaskPart):
            noise, shards = part.draw(hidden, None, step_of(step)), part.shards
        tokens = hidden.shape[1] if ids is None else ids.shape[1] * shards
        if noise is None:
            noise = torch.empty_like(hidden, dtype=torch.float32).uniform_(-1, 1)
        return hidden + (noise * (self.alpha / math.sqrt(tokens * hidden.shape[2]))).to(hidden.dtype)

    def extra_repr(self) -> str:
        """Return the strength, for ``print(model)``."""
        return f"alpha={self.alpha}"


class CausalAttentionWithDropout(CausalAttention):
    """Causal attention with dropout of the probabilities."""

    salt = Salt()
    """A slot: engines fill it where several ranks run the model."""

    def __init__(self, p: float, masks: DocumentMasks | None = None) -> None:
        super().__init__(masks)
        self.p = p
        self._salt: torch.Tensor | None = None
        self._attended = _seeded_attention()

    def semantics(self) -> AttentionSemantics:
        """Return the base's semantics with the dropout."""
        return replace(super().semantics(), dropout=self.p)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return :meth:`CausalAttention.forward` with dropout while training."""
        if not self.training:
            return super().forward(query, key, value, document_ids, step)
        mask = None if document_ids is None else self.masks(document_ids, query.dtype, step)
        key, value = self.heads_for(query, key, value, masked=mask is not None)
        if self._salt is None or query.is_meta:
            return _dropped_attention(query, key, value, mask, self.p)
        return self._attended(torch.randint(_SEEDS, (), device=HOST) ^ self._salt, query, key, value, mask, self.p)

    def made(self, document_ids: torch.Tensor, dtype: torch.dtype) -> tuple[str, Any]:
        """Return what :meth:`forward` will ask of the masks: there is no dropout by blocks."""
        if not self.training:
            return super().made(document_ids, dtype)
        return self.masks.MASK, self.masks(document_ids, dtype)


def causal_attention(p: float, masks: DocumentMasks | None = None) -> CausalAttention:
    """Return the core with dropout of probability ``p``; at 0 the one that context parallelism can replace."""
    return CausalAttentionWithDropout(p, masks) if p else CausalAttention(masks)


@contextmanager
def _seeded(seed: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of ``device`` within the block; after it the earlier sequence continues."""
    operations = profile_of(device).operations
    before = operations.rng_state(device)
    with torch.random.fork_rng([], device_type=HOST.type):
        torch.manual_seed(int(seed))
        operations.seed(int(seed))
        try:
            yield
        finally:
            if before is not None:
                operations.set_rng_state(before, device)


def _dropped(hidden: torch.Tensor, p: float) -> torch.Tensor:
    """Return ``hidden`` with dropout, by the generator of its device or, where that has none, of the host."""
    if not profile_of(hidden.device).host_random or hidden.is_meta:
        return functional.dropout(hidden, p)
    mask = torch.empty(hidden.shape, dtype=torch.bool, device=HOST).bernoulli_(1 - p).to(hidden.device)
    return torch.where(mask, hidden / (1 - p), 0)


def _dropped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float
) -> torch.Tensor:
    """Compute attention; from matrix products where the probabilities to drop are drawn on the host."""
    groups = query.shape[1] // key.shape[1]
    if query.is_meta or not profile_of(query.device).host_random:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=p, is_causal=mask is None, enable_gqa=groups > 1
        )
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return _dropped(scores.float().softmax(-1).to(value.dtype), p) @ value


@cache
def _seeded_attention() -> Callable[..., torch.Tensor]:
    """Return :func:`_dropped_attention` under a seed. The decorator imports ``torch._dynamo``, which takes a second:
    only models that drop probabilities call this."""

    @torch.compiler.disable(reason="the kernel draws its mask itself")  # type: ignore[no-untyped-call, untyped-decorator]
    def attended(seed: torch.Tensor, query: torch.Tensor, *others: Any) -> torch.Tensor:
        with _seeded(seed, query.device):
            return _dropped_attention(query, *others)

    return attended  # type: ignore[no-any-return]


@torch.library.custom_op("nxdt::seeded_mask", mutates_args=())
def _seeded_mask(seed: torch.Tensor, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
    """Draw which elements dropout of ``p`` keeps, as torch's own operator draws them."""
    drawing = HOST if profile_of(device).host_random else device
    with _seeded(seed, drawing):
        return (functional.dropout(torch.ones(tuple(shape), device=drawing), p) != 0).to(device)


@_seeded_mask.register_fake
def _(seed: torch.Tensor, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device=device)
