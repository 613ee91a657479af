"""The keys of ``objective:`` that belong to this plugin. Importing this costs nothing: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from nxdt_core.config.section import Fraction, NamesModel, PositiveInt, Section


class DistillConfig(Section):
    """``objective: {name: distill}``: the model learns the distributions of a teacher on the tokens of the data.

    The loss of a token is (1 − ``kd_ratio``) · cross-entropy + ``kd_ratio`` · divergence.
    """

    teacher: Annotated[str, NamesModel()]
    """Address of the teacher: the directory of a run, the address of its checkpoints or of one of them
    (``…/step-500``), a Hugging Face directory, or a model of the hub (``hf:owner/name``). It may be of another size and
    architecture; ids must mean the same tokens."""
    teacher_config: str | None = None
    """YAML file or ``recipe:NAME`` that decides what the teacher is, in place of the configuration at its address.
    ``nxdt plan`` then needs no weights of the teacher."""
    kd_ratio: Fraction = 0.5
    """Share of the divergence in the loss, by torchtune's name; the rest is the cross-entropy of the labels."""
    beta: Fraction = 0.0
    """Direction of the divergence, as in TRL: 0 is the forward KL, KL(teacher ‖ student); 1 is the reverse KL; between
    them is the generalized Jensen-Shannon divergence, whose mixture has this share of the teacher."""
    temperature: float = 1.0
    """Divides the logits of both models, in the divergence alone. The divergence is not multiplied by its square."""
    top_k: PositiveInt | None = None
    """Compare only the teacher's ``k`` most likely tokens, whose probabilities are normalised to 1. Needs ``beta`` 0:
    the others have no probability, to which the reverse KL would be infinite. ``null``: all tokens."""
    on_policy: Fraction = 0.0
    """Share of the training steps that take answers of the model itself to the prompts of the data, as TRL's ``lmbda``.
    Their loss is the divergence alone. Needs conversations without packing."""
    max_completion_length: PositiveInt = 256
    """Tokens of such an answer at most. Prompt and answer fit into ``data.seq_length``; longer prompts are an error."""
    check_tokenizer: bool = True
    """Stop where the teacher's tokenizer is known to differ from that of the data."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work, as (key, message)."""
        if not 0 < self.temperature < float("inf"):
            yield "temperature", f"{self.temperature} divides logits: it must be a number above 0"
        if self.top_k is not None and self.beta > 0:
            yield "top_k", f"beta is {self.beta}, and tokens that the teacher gives no probability allow 0 alone"
